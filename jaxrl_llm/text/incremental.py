"""Text of a growing token sequence, never half a character at a time."""

from collections.abc import Callable, Sequence

_HALF = "\ufffd"  # what tokenizers write for bytes that are no character (yet)


class IncrementalDecoder:
    """Decodes tokens as they come; the pieces joined are `decode` of all of them at once.

    A character may take several tokens, so text that ends in bytes of an unfinished character waits for the tokens
    that finish it, or for the last call. The cost of a piece does not grow with the text before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        # Decoded again with every piece. How a token is written may depend on those before it (SentencePiece drops the
        # spaces a text begins with), so the window begins with tokens whose text is out, and is not spaces alone.
        self._window: list[int] = []
        self._out = 0  # tokens of the window whose text is out

    def add(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """The text that `tokens` add; with `last` whatever waits comes too, whole characters or not."""
        self._window.extend(tokens)
        before, text = self._decode(self._window[: self._out]), self._decode(self._window)
        if len(text) == len(before) or (text.endswith(_HALF) and not last):
            return ""
        new = text[len(before) :]
        if not new.isspace():
            self._window = self._window[self._out :]
        self._out = len(self._window)
        return new
