"""Prompts and the books kept about them."""
