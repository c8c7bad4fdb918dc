"""Files of rows: what is read, and one clear error with its place for what cannot be."""

import json

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from jaxrl_llm.config import SourceConfig
from jaxrl_llm.data.declared import hold_out, read_problems
from jaxrl_llm.data.problem import Problem
from jaxrl_llm.data.rows import ArrayRecords, JsonLines, hugging_face, parquet
from jaxrl_llm.data.sources import read_sources
from jaxrl_llm.types import UserError

ROWS = [{"q": f"What is {i} + 1?", "a": i + 1, "key": f"k{i}"} for i in range(20)]
NAMES = {"prompt": "q", "answer": "a", "id": "key"}
EXPECTED = [Problem(f"k{i}", f"What is {i} + 1?", f"{i + 1}") for i in range(20)]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def array_records(path, records):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


def test_every_format_gives_the_same_problems(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "alone"))
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "splits"))
    records = array_records(tmp_path / "rows.arrayrecord", [json.dumps(row).encode() for row in ROWS])
    sources = [
        JsonLines(jsonl(tmp_path / "rows.jsonl", ROWS)),
        ArrayRecords(records),
        parquet(str(tmp_path / "rows.parquet"), ["q", "a", "key"]),
        hugging_face(str(tmp_path / "alone"), split="train", revision=None),
        hugging_face(str(tmp_path / "splits"), split="train", revision=None),
    ]
    for source in sources:
        assert read_problems(source, **NAMES) == EXPECTED
    assert read_problems(sources[0], prompt="q", answer="a")[4].id == "5"  # rows are numbered from 1


def test_blank_lines_and_other_line_ends_inside_strings_are_no_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a\xe2\x80\xa8b", "answer": "x"}\r\n\n  \n{"prompt": "c", "answer": " y "}')
    assert read_problems(JsonLines(str(path)), prompt="prompt", answer="answer") == [
        Problem("1", "a\u2028b", "x"),
        Problem("2", "c", "y"),
    ]


def test_the_answer_may_follow_a_mark(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"q": "?", "a": "5 + 5 = 10 #### 10, no\n#### 18"}, {"q": "!", "a": "18"}])
    source = JsonLines(path)
    with pytest.raises(UserError, match=r"line 2: field 'a' does not hold the mark '####'"):
        read_problems(source, prompt="q", answer="a", answer_after="####")
    assert read_problems(JsonLines(jsonl(tmp_path / "one.jsonl", [{"q": "?", "a": "#### 1 #### 18"}])), prompt="q",
                         answer="a", answer_after="####")[0].answer == "18"  # fmt: skip


