"""Text in, Reward out."""
