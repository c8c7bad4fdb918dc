"""Small tokenizers with the pipelines of published families, written as Hugging Face folders.

Every stage is the family's; the vocabulary is ours: the bytes or characters, and a chain of merges for each of a few
words. Among them are the pieces of special tokens ("<s" + ">"), which some published vocabularies hold too.
"""

import json
from pathlib import Path

_WORDS = [
    *("the", "hello", "Hello", "return", "user", "assistant", "system", "capital", "France", "im_start", "im_end"),
    *("aaaa", "ing", "://", "<|", "|>", "<s>", "</s>", "[INST]", "12", "123", "00", "ok", "def"),
    *(
        "\u00e9",
        "\u00ef",
        "\u4f60\u597d",
        "\u043f\u0440\u0438\u0432\u0435\u0442",
        "\u0645\u0631",
        "\u05e9\u05dc",
        "\U0001f600",
    ),
]
_SPACES = ["  ", "    ", "\n\n", "\t\t", "\r\n", " \n"]

_GPT4_SPLIT = "|".join(
    [
        *(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}"),
        *(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
    ]
)
_QWEN_SPLIT = _GPT4_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_chars() -> list[str]:
    """GPT-2's printable stand-in of each byte, in the order of the bytes."""
    kept = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    shifted = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(shifted)) for b in range(256)]


def _chains(words: list[str]) -> list[list[str]]:
    """Merges that build each word from its left."""
    merges = {}
    for word in words:
        for i in range(1, len(word)):
            merges[word[:i], word[i]] = None
    return [list(pair) for pair in merges]


def _model(alphabet: list[str], words: list[str], **options) -> dict:
    merges = _chains(words)
    tokens = dict.fromkeys([*alphabet, *(left + right for left, right in merges)])
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges}
    return {**model, "byte_fallback": False, "unk_token": None, **options}


def _byte_level(**options) -> dict:
    letters = _byte_chars()
    spell = lambda text: "".join(letters[b] for b in text.encode())  # noqa: E731
    words = [spell(word) for word in [*_SPACES, *_WORDS, *(" " + word for word in _WORDS)]]
    return _model(letters, words, **options)


def _byte_fallback(specials: list[str], words: list[str]) -> dict:
    characters = sorted(
        {*"\u2581abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-=.,<>|/[]_\n:'", *"".join(words)}
    )
    alphabet = [*specials, *(f"<0x{b:02X}>" for b in range(256)), *characters]
    return _model(alphabet, words, byte_fallback=True, unk_token="<unk>", fuse_unk=True)


def _added(content: str, i: int, **flags) -> dict:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": i, "content": content, **plain, **flags}


def _bytes_stage(kind: str, **options) -> dict:
    return {"type": kind, "add_prefix_space": False, "trim_offsets": True, "use_regex": False, **options}


def _split_bytes(pattern: str) -> dict:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _bytes_stage("ByteLevel")]}


def _begin(token: str, i: int) -> dict:
    special, text = {"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, special, second],
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]}},
    }


_SPACE_TO_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
_MARK_TO_SPACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
_BYTES_THEN_TEXT = [_MARK_TO_SPACE, {"type": "ByteFallback"}, {"type": "Fuse"}]
_STRIP_ONE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_MARKED = [_s.replace(" ", "\u2581") for _s in ["  ", "    ", *_WORDS, *(" " + word for word in _WORDS)]]


def _spec(model: dict, added: list[dict], **stages) -> dict:
    stages = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None, **stages}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **stages, "model": model}


def _llama3() -> dict[str, dict]:
    model = _byte_level(ignore_merges=True)
    n = len(model["vocab"])
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    added = [_added(name, n + i) for i, name in enumerate(names)]
    begin = {"type": "Sequence", "processors": [_bytes_stage("ByteLevel", use_regex=True), _begin(names[0], n)]}
    stages = {"pre_tokenizer": _split_bytes(_GPT4_SPLIT), "post_processor": begin, "decoder": _bytes_stage("ByteLevel")}
    return {
        "tokenizer.json": _spec(model, added, **stages),
        "tokenizer_config.json": {"bos_token": names[0], "eos_token": names[2], "clean_up_tokenization_spaces": True},
        "generation_config.json": {"eos_token_id": [n + 1, n + 2]},
    }