def test_a_solution_is_a_field_of_its_own(tmp_path):
    rows = [row | {"how": f"Count on from {row['a'] - 1}: {row['a']}"} for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    paths = {"jsonl": jsonl(tmp_path / "rows.jsonl", rows), "parquet": str(tmp_path / "rows.parquet")}
    for kind, path in paths.items():
        how = {"name": "sums", "kind": kind, "path": path, "fields": NAMES | {"solution": "how"}}
        (source,) = read_sources([SourceConfig(**how, reward="math")], seed=0)
        problem = source.split.train[3]
        assert (problem.answer, problem.solution) == ("4", "Count on from 3: 4")
        assert source.gold(problem) == problem.solution
        (source,) = read_sources([SourceConfig(**how | {"fields": NAMES})], seed=0)
        assert (source.split.train[3].solution, source.gold(source.split.train[3])) == (None, "4")
    with pytest.raises(UserError, match="line 1 has no field 'how'; it has q, a, key"):
        read_problems(JsonLines(jsonl(tmp_path / "bare.jsonl", ROWS)), **NAMES, solution="how")


GOOD = b'{"q": "?", "a": "1", "key": "x"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: it has no line"),
        (b"\n \n", "is empty: it has no line"),
        (b"\xef\xbb\xbf" + GOOD, "line 1 begins with a byte order mark"),
        (GOOD + b'{"q": "?", "a": \n', r"line 2 is not JSON \(.*column \d+\)"),
        (GOOD * 1 + b"\n\n" + b"nonsense", "line 4 is not JSON"),
        (b"[1, 2]\n", "line 1 holds a list, not an object"),
        (b'{"q": "\x00?", "a": "1"}\n', "line 1 holds a null byte"),
        (b'{"q": "?\\u0000", "a": "1", "key": 1}\n', "line 1: field 'q' holds a null character"),
        (b'{"q": "\\ud800", "a": "1", "key": 1}\n', "line 1: field 'q' holds half a character"),
        (b'{"q": "\xff", "a": "1"}\n', r"line 1 is not UTF-8 \(byte 8\)"),
        (b'{"q": "' + b"x" * (16 * 2**20) + b'", "a": "1"}\n', r"line 1 has 167772\d\d bytes, more than 16777216"),
        (b"[" * 100_000, "line 1 is not JSON that can be read"),
        (b'{"q": 1' + b"0" * 5000 + b"}", "line 1 is not JSON that can be read"),
        (b'{"a": "1", "key": 1}\n', "line 1 has no field 'q'; it has a, key"),
        (b"{}\n", "line 1 has no field 'a'; it has none"),
        (b'{"q": 7, "a": "1", "key": 1}\n', "line 1: field 'q' is a int, not a string"),
        (b'{"q": "?", "a": true}\n', "line 1: field 'a' is a bool, not a string or a whole number"),
        (b'{"q": "?", "a": 1.5}\n', "line 1: field 'a' is a float, not a string or a whole number"),
        (b'{"q": "?", "a": null}\n', "line 1: field 'a' is a NoneType"),
        (b'{"q": " ", "a": "1", "key": 1}\n', "line 1: field 'q' is empty"),
        (b'{"q": "?", "a": "", "key": 1}\n', "line 1: field 'a' is empty"),
        (GOOD + GOOD, r"line 2: id 'x' stands at .*rows.jsonl line 1 already"),
    ],
    ids=range(22),
)
def test_a_bad_file_is_one_error_with_its_place(tmp_path, content, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_problems(JsonLines(str(path)), **NAMES)
    assert "rows.jsonl" in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_file_of_its_kind(tmp_path):
    junk = tmp_path / "junk"
    junk.write_bytes(b"junk" * 1000)
    missing = str(tmp_path / "gone")
    for read in (JsonLines, ArrayRecords, lambda path: parquet(path, ["q"])):
        with pytest.raises(UserError, match="gone does not exist"):
            read(missing)
        with pytest.raises(UserError, match="is a folder, not a file"):
            read(str(tmp_path))
    with pytest.raises(UserError, match="junk is not an ArrayRecord file, or damaged"):
        ArrayRecords(str(junk))
    with pytest.raises(UserError, match="junk is not a Parquet file, or damaged"):
        parquet(str(junk), ["q"])
    with pytest.raises(UserError, match=r"data set .*gone, split 'train', cannot be read"):
        hugging_face(missing, split="train", revision=None)


def test_records_and_columns_name_their_place(tmp_path):
    path = array_records(tmp_path / "rows.arrayrecord", [json.dumps(ROWS[0]).encode(), b"junk"])
    with pytest.raises(UserError, match=r"rows\.arrayrecord record 2 is not JSON"):
        read_problems(ArrayRecords(path), **NAMES)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"q": "?", "a": "1"}, {"q": None, "a": "1"}]), tmp_path / "p"
    )
    with pytest.raises(UserError, match="p has no column 'key'; it has q, a"):
        parquet(str(tmp_path / "p"), ["q", "a", "key"])
    with pytest.raises(UserError, match="p row 2: field 'q' is a NoneType"):
        read_problems(parquet(str(tmp_path / "p"), ["q", "a"]), prompt="q", answer="a")
    datasets.DatasetDict({"dev": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(UserError, match="splits has no split 'train'; it has dev"):
        hugging_face(str(tmp_path / "splits"), split="train", revision=None)


def test_holding_out_keeps_equal_prompts_together():
    problems = [Problem(str(i), f"prompt {i % 10}", str(i)) for i in range(40)]
    split = hold_out(problems, 6, seed=1)
    assert len(split.heldout) == 8  # whole prompts: two of four rows
    assert not {p.prompt for p in split.train} & {p.prompt for p in split.heldout}
    assert split.train + split.heldout != problems
    assert sorted(split.train + split.heldout, key=lambda p: int(p.id)) == problems
    assert {p.id for p in hold_out(problems[::-1], 6, seed=1).heldout} == {p.id for p in split.heldout}
    assert {p.id for p in hold_out(problems, 6, seed=2).heldout} != {p.id for p in split.heldout}
    assert hold_out(problems, 0, seed=1).heldout == []
    with pytest.raises(UserError, match="heldout = 40 leaves nothing to train on of 40 rows"):
        hold_out(problems, 40, seed=1)
    with pytest.raises(UserError, match="heldout = 41 leaves nothing"):
        hold_out(problems, 41, seed=1)
