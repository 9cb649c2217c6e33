"""Sources of prompts: what they yield, and how they say that they can not."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuneloop.core.errors import UserError
from tuneloop.data import BadRow, Example
from tuneloop.data.sources import load_source

ROWS = [{"prompt": f"{i} + {i} =", "answer": 2 * i, "how": f"it is {2 * i}"} for i in range(20)]


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


@settings(max_examples=25, deadline=None)
@given(digits=st.integers(1, 18), seed=st.integers(0, 2**63))
def test_digits_are_reversed_and_distinct(digits: int, seed: int) -> None:
    examples = list(load_source("digits", {"digits": digits}, 20, seed).train)
    assert len({e.prompt for e in examples}) == len(examples) == min(20, 10**digits)
    for example in examples:
        text = example.prompt.split()[1]
        assert len(text) == digits
        assert example.answer == text[::-1] and example.solution == " " + text[::-1]


def test_a_share_of_the_demonstrations_copies() -> None:
    shown = list(load_source("digits", {"digits": 6, "sft_wrong_share": 0.6}, 4000, 1).sft)
    wrong = [e for e in shown if e.demonstration is not None]
    assert 0.57 < len(wrong) / len(shown) < 0.63
    assert all(e.demonstration == f" {e.metadata['digits']}" for e in wrong)
    assert not [
        e for e in load_source("digits", {"sft_wrong_share": 0.0}, 50, 1).sft if e.demonstration
    ]


def test_the_seed_decides_the_order() -> None:
    def take(seed: int) -> list[Example]:
        return list(islice(load_source("digits", {}, 100, seed).sft, 100))

    assert take(1) == take(1) != take(2)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        jsonl(path, [*ROWS[:10], *ROWS[10:]])
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    columns = {"completion": "how", "metadata": ["answer"]}
    found = list(load_source("files", {"path": str(path), "columns": columns}, 0, 0).train)
    assert sorted(e.answer for e in found) == sorted(str(row["answer"]) for row in ROWS)
    assert found != list(load_source("files", {"path": str(path), "columns": columns}, 0, 1).train)
    ordered = load_source("files", {"path": str(path), "columns": columns, "shuffle": False}, 0, 0)
    row = f"{path}:1" if suffix == "jsonl" else f"{path} row 1"
    first = next(iter(ordered.train))
    assert first == Example("0 + 0 =", "0", "it is 0", "it is 0", metadata={"answer": 0}, row=row)


def test_splits_of_their_own(tmp_path: Path) -> None:
    main, other = jsonl(tmp_path / "a.jsonl", ROWS[:4]), jsonl(tmp_path / "b.jsonl", ROWS[4:6])
    shown = jsonl(tmp_path / "c.jsonl", [{"instruction": "hello", "output": "world"}])
    args = {"path": main, "eval": other, "sft": shown}
    splits = load_source("files", args, 0, 0)
    assert [len(list(part)) for part in (splits.train, splits.eval)] == [4, 2]
    assert [e.prompt for e in splits.sft] == ["hello"]
    assert splits.separate == {"eval", "sft"}


def test_answers_are_cut_out(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"prompt": "p", "answer": "2 and 2 make\n#### 4"}])
    columns = {
        "prompt": "prompt",
        "completion": "answer",
        "answer": "answer",
        "answer_regex": r"#### (.+)",
    }
    args = {"path": path, "columns": columns}
    (example,) = load_source("files", args, 0, 0).train
    assert (example.answer, example.solution) == ("4", "2 and 2 make\n#### 4")
    args["columns"] = {"answer": "answer", "answer_regex": "none (.)"}
    (bad,) = load_source("files", args, 0, 0).train
    assert isinstance(bad, BadRow) and bad.row == f"{path}:1" and "finds no group" in bad.reason


@pytest.mark.parametrize("saved", [True, False])
def test_a_folder(tmp_path: Path, saved: bool) -> None:
    folder = tmp_path / "set"
    if saved:
        parts = {
            "train": datasets.Dataset.from_list(ROWS[:15]),
            "test": datasets.Dataset.from_list(ROWS[15:]),
        }
        datasets.DatasetDict(parts).save_to_disk(folder)
    else:
        folder.mkdir()
        jsonl(folder / "train.jsonl", ROWS[:15])
        jsonl(folder / "test.jsonl", ROWS[15:])
    splits = load_source("files", {"path": str(folder), "eval_split": "test"}, 0, 0)
    assert [len(list(part)) for part in (splits.train, splits.eval)] == [15, 5]
    with pytest.raises(UserError, match=r"no such split|no file of the split"):
        load_source("files", {"path": str(folder), "eval_split": "other"}, 0, 0)


def test_without_such_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data: .*no such file"):
        load_source("files", {"path": str(tmp_path / "none")}, 0, 0)


@pytest.mark.parametrize("task", ["spell_backward", "chain_sum", "gsm_symbolic", "countdown"])
def test_reasoning_gym_answers_satisfy_its_verifiers(task: str) -> None:
    from tuneloop.rewards.reasoning_gym import score

    splits = load_source("reasoning_gym", {"task": task}, 10, 3)
    found = list(islice(splits.eval, 5)) + list(islice(splits.train, 5))
    assert len(found) == 10
    for example in found:
        metadata = json.loads(json.dumps(example.metadata))
        assert score(example.answer, example.answer, metadata) == 1.0
        assert score("certainly wrong", example.answer, metadata) < 1.0


@pytest.mark.parametrize(
    ("source", "args", "message"),
    [
        ("none", {}, "unknown; known: digits"),
        (
            "digits",
            {"digit": 3},
            r"source_args.digit: 3: unknown; digits takes digits, sft_wrong_share",
        ),
        ("digits", {"digits": 0}, "source_args.digits: 0: has to be greater"),
        (
            "digits",
            {"digits": "four"},
            "source_args.digits: 'four': has to be a whole number",
        ),
        ("digits", {"sft_wrong_share": 1.5}, "source_args.sft_wrong_share: 1.5"),
        ("files", {}, "source_args.path: None: is required"),
        (
            "files",
            {"path": "x.jsonl", "columns": {"question": "q"}},
            "source_args.columns.question",
        ),
        ("reasoning_gym", {"task": "chain"}, "not a task of reasoning_gym; known: chain_sum"),
        (
            "reasoning_gym",
            {"task": "chain_sum", "config": {"min_terms": 0}},
            "source_args.config: .*chain_sum refuses",
        ),
        (
            "reasoning_gym",
            {"task": "chain_sum", "config": {"none": 0}},
            "source_args.config: .*chain_sum refuses",
        ),
    ],
)
def test_bad_arguments(source: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_source(source, args, 10, 0)


def test_a_task_without_gold_answers() -> None:
    with pytest.raises(UserError, match="has no gold answers"):
        list(load_source("reasoning_gym", {"task": "rush_hour"}, 2, 0).train)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "no such file"),
        ("x.jsonl", b"", "is empty"),
        ("x.jsonl", b"\n\n", "is empty"),
        ("x.jsonl", "{}".encode("utf-16"), "is UTF-16; save it as UTF-8"),
        ("x.jsonl", b'["a"]\n["b"]', "x.jsonl:1.*is a list, not a JSON object"),
        ("x.json", b'[{"prompt": "a"}, {"prompt"', r"is not JSON .* in row 2, .* in line 1"),
        ("x.json", b'[\n{"prompt": "a"},\n{"b": 1} x]', r"is not JSON .* in row 2"),
        ("x.json", b'[{"prompt": "a"}] x', "something follows the array"),
        ("x.jsonl", b'{"q": "a", "text_": "b"}', "has the columns q, text_, .*docs/extending.md"),
        ("x.txt", b"a", "must end in one of .jsonl, .json"),
        ("x.csv", b"a,a\n1,2", "x.csv:1.*must name every column once"),
        ("x.csv", b"a\n\xff", "is not UTF-8"),
        ("x.csv", b'a,b\n"1,2\n', "is not CSV"),
        ("x.jsonl.gz", b"nonsense", "is not readable as gzip"),
        ("x.parquet", b"PAR1 nonsense", "is not readable as Parquet"),
        ("x.arrow", b"nonsense", "is not readable as Arrow"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(load_source("files", {"path": str(path)}, 10, 0).train)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt', "is not JSON"),
        (b'["a"]', "is a list, not a JSON object"),
        (b'{"prompt": "\xff", "answer": "b"}', "is not UTF-8"),
        (b'{"prompt": "a", "answer": NaN}', "has the number NaN, which is not JSON"),
        (b'{"prompt": "a", "answer": -Infinity}', "has the number -Infinity"),
        (b'{"prompt": "a", "answer": 1e999}', "has the number 1e999, which is too large"),
        (b'{"prompt": "a", "answer": "1", "answer": "2"}', "has the key 'answer' twice"),
        (b'{"prompt": "a", "answer": "\\ud83d"}', "has half of a surrogate pair"),
        (b'{"prompt": "a", "answer": ' + b"[" * 3000 + b"]" * 3000 + b"}", "is nested deeper"),
        (b'{"prompt": "a", "answer": ' + b"[" * 90 + b"]" * 90 + b"}", "is nested deeper"),
        (b'{"prompt": "a", "answer": ' + b"1" * 5000 + b"}", "is not JSON"),
        (b'{"prompt": "a", "answer": null}', "must hold text or a number, not null"),
        (b'{"prompt": "a", "answer": true}', "must hold text or a number, not a boolean"),
        (b'{"prompt": "a", "answer": " "}', "column 'answer' is empty"),
        (b'{"prompt": "", "answer": "b"}', "column 'prompt' is empty"),
        (b'{"prompt": [{"text": "a"}], "answer": "b"}', "column 'prompt': message 1 has no role"),
        (b'{"prompt": "a"}', "the row has no such column"),
    ],
)
def test_bad_rows_are_named_as_the_file_names_them(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = tmp_path / "x.jsonl"
    good = [json.dumps(row).encode() for row in ROWS[:5]]
    path.write_bytes(b"\n".join([*good[:2], b"", line, *good[2:]]))
    found = list(load_source("files", {"path": str(path), "shuffle": False}, 10, 0).train)
    bad = found.pop(2)
    assert isinstance(bad, BadRow) and bad.row == f"{path}:4" and reason in bad.reason
    rows = [example.row for example in found if isinstance(example, Example)]
    assert rows == [f"{path}:{line}" for line in (1, 2, 5, 6, 7)]


def write_table(path: Path) -> None:
    """Write `ROWS` in the form that the name of the file says."""
    table = pa.Table.from_pylist(ROWS)
    name = path.name
    if name.endswith(".parquet"):
        pq.write_table(table, path)
    elif name.endswith(".feather"):
        with pa.ipc.new_file(str(path), table.schema) as out:
            out.write_table(table, max_chunksize=7)
    elif name.endswith(".arrow"):
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    else:
        path.write_bytes(compress(path.suffix, render(name).encode()))


def render(name: str) -> str:
    """Render `ROWS` as the text of a file of this name."""
    if ".csv" in name or ".tsv" in name:
        delimiter = "\t" if ".tsv" in name else ","
        lines = [delimiter.join(ROWS[0])]
        lines += [delimiter.join(map(str, row.values())) for row in ROWS]
        return "\n".join(lines)
    if "array" in name:
        return "\ufeff" + json.dumps(ROWS, indent=1)
    if "wrapped" in name:
        return json.dumps({"version": 1, "data": ROWS})
    if "spread" in name:
        return "\n".join(json.dumps(row, indent=2) for row in ROWS)
    return "\ufeff" + "\r\n".join(map(json.dumps, ROWS))


def compress(suffix: str, data: bytes) -> bytes:
    """Compress data as the suffix of a file says."""
    names = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
    if suffix not in names:
        return data
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, names[suffix]) as stream:
        stream.write(data)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("rows.jsonl", ":3"),
        ("rows.json", ":3"),
        ("array.json", " row 3"),
        ("wrapped.json", " row 3"),
        ("spread.json", " row 3"),
        ("rows.csv", ":4"),
        ("rows.tsv", ":4"),
        ("rows.parquet", " row 3"),
        ("rows.arrow", " row 3"),
        ("rows.feather", " row 3"),
        ("rows.jsonl.gz", ":3"),
        ("rows.jsonl.zst", ":3"),
        ("rows.csv.bz2", ":4"),
    ],
)
def test_every_form_of_a_file_gives_the_same_rows(tmp_path: Path, name: str, row: str) -> None:
    path = tmp_path / name
    write_table(path)
    splits = load_source("files", {"path": str(path), "shuffle": False}, 0, 0)
    found = [example for example in splits.train if isinstance(example, Example)]
    assert [(example.prompt, example.answer) for example in found] == [
        (values["prompt"], str(values["answer"])) for values in ROWS
    ]
    assert found[2].row == f"{path}{row}"
    assert splits.rows == 20 and "20 rows" in splits.lines[0]


def test_several_files(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", ROWS[:12])
    jsonl(tmp_path / "b.jsonl", ROWS[12:])
    for place in (
        str(tmp_path / "*.jsonl"),
        str(tmp_path),
        [f"{tmp_path}/{n}.jsonl" for n in "ab"],
    ):
        splits = load_source("files", {"path": place, "shuffle": False}, 0, 0)
        found = [example for example in splits.train if isinstance(example, Example)]
        assert [example.prompt for example in found] == [row["prompt"] for row in ROWS]
        assert found[12].row == f"{tmp_path}/b.jsonl:1"
    with pytest.raises(UserError, match="no file there ends in one of"):
        load_source("files", {"path": str(tmp_path / "*.parquet")}, 0, 0)


def test_text_of_a_csv_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('prompt,answer\n"two\nlines",007\nb,NA\nc,1e5\nd,1,2\n')
    found = list(load_source("files", {"path": str(path), "shuffle": False}, 0, 0).train)
    examples = [example for example in found if isinstance(example, Example)]
    assert [example.answer for example in examples] == ["007", "NA", "1e5"]
    assert [example.row for example in examples] == [f"{path}:{line}" for line in (2, 4, 5)]
    assert found[3] == BadRow(f"{path}:6", "has 3 fields where the header has 2")


def test_fields_that_nested_parquet_fills_with_null_are_left_out(tmp_path: Path) -> None:
    def chat(name: str, **arguments: str) -> list[dict[str, Any]]:
        call = {"function": {"name": name, "arguments": arguments}}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        return [{"role": "user", "content": "q"}, reply]

    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": m} for m in (chat("get", city="X"), chat("time", zone="Y"), plain)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    jsonl(tmp_path / "x.jsonl", rows)
    prompts = [
        [
            example.prompt
            for example in load_source(
                "files", {"path": f"{tmp_path}/x.{suffix}", "shuffle": False}, 0, 0
            ).train
            if isinstance(example, Example)
        ]
        for suffix in ("parquet", "jsonl")
    ]
    assert prompts[0] == prompts[1]
    assert prompts[0][0][1]["tool_calls"][0]["function"]["arguments"] == {"city": "X"}
    assert prompts[0][2] == plain


def test_a_folder_does_not_name_the_delimiter(tmp_path: Path) -> None:
    folder = tmp_path / "x.tsv.parts"
    folder.mkdir()
    (folder / "rows.csv").write_text("prompt,answer\n1+1,2\n")
    splits = load_source("files", {"path": str(folder / "rows.csv")}, 1, 0)
    assert [row.answer for row in splits.train if isinstance(row, Example)] == ["2"]
