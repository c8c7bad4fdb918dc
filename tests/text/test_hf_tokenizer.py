"""tokenizer.json folders: against stored results of `transformers`, against the library, and what is refused."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hf_families import FAMILIES, write_family
from tokenizer_strings import digests, strings

from jaxrl_llm.text.chat import encode_trusted, render_prompt_ids
from jaxrl_llm.text.hf_tokenizer import load_hf
from jaxrl_llm.types import UserError

STORED = Path(__file__).parents[1] / "data" / "hf_tokenizers.npz"
# Families that give back every character of every text, and those that do so without the library's bytes in text.
EXACT = ("llama3", "smollm2", "llama2", "phi3", "gemma")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return {name: write_family(name, root / name) for name in FAMILIES}


@pytest.fixture
def changed(tmp_path):
    """A folder of a family with some files replaced or changed."""

    def write(family, **files):
        content = FAMILIES[family]()
        for name, change in files.items():
            if callable(change):
                files[name] = change(content[f"{name}.json"])
        return write_family(family, tmp_path / "changed", **files)

    return write


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_transformers(folders, family):
    tokenizer = load_hf(folders[family])
    texts = strings(2200)
    with np.load(STORED) as stored:
        text, trusted = stored[f"{family}/text"], stored[f"{family}/trusted"]
    compared = text != 0  # where transformers itself makes a special token of a text, there is nothing to agree with
    assert compared.sum() >= 2000
    ours = digests([tokenizer.encode(one) for one in texts])
    assert [one for one, equal in zip(texts, (ours == text) | ~compared, strict=True) if not equal] == []
    ours = digests([encode_trusted(tokenizer, one) for one in texts])
    assert [one for one, equal in zip(texts, ours == trusted, strict=True) if not equal] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_text_never_becomes_a_special_token_and_comes_back(folders, family):
    tokenizer = load_hf(folders[family])
    special = set(tokenizer.special_tokens.values())
    changed = 0
    for text in (*strings(300, seed=1), *tokenizer.special_tokens):
        ids = tokenizer.encode(text)
        assert not special & set(ids), text
        changed += tokenizer.decode(ids) != text
    # NFC, a space before a text that begins with one, NFKC and written-out bytes: the docstring names them.
    assert changed == 0 if family in EXACT else changed > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_is_the_librarys_with_special_tokens_left_out(folders, family):
    tokenizer = load_hf(folders[family])
    library = tokenizers.Tokenizer.from_file(str(folders[family] / "tokenizer.json"))
    random = np.random.default_rng(0)
    for text in strings(150, seed=2, without="\ufffd"):
        ids = tokenizer.encode(text)
        whole = library.decode(ids)
        if "\ufffd" not in whole:  # written-out bytes of Unigram
            assert tokenizer.decode(np.array(ids, np.int32)) == whole
        with_specials = [*ids, *random.permutation(list(tokenizer.special_tokens.values())).tolist(), *ids]
        assert tokenizer.decode(with_specials) == tokenizer.decode(ids + ids)
    with pytest.raises(ValueError, match=f"token id {tokenizer.vocab_size} "):
        tokenizer.decode([tokenizer.vocab_size])


def test_bytes_that_are_no_character_cost_no_other_character(folders):
    tokenizer = load_hf(folders["llama2"])
    e, broken = tokenizer.encode("\u03c0")[1:], tokenizer.encode("\u20ac")[-3:-1]
    assert [tokenizer._tokens[i] for i in e + broken] == ["<0xCF>", "<0x80>", "<0xE2>", "<0x82>"]
    assert tokenizer.decode(e + broken) == "\u03c0\ufffd\ufffd"
    assert tokenizer.decode(broken + e) == "\ufffd\ufffd\u03c0"


@pytest.mark.parametrize(
    ("family", "bos", "adds", "eos"),
    [
        *(("llama3", "<|begin_of_text|>", True, "<|eot_id|>"), ("qwen", None, False, "<|im_end|>")),
        *(("smollm2", "<|im_start|>", False, "<|im_end|>"), ("llama2", "<s>", True, "</s>")),
        *(("phi3", "<s>", False, "<|endoftext|>"), ("gemma", "<bos>", True, "<eos>")),
    ],
)
def test_begin_and_end_are_what_the_files_say(folders, family, bos, adds, eos):
    tokenizer = load_hf(folders[family])
    assert tokenizer.bos_id == (None if bos is None else tokenizer.token_id(bos))
    assert (tokenizer.adds_bos, tokenizer.eos_id) == (adds, tokenizer.token_id(eos))
    begin = [tokenizer.bos_id] if adds else []
    assert render_prompt_ids(tokenizer, "hello", "none") == begin + tokenizer.encode("hello")
    assert tokenizer.vocab_size == max(tokenizer.special_tokens.values()) + 1 or tokenizer.vocab_size > 300


def test_added_words_that_are_not_special_are_text(folders):
    tokenizer = load_hf(folders["qwen"])
    think = tokenizer.encode("<think>")
    assert len(think) == 1
    assert tokenizer.decode(think) == "<think>"
    assert "<think>" not in tokenizer.special_tokens


def test_a_file_alone_and_its_folder_are_the_same(folders):
    folder = folders["llama3"]
    assert load_hf(folder).fingerprint == load_hf(folder / "tokenizer.json").fingerprint


def test_a_text_with_the_mark_of_special_tokens_is_text(folders):
    tokenizer = load_hf(folders["llama3"])
    for text in ("\ufdd0496\ufdd0", "\ufdd0", "\ufdd1\ufdd0497\ufdd0"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert not set(tokenizer.encode(text)) & set(tokenizer.special_tokens.values())
    with pytest.raises(UserError, match=r"U\+FDD0"):
        tokenizer.encode("".join(map(chr, range(0xFDD0, 0xFDF0))))


def test_a_digit_after_a_special_token_is_not_part_of_it(changed):
    tokenizer = load_hf(changed("llama2", tokenizer_config={"bos_token": "<s>", "eos_token": "<0x0A>"}))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 13)
    ids = tokenizer.encode_parts([1, "3 ", 13, "3"])
    assert [i for i in ids if i in (1, 13)] == [1, 13]
    assert tokenizer.decode(ids) == "3  3"


def test_the_fingerprint_changes_with_everything_that_changes_ids(changed):
    def config(**more):
        return lambda old: old | more

    prints = [
        load_hf(changed("llama3", **files)).fingerprint
        for files in (
            {},
            {"tokenizer": lambda spec: spec | {"normalizer": {"type": "NFC"}}},
            {"tokenizer_config": config(chat_template="x")},
            {"tokenizer_config": config(eos_token="<|end_of_text|>")},
            {"tokenizer_config": config(bos_token=None)},
        )
    ]
    assert len(set(prints)) == len(prints)


def test_chat_templates_are_found_where_transformers_looks(changed):
    def with_template(template):
        return lambda config: config | {"chat_template": template}

    assert load_hf(changed("llama3", tokenizer_config=with_template("plain"))).chat_template == "plain"
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "first"}]
    folder = changed("llama3", tokenizer_config=with_template(several))
    assert load_hf(folder).chat_template == "first"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "second"}))
    assert load_hf(folder).chat_template == "second"
    (folder / "chat_template.jinja").write_text("third \u00e9", encoding="utf-8")
    assert load_hf(folder).chat_template == "third \u00e9"


def test_the_end_of_sequence_token_must_be_certain(changed):
    no_name = {"tokenizer_config": lambda config: config | {"eos_token": None}}
    assert load_hf(changed("llama3", **no_name, generation_config={"eos_token_id": 496})).eos_id == 496
    both = {"generation_config": {"eos_token_id": [496, 497]}, "config": {"eos_token_id": 497}}
    assert load_hf(changed("llama3", **no_name, **both)).eos_id == 497
    for files, message in (
        ({**no_name, "generation_config": None, "config": None}, "no file beside it names an end-of-sequence token"),
        ({**no_name, "generation_config": {"eos_token_id": [496, 497]}, "config": None}, "says 496, 497"),
        (
            {"generation_config": {"eos_token_id": 496}},
            "'<|eot_id|>' is 497, but eos_token_id of generation_config.json is 496",
        ),
        ({"tokenizer_config": {"eos_token": "<end>"}, "config": None}, "eos_token '<end>' is not in the vocabulary"),
    ):
        folder = changed("llama3", **files)
        with pytest.raises(UserError, match=re.escape(message)) as error:
            load_hf(folder)
        assert "set tokenizer.eos" in str(error.value)
        assert load_hf(folder, eos="<|end_of_text|>").eos_id == 496
    with pytest.raises(UserError, match=r"tokenizer\.eos '<e>' is not a token"):
        load_hf(folder, eos="<e>")
    with pytest.raises(UserError, match="eos_token_id 9999 is outside"):
        load_hf(changed("llama3", **no_name, generation_config={"eos_token_id": 9999}, config=None))


def test_a_word_of_the_vocabulary_that_ends_completions_is_special(changed):
    """Named by the configuration alone, not among the added tokens."""
    tokenizer = load_hf(changed("llama2", tokenizer_config={"eos_token": "aaaa", "bos_token": "<s>"}))
    assert tokenizer.eos_id == tokenizer.token_id("aaaa")
    assert tokenizer.eos_id not in tokenizer.encode("aaaa aaaa")
    assert tokenizer.decode(tokenizer.encode("aaaa")) == "aaaa"


def test_added_tokens_of_the_configuration_count(changed):
    def more(config):
        return config | {"added_tokens_decoder": {"500": {"content": "<|call|>", "special": True}}}

    tokenizer = load_hf(changed("llama3", tokenizer_config=more))
    assert (tokenizer.token_id("<|call|>"), tokenizer.vocab_size) == (500, 501)
    assert 500 not in tokenizer.encode("<|call|>")


def _model(**changes):
    return lambda spec: spec | {"model": spec["model"] | changes}


@pytest.mark.parametrize(
    ("family", "files", "message"),
    [
        ("llama3", {"tokenizer": [1]}, "holds list, an object is wanted"),
        ("llama3", {"tokenizer": {}}, "it has no model"),
        ("llama3", {"tokenizer": _model(type="WordPiece")}, "'WordPiece' is not supported; known: BPE, Unigram"),
        ("llama3", {"tokenizer": _model(vocab={})}, "vocab is missing, empty"),
        ("llama3", {"tokenizer": _model(vocab={"a": "b"})}, "vocab holds ['a', 'b']"),
        ("llama3", {"tokenizer": _model(merges=[["x", "yz"]])}, "cannot have its id|the tokenizers library can read"),
        ("llama3", {"tokenizer": lambda s: s | {"normalizer": {"type": "New"}}}, "the tokenizers library can read"),
        ("llama3", {"tokenizer": lambda s: s | {"decoder": {"type": "CTC"}}}, "decoder CTC is not supported"),
        ("llama3", {"tokenizer": lambda s: s | {"normalizer": {"type": "ByteLevel"}}}, "normalizer ByteLevel is not"),
        ("llama3", {"tokenizer": lambda s: s | {"added_tokens": [{"id": 1}]}}, "has no content or no id"),
        ("llama2", {"tokenizer": _model(unk_token=None, byte_fallback=False)}, "lost without a word"),
        ("llama3", {"tokenizer_config": lambda c: c | {"eos_token": 3}}, "eos_token is 3, a token's text is wanted"),
        ("llama3", {"tokenizer_config": lambda c: c | {"chat_template": 3}}, "chat_template is int"),
        ("llama3", {"tokenizer_config": lambda c: c | {"chat_template": []}}, "no template named default"),
        ("llama3", {"tokenizer_config": lambda c: c | {"added_tokens_decoder": [1]}}, "must give a token's content"),
        ("qwen", {"tokenizer_config": lambda c: c | {"added_tokens_decoder": {"496": {"content": "x"}}}}, "id 496 is"),
        ("llama3", {"generation_config": {"eos_token_id": "x"}}, "eos_token_id is 'x', a token id"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(changed, family, files, message):
    folder = changed(family, **files)
    with pytest.raises(UserError, match="|".join(map(re.escape, message.split("|")))) as error:
        load_hf(folder)
    assert str(folder) in str(error.value)


def test_missing_files_and_other_formats_are_named(tmp_path, folders):
    for path, message in (
        (tmp_path, "has no tokenizer.json"),
        (tmp_path / "nowhere", "does not exist"),
        (Path(__file__), "is not a tokenizer.json"),
    ):
        with pytest.raises(UserError, match=message):
            load_hf(path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff{")
    with pytest.raises(UserError, match="is not JSON"):
        load_hf(tmp_path)


@pytest.mark.parametrize("char", ["\u4f60", "\x07"])
def test_a_character_without_a_token_is_named(changed, char):
    """By the unknown token of a model without bytes."""
    tokenizer = load_hf(changed("llama2", tokenizer=_model(byte_fallback=False)))
    assert "\u4f60" in tokenizer.decode(tokenizer.encode("\u4f60\u597d"))  # a piece of its own
    with pytest.raises(UserError, match=r"U\+0007|U\+4F61"):
        tokenizer.encode(f"a{chr(ord(char) + (char > 'z'))}b")


def test_a_byte_without_a_token_is_named(changed):
    def without(spec):
        vocab = {token if token != "\u0104" else "unused": i for token, i in spec["model"]["vocab"].items()}
        return spec | {"model": spec["model"] | {"vocab": vocab}}

    with pytest.raises(UserError, match=r"U\+0004"):
        load_hf(changed("llama3", tokenizer=without)).encode("a\x04b")
    with pytest.raises(UserError, match=r"U\+D800"):
        load_hf(changed("llama3")).encode("\ud800")
