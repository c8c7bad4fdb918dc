"""Decoding: a JetStream-API engine whose log-probabilities are the denominators of every ratio, and its scheduler."""
