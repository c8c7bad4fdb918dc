"""What a run directory tells: its summary, its forecast and its HTML report, from the files alone."""
