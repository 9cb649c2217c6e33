"""Columns that the user names, and files of several layouts."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.test_layouts import SAMPLES
from tuneloop.config.loading import find_pipeline
from tuneloop.core.errors import UserError
from tuneloop.data import BadRow, Example
from tuneloop.data.sources import load_source

QUESTIONS = [{"ask": f"What is {n} + 1?", "answer": f"so\n#### {n + 1}"} for n in range(60)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(path: Any, **arguments: Any) -> list[Example | BadRow]:
    arguments = {"path": path, "shuffle": False, **arguments}
    return list(load_source("files", arguments, 0, 0).train)


def test_a_regex_alone_cuts_the_column_of_the_answers(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", QUESTIONS)
    columns = {"prompt": "ask", "answer_regex": "#### (.+)"}
    answers = [example.answer for example in load(path, columns=columns)]
    assert answers == [str(n + 1) for n in range(60)]


def test_a_regex_alone_overrides_what_a_layout_says(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", SAMPLES["gsm8k"])
    columns = {"answer_regex": "#### ([0-9])"}
    answers = [example.answer for example in load(path, columns=columns)]
    assert answers == ["6", "9", "1", "1", "1"]


@pytest.mark.parametrize(
    ("layout", "columns", "message"),
    [
        (
            "messages",
            {"answer_regex": "(.)"},
            r"answer_regex: '\(\.\)': .*none that is called 'answer'",
        ),
        ("gsm8k", {"answer_regex": "(."}, r"answer_regex: '\(\.': is no regular expression"),
        ("gsm8k", {"answer_regex": "#### .+"}, r"answer_regex: .*has no group"),
        ("gsm8k", {"promt": "question"}, r"columns.promt: 'question': .*did you mean prompt\?"),
        ("gsm8k", {"zzz": "question"}, r"columns.zzz: 'question': .*known: prompt, messages"),
        ("gsm8k", {"system": "sys"}, r"columns.system: 'sys': no such column in .*rows.jsonl"),
    ],
)
def test_columns_that_cannot_be_meant_are_refused(
    layout: str, columns: dict[str, str], message: str, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", SAMPLES[layout])
    with pytest.raises(UserError, match=message):
        load(path, columns=columns)


def test_a_setting_that_is_misspelt_is_refused_before_anything_runs() -> None:
    sft = find_pipeline("sft")
    with pytest.raises(UserError, match=r"data.columns.promt: 'ask': .*did you mean prompt\?"):
        sft.configure(None, ["data=rows.jsonl", "data.columns.promt=ask"])
    with pytest.raises(UserError, match=r"data.mixture.0.wieght: 2: .*did you mean weight\?"):
        sft.configure(None, ['data.mixture=[{"source": "rows.jsonl", "wieght": 2}]'])


def test_damaged_text_in_a_column_names_it(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"ask": "a", "extra": {"reward": '{"truth": "b"}'}},
        {"ask": "a", "extra": {"reward": '{"truth": '}},
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    good, bad = load(path, columns={"prompt": "ask", "answer": "extra.reward.truth"})
    assert isinstance(good, Example) and good.answer == "b"
    assert isinstance(bad, BadRow)
    assert "column 'extra.reward' has text that is not JSON" in bad.reason


def test_a_column_may_be_in_few_rows(tmp_path: Path) -> None:
    """Here in one row, far behind those that decide what is recognised."""
    rows = [dict(row) for row in QUESTIONS]
    rows[50] |= {"sys": "Be brief.", "meta": {"source": "a book"}}
    columns = {"prompt": "ask", "answer": "answer", "system": "sys", "metadata": ["meta.source"]}
    examples = load(write_rows(tmp_path / "rows.jsonl", rows), columns=columns)
    with_system = [n for n, example in enumerate(examples) if isinstance(example.prompt, list)]
    assert with_system == [50]
    assert [e.metadata["meta.source"] for e in examples] == [None] * 50 + ["a book"] + [None] * 9


def test_each_file_is_recognised_by_itself(tmp_path: Path) -> None:
    layouts = ("messages", "gsm8k", "preference")
    paths = [write_rows(tmp_path / f"{name}.jsonl", SAMPLES[name]) for name in layouts]
    more = write_rows(tmp_path / "more.jsonl", SAMPLES["gsm8k"])
    splits = load_source("files", {"path": [*paths, more], "shuffle": False}, 0, 0)
    assert splits.rows == 20
    assert [line.partition(";")[0] for line in splits.lines] == [
        "recognised: chats (messages)",
        "recognised: GSM8K",
        "recognised: pairs (TRL)",
    ]
    assert f"10 rows in 2 files ({paths[1]}, …)" in splits.lines[1]
    examples = list(splits.train)
    alone = [example for path in (*paths[:2], more, paths[2]) for example in load(path)]
    assert examples == alone
    shuffled = load_source("files", {"path": [*paths, more]}, 0, 0).train
    assert sorted(example.row for example in shuffled) == sorted(e.row for e in alone)


def test_good_and_bad_completions_pair_up_beside_other_files(tmp_path: Path) -> None:
    paths = [
        write_rows(tmp_path / f"{name}.jsonl", SAMPLES[name])
        for name in ("gsm8k", "unpaired-preference")
    ]
    examples = load(paths)
    assert sum(example.rejected is not None for example in examples) == 2


def test_a_file_that_is_not_recognised_is_named(tmp_path: Path) -> None:
    known = write_rows(tmp_path / "known.jsonl", SAMPLES["gsm8k"])
    unknown = write_rows(tmp_path / "unknown.jsonl", [{"foo": "a", "bar": "b"}])
    with pytest.raises(UserError, match=r"unknown.jsonl.*has the columns foo, bar"):
        load([known, unknown])
    with pytest.raises(UserError, match=r"data.layout: 'gsm8k': does not fit .*unknown.jsonl"):
        load([known, unknown], layout="gsm8k")


def test_a_file_of_damaged_rows_is_one_more_of_its_neighbours(tmp_path: Path) -> None:
    known = write_rows(tmp_path / "known.jsonl", SAMPLES["gsm8k"])
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text('{"question": \n')
    examples = load([str(damaged), known])
    assert [example.row for example in examples if isinstance(example, BadRow)] == [f"{damaged}:1"]
    assert len(examples) == 6
