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
from tuneloop.data import Columns, Example
from tuneloop.stages.data_prep import load_source

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
    found = list(load_source("jsonl", {"train": str(path), "columns": columns}, 0, 0).train)
    assert sorted(e.answer for e in found) == sorted(str(row["answer"]) for row in ROWS)
    assert found != list(load_source("jsonl", {"train": str(path), "columns": columns}, 0, 1).train)
    ordered = load_source("jsonl", {"train": str(path), "columns": columns, "shuffle": False}, 0, 0)
    assert next(iter(ordered.train)) == Example("0 + 0 =", "0", "it is 0", metadata={"answer": 0})


def test_splits_of_their_own(tmp_path: Path) -> None:
    main, other = jsonl(tmp_path / "a.jsonl", ROWS[:4]), jsonl(tmp_path / "b.jsonl", ROWS[4:6])
    shown = jsonl(tmp_path / "c.jsonl", [{"q": "hello", "a": "world"}])
    args = {
        "train": main,
        "eval": other,
        "sft": shown,
        "sft_columns": {"prompt": "q", "answer": "a"},
    }
    splits = load_source("jsonl", args, 0, 0)
    assert [len(list(part)) for part in (splits.train, splits.eval)] == [4, 2]
    assert [e.prompt for e in splits.sft] == ["hello"]


def test_answers_are_cut_out(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"prompt": "p", "answer": "2 and 2 make\n#### 4"}])
    args = {"train": path, "columns": {"completion": "answer", "answer_regex": r"#### (.+)"}}
    example = next(iter(load_source("jsonl", args, 0, 0).train))
    assert (example.answer, example.solution) == ("4", "2 and 2 make\n#### 4")
    args["columns"] = {"answer_regex": "none (.)"}
    with pytest.raises(UserError, match="finds no group"):
        list(load_source("jsonl", args, 0, 0).train)


@pytest.mark.parametrize("saved", [True, False])
def test_huggingface_folder(tmp_path: Path, saved: bool) -> None:
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
    splits = load_source("huggingface", {"path": str(folder), "eval_split": "test"}, 0, 0)
    assert [len(list(part)) for part in (splits.train, splits.eval)] == [15, 5]
    with pytest.raises(UserError, match="other"):
        load_source("huggingface", {"path": str(folder), "eval_split": "other"}, 0, 0)


def test_huggingface_without_such_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"source_args.path: .*cannot be loaded"):
        load_source("huggingface", {"path": str(tmp_path / "none")}, 0, 0)


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
        ("digits", {"digits": 0}, "source_args.digits: 0: Input should be greater"),
        (
            "digits",
            {"digits": "four"},
            "source_args.digits: 'four': Input should be a valid integer",
        ),
        ("digits", {"sft_wrong_share": 1.5}, "source_args.sft_wrong_share: 1.5"),
        ("jsonl", {}, "source_args.train: None: is required"),
        (
            "jsonl",
            {"train": "x.jsonl", "columns": {"question": "q"}},
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
        ("x.jsonl", b'{"prompt": "a", "answer": "b"}\n{"prompt', r"x.jsonl:2.*is not JSON"),
        ("x.jsonl", b'["a"]', r"x.jsonl:1.*must be a JSON object"),
        ("x.jsonl", b'{"prompt": "\xff"}', "is not UTF-8"),
        (
            "x.jsonl",
            b'{"prompt": "a", "text": "b"}',
            "columns.answer: 'answer': no such column in .*: prompt, text",
        ),
        (
            "x.jsonl",
            b'{"prompt": "a", "answer": null}',
            "row 0: None: column 'answer' must hold text or a number",
        ),
        (
            "x.jsonl",
            b'{"prompt": "a", "answer": true}',
            "row 0: True: column 'answer' must hold text or a number",
        ),
        (
            "x.jsonl",
            b'{"prompt": "", "answer": "b"}',
            "column 'prompt' must hold text or chat messages",
        ),
        (
            "x.jsonl",
            b'{"prompt": [{"text": "a"}], "answer": "b"}',
            "column 'prompt' must hold text or chat messages",
        ),
        ("x.csv", b"prompt,answer\na,b", "must end in .jsonl, .json or .parquet"),
        ("x.parquet", b"PAR1 nonsense", "is not readable as Parquet"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(load_source("jsonl", {"train": str(path)}, 10, 0).train)


def test_columns_refuse_a_completion_that_is_no_text() -> None:
    columns = Columns(completion="how")
    with pytest.raises(UserError, match="column 'how' must hold text"):
        list(columns.examples([{"prompt": "p", "answer": "a", "how": None}], "x", None))
