"""Text that grows with its tokens: the pieces joined are the whole, and no piece holds half a character."""

import io

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.text.incremental import IncrementalDecoder
from jaxrl_llm.text.sentencepiece import SentencePieceTokenizer
from jaxrl_llm.text.stop_strings import StopStringFilter

BYTES = "x\u00e9\u4e2d\U0001f600"  # characters of one to four bytes


def decode_bytes(ids):
    """A byte-level vocabulary: an id is a byte, 256 a special token without text."""
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def pieces(decode, chunks):
    decoder = IncrementalDecoder(decode)
    return [decoder.add(chunk, last=i == len(chunks) - 1) for i, chunk in enumerate(chunks)]


def test_a_character_comes_whole_with_its_last_byte():
    ids = list(BYTES.encode())
    made = pieces(decode_bytes, [[i] for i in ids])
    assert made == ["x", "", "\u00e9", "", "", "\u4e2d", "", "", "", "\U0001f600"]


def test_bytes_that_never_become_a_character_come_with_the_last_call():
    assert pieces(decode_bytes, [[0x61], [0xE4, 0xB8]]) == ["a", "\ufffd"]
    assert pieces(decode_bytes, [[0xE4], [0x61]]) == ["", "\ufffda"]


@pytest.fixture(scope="module")
def with_spaces():
    """A SentencePiece model that writes spaces into its pieces, drops a text's first one, and falls back to bytes."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "a cat and a mat", "on and on the cat"] * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return SentencePieceTokenizer(model.getvalue())


def test_a_space_by_itself_does_not_swallow_the_next(with_spaces):
    space, word = (with_spaces._processor.piece_to_id(piece) for piece in ("\u2581", "\u2581the"))
    assert pieces(with_spaces.decode, [[word], [space], [word]]) == ["the", " ", " the"]


@given(st.data())
def test_pieces_joined_are_the_whole(with_spaces, data):
    for decode, size in ((decode_bytes, 257), (with_spaces.decode, with_spaces.vocab_size)):
        chunks = data.draw(st.lists(st.lists(st.integers(0, size - 1), max_size=4), min_size=1, max_size=12))
        made = pieces(decode, chunks)
        assert "".join(made) == decode([i for chunk in chunks for i in chunk])


@given(st.text(max_size=30), st.lists(st.integers(1, 5), min_size=40, max_size=40))
def test_real_text_is_never_shown_half(with_spaces, text, cuts):
    ids = with_spaces._processor.encode(text)
    chunks = [[]]
    for cut in cuts:
        chunks.append(ids[:cut])
        ids = ids[cut:]
    made = pieces(with_spaces.decode, [*chunks, ids])
    assert "\ufffd" not in "".join(made) or "\ufffd" in text


def test_decoding_looks_back_a_piece_not_the_whole_text():
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode_bytes(ids)

    pieces(decode, [[0x61]] * 100)
    assert longest == 2


@pytest.mark.parametrize(
    ("chunks", "stops", "shown"),
    [
        (["ab", "cd", "ef"], ["cd"], ["ab", "", ""]),
        (["abc", "def"], ["cd"], ["ab", ""]),  # "c" may begin the stop string, and does
        (["abc", "xef"], ["cd"], ["ab", "cxef"]),  # and here it does not
        (["abc"], ["cd"], ["abc"]),  # nothing follows
        (["aaab"], ["aab"], ["a"]),
        (["a\n", "\n", "b"], ["\n\n", "b"], ["a", "", ""]),
        (["xyz"], ["z", "yz"], ["x"]),  # the first place counts, not the first string
        (["abc", "d"], [], ["abc", "d"]),
    ],
)
def test_text_is_cut_before_a_stop_string_and_no_part_of_one_is_shown(chunks, stops, shown):
    cutter = StopStringFilter(stops)
    assert [cutter.add(chunk, last=i == len(chunks) - 1) for i, chunk in enumerate(chunks)] == shown


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_any_cut_shows_the_text_before_the_first_stop(text, stops, step):
    cutter = StopStringFilter(stops)
    shown = "".join(cutter.add(text[i : i + step]) for i in range(0, len(text), step)) + cutter.add("", last=True)
    ends = [*range(step, len(text), step), len(text)]
    seen = next((text[:end] for end in ends if any(stop in text[:end] for stop in stops)), text)
    assert shown == seen[: min((seen.find(stop) for stop in stops if stop in seen), default=len(seen))]
