"""GGUF metadata of small tokenizers: byte-level ones with the vocabularies of hf_families, and one of SentencePiece."""

import io
from typing import Any

import sentencepiece
from hf_families import FAMILIES

PRE_TOKENIZERS = {"llama-bpe": "llama3", "qwen2": "qwen", "gpt-2": "llama3"}


def byte_level_metadata(pre: str) -> dict[str, Any]:
    """What a GGUF file of a family's vocabulary says, pre-tokenized as `pre`."""
    spec = FAMILIES[PRE_TOKENIZERS[pre]]()["tokenizer.json"]
    ids = spec["model"]["vocab"] | {token["content"]: token["id"] for token in spec["added_tokens"]}
    kinds = {token["content"]: 3 if token["special"] else 4 for token in spec["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in spec["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": spec["added_tokens"][0]["id"],
        "tokenizer.ggml.eos_token_id": spec["added_tokens"][1]["id"],
        "tokenizer.ggml.add_bos_token": False,
    }


_TEXT = [
    *("What is the capital of France? The capital of France is Paris.", "def f(x):\n    return x ** 2"),
    *("37 + 25 = 62", "1,234,567.89", "don't can't it's I'm you're they've", "https://example.org/?q=a&c=d"),
    *("na\u00efve caf\u00e9", "\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440", "\u4f60\u597d\u4e16\u754c"),
    *("<s>[INST] user [/INST]", "<|im_start|>user"),
] * 5


def sentencepiece_model(**options: Any) -> bytes:
    """A small SentencePiece model, by default of the form that Llama 2 and Mistral have, with words of its users."""
    model = io.BytesIO()
    settings = {
        "model_type": "bpe",
        "vocab_size": 420,
        "byte_fallback": True,
        "character_coverage": 0.98,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "split_digits": True,
        "user_defined_symbols": ["<think>", "</think>", "\n\n"],
        "control_symbols": ["[INST]", "[/INST]"],
        "hard_vocab_limit": False,
        "num_threads": 1,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(_TEXT), model_writer=model, **(settings | options))
    return model.getvalue()


def sentencepiece_metadata(model: bytes) -> dict[str, Any]:
    """What a GGUF file of a SentencePiece model says."""
    pieces = sentencepiece.SentencePieceProcessor()
    pieces.LoadFromSerializedProto(model)

    def kind(i: int) -> int:
        if pieces.is_unknown(i):
            return 2
        if pieces.is_control(i):
            return 3
        if pieces.is_byte(i):
            return 6
        # The library does not say which pieces are its users' own: these have no score.
        return 5 if pieces.is_unused(i) else 4 if pieces.get_score(i) == 0.0 and i < 20 else 1

    size = range(pieces.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [pieces.id_to_piece(i) for i in size],
        "tokenizer.ggml.scores": [pieces.get_score(i) for i in size],
        "tokenizer.ggml.token_type": [kind(i) for i in size],
        "tokenizer.ggml.unknown_token_id": pieces.unk_id(),
        "tokenizer.ggml.bos_token_id": pieces.bos_id(),
        "tokenizer.ggml.eos_token_id": pieces.eos_id(),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": True,
    }
