"""A run without hardware: trainer, samplers and network on a virtual clock around the real coordinator, ledger, weight
board and batching. It tests the rules on random schedules and predicts how long real runs take."""
