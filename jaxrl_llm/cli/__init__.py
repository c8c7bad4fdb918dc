"""Thin commands: they read configs, join the rooms and print. No arithmetic here."""
