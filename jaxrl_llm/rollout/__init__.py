"""From prompts to train batches: lag slots, the sampling thread, packing."""
