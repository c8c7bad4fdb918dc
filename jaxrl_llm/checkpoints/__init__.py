"""The rooms that read and write weights."""
