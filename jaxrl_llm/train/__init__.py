"""The optimizer step: its state, the optimizer, the jitted update and the loop around it."""
