"""What turns a completion into an episode."""
