"""Strings that tokenizers disagree about, from a seed: scripts, digits, white space, control characters, emoji,
combining marks, right-to-left text, special tokens written out, and what they are made of."""

import functools
import random
import zlib
from collections.abc import Callable, Sequence

import numpy as np

_ALPHABETS = {
    "ascii": [chr(i) for i in range(32, 127)],
    "digits": list("0123456789 +-=,.\n"),
    "white": [*" \t\n\r\x0b\x0c\u00a0\u2003\u3000\u2028\u0085a1", "  ", "    ", "\r\n", "\n\n", " \n "],
    "control": [chr(i) for i in range(1, 32)] + ["\x00", "\x7f", "\x85", "\u200b", "\ufeff", "\u00ad", "x", " "],
    "latin": list("\u00e9\u00e8\u00fc\u00f1\u00df\u00e6\u0153\u0130\u0131\ufb01 abc'"),
    "combining": list("e\u0301\u0308a\u030an\u0303\u1ec7\u0323\u0302 \u0345\u20dd"),
    "cyrillic": list("\u043f\u0440\u0438\u0432\u0435\u0442\u0419 "),
    "hebrew": list("\u05e9\u05dc\u05d5\u05dd \u05b0\u200f"),
    "arabic": list("\u0645\u0631\u062d\u0628\u0627 \u064e\u0660\u0661\u200e"),
    "devanagari": list("\u0928\u092e\u0938\u094d\u0924\u0947 \u0967\u200d"),
    "thai": list("\u0e2a\u0e27\u0e31\u0e14\u0e35\u0e04\u0e48 "),
    "cjk": list("\u4f60\u597d\u4e16\u754c\u3042\u30a2\u30fc\ud55c\u1112\u1161\u3002\uff0c\u4e09 "),
    "numbers": list("\u00b2\u00bd\u2167\u2460\u09e9\uff11 1a"),
    "emoji": [*"\U0001f600\u2764\ufe0f ", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1eb\U0001f1f7", "ok"],
    "planes": [*"\U00010348\U0001d11e\U00020000\U000e0041\ufffd\ue000\ufdd0\U0010ffff x"],
    "special": [
        *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<s>", "</s>", "<unk>", "<pad>", "[INST]"),
        *("<bos>", "<eos>", "<start_of_turn>", "<|begin_of_text|>", "<|eot_id|>", "<|end|>", "<think>", "</think>"),
        *("<tool_call>", "<0x41>", "<0xE4>", "<|im_", "|>", "<", "s>", "<|", "user", "\n", " ", "1"),
    ],
    "words": [
        *("the", " the", "don't", "I'LL", "we've", " it's", "'s", "''", "Hello", "WORLD", " _x_", "def f(x):", "3.14"),
        *("return", "aaaaaaaa", "://", "  ", "\n", "."),
    ],
}

_HANDMADE = [
    *("", " ", "  ", "\n", "37 + 25 =", "37 + 25 = 62", "\n\n 1", "\n\n1", "1\n\n", "a  b", "a \n b", " a", "a "),
    *("  leading and trailing  ", "What is the capital of France?", "The capital of France is Paris."),
    *("<|im_start|>user\nhi<|im_end|>\n", "<|im_end|>", "</s>", "<s>[INST] hi [/INST]", "<s></s>", " </s> "),
    *("2024-01-31 12:30:59", "x2y3 4z", "1,234,567.89", "\u00b2\u00b3\u00bd \u0661\u0662", "1000000", "100 000"),
    "don't can't it's I'm you're they've we'll he'd DON'T",
    *("def f(x):\n\treturn x**2\n", "tabs\t\tand\r\nreturns\x0b\x0c\x1b[0m", "na\u00efve caf\u00e9 e\u0301"),
    *("\u4f60\u597d\uff0c\u4e16\u754c", "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f600", "\u0120\u010a"),
    *("\u05e9\u05dc\u05d5\u05dd 123 abc", "https://example.org/?q=a%20b&c=d", '{"a": [1, 2.5e-3, null]}'),
]


@functools.cache
def strings(count: int = 2000, *, without: str = "", seed: int = 0) -> tuple[str, ...]:
    """`count` different strings that hold no character of `without`."""
    source = random.Random(seed)
    out = dict.fromkeys(text for text in _HANDMADE if not set(without) & set(text))
    while len(out) < count:
        names = source.sample(sorted(_ALPHABETS), source.choice([1, 1, 2, 3]))
        alphabet = [unit for name in names for unit in _ALPHABETS[name]]
        text = "".join(source.choices(alphabet, k=source.randint(1, 24)))
        if not set(without) & set(text):
            out[text] = None
    return tuple(out)


def lacking(encode: Callable[[str], object]) -> str:
    """The characters of all strings that `encode` refuses."""
    refused = []
    for char in sorted({*"".join(_HANDMADE), *(char for units in _ALPHABETS.values() for char in "".join(units))}):
        try:
            encode(char)
        except ValueError:
            refused.append(char)
    return "".join(refused)


def digests(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """One number a row of token ids, to keep where the ids of thousands of strings would be too many: uint32 [rows]."""
    return np.array([zlib.crc32(np.array(row, "<i4").tobytes()) for row in rows], np.uint32)
