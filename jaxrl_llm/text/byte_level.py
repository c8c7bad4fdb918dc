"""The bytes that a byte-level vocabulary can spell. Byte-level BPE: Radford et al. 2019 (GPT-2)."""

from collections.abc import Container


def bytes_without_token(vocab: Container[str]) -> frozenset[int]:
    """Byte values that no token stands for. Some vocabularies leave out control characters and unusual planes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    # GPT-2's table: a printable Latin-1 byte is its own character, the others follow from U+0100 in order.
    others = [byte for byte in range(256) if byte not in printable]
    char_of = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}
    return frozenset(byte for byte, char in char_of.items() if char not in vocab)