def _qwen() -> dict[str, dict]:
    model = _byte_level()
    n = len(model["vocab"])
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    added = [_added(name, n + i) for i, name in enumerate(names)]
    added += [_added(word, n + 3 + i, special=False) for i, word in enumerate(words)]
    stages = {"normalizer": {"type": "NFC"}, "pre_tokenizer": _split_bytes(_QWEN_SPLIT)}
    stages |= {"post_processor": _bytes_stage("ByteLevel"), "decoder": _bytes_stage("ByteLevel")}
    config = {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    config["added_tokens_decoder"] = {
        str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in added
    }
    return {
        "tokenizer.json": _spec(model, added, **stages),
        "tokenizer_config.json": config,
        "config.json": {"eos_token_id": n + 2},
    }


def _smollm2() -> dict[str, dict]:
    """The special tokens come first in the vocabulary itself."""
    model = _byte_level()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
    model["vocab"] = {token: i for i, token in enumerate([*names, *model["vocab"]])}
    model["unk_token"] = names[0]
    digits = {"type": "Digits", "individual_digits": True}
    before = {"type": "Sequence", "pretokenizers": [digits, _bytes_stage("ByteLevel", use_regex=True)]}
    added = [_added(name, i) for i, name in enumerate(names)]
    return {
        "tokenizer.json": _spec(model, added, pre_tokenizer=before, decoder=_bytes_stage("ByteLevel")),
        "tokenizer_config.json": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_prefix_space": False},
    }


def _llama2(**flags) -> dict[str, dict]:
    names = ["<unk>", "<s>", "</s>"]
    model = _byte_fallback(names, _MARKED)
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, _SPACE_TO_MARK]}
    stages = {"normalizer": normalizer, "post_processor": _begin("<s>", 1)}
    stages["decoder"] = {"type": "Sequence", "decoders": [*_BYTES_THEN_TEXT, _STRIP_ONE]}
    added = [_added(name, i, **flags) for i, name in enumerate(names)]
    return {
        "tokenizer.json": _spec(model, added, **stages),
        "tokenizer_config.json": {
            "bos_token": {"__type": "AddedToken", "content": "<s>"},
            "eos_token": "</s>",
            "unk_token": "<unk>",
        },
    }


def _phi3() -> dict[str, dict]:
    """Llama 2 with turns whose tokens take the white space after them."""
    files = _llama2()
    spec = files["tokenizer.json"]
    n = len(spec["model"]["vocab"])
    names = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"]
    spec["added_tokens"] += [_added(name, n + i, rstrip=i > 0) for i, name in enumerate(names)]
    files["tokenizer_config.json"]["eos_token"] = "<|endoftext|>"
    spec["post_processor"] = None
    files["generation_config.json"] = {"eos_token_id": [n, n + 2, n + 3]}
    return files


def _mistral() -> dict[str, dict]:
    """Only the first text gets a space before it, not those after a special token."""
    files = _llama2()
    spec = files["tokenizer.json"]
    spec["normalizer"] = None
    spec["pre_tokenizer"] = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    vocab = spec["model"]["vocab"]
    spec["added_tokens"] += [_added("[INST]", vocab["[INST]"]), _added("[/INST]", len(vocab))]
    return files


def _gemma() -> dict[str, dict]:
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    model = _byte_fallback(names, [*(_SPACES[2:]), *_MARKED])
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    stages = {"normalizer": _SPACE_TO_MARK, "pre_tokenizer": split, "post_processor": _begin("<bos>", 2)}
    stages["decoder"] = {"type": "Sequence", "decoders": _BYTES_THEN_TEXT}
    added = [_added(name, i) for i, name in enumerate(names)]
    added += [_added(text, model["vocab"][text], special=False) for text in ("\n\n", "\u2581\u2581")]
    tokens = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return {
        "tokenizer.json": _spec(model, sorted(added, key=lambda token: token["id"]), **stages),
        "tokenizer_config.json": {**tokens, "add_bos_token": True},
        "config.json": {"eos_token_id": [1, 5]},
    }


def _unigram() -> dict[str, dict]:
    names = ["<unk>", "<s>", "</s>"]
    pieces = [*dict.fromkeys([*"\u2581abcdefghijklmnopqrstuvwxyz<>|/_s0123456789", *_MARKED])]
    vocab = [[name, 0.0] for name in names]
    vocab += [[piece, -10.0 + len(piece)] for piece in pieces if piece not in names]
    vocab += [[f"<0x{b:02X}>", -20.0] for b in range(256)]
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, space]}
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": True}
    stages = {"normalizer": {"type": "NFKC"}, "pre_tokenizer": space, "decoder": decoder}
    return {
        "tokenizer.json": _spec(model, [_added(name, i) for i, name in enumerate(names)], **stages),
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        "generation_config.json": {"eos_token_id": 2},
    }


FAMILIES = {
    "llama3": _llama3,
    "qwen": _qwen,
    "smollm2": _smollm2,
    "llama2": _llama2,
    "phi3": _phi3,
    "mistral": _mistral,
    "gemma": _gemma,
    "unigram": _unigram,
}


def write_family(name: str, folder: Path, **extra: object) -> Path:
    """The folder of one family; `extra` files, by name without ".json", replace its own (None takes one away)."""
    folder.mkdir(parents=True, exist_ok=True)
    files = FAMILIES[name]() | {f"{key}.json": value for key, value in extra.items()}
    for file, content in files.items():
        if content is None:
            (folder / file).unlink(missing_ok=True)
        else:
            (folder / file).write_text(json.dumps(content))
    return folder
