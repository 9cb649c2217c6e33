"""What `tuneloop run`, `status` and the report say of the data and of held-out losses."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.ui.test_report import read_answers
from tuneloop.cli import run_cli
from tuneloop.cli.live import Display
from tuneloop.core.artifacts import Draft
from tuneloop.core.component import COMMITTED
from tuneloop.data.sizes import Split, describe_rows
from tuneloop.local.journal import Node
from tuneloop.runs.run_record import Run
from tuneloop.stages.data_prep import data_prep
from tuneloop.ui.report import render_page

LOSSES = {"demonstrations": 1, "targets": 12, "loss_before": 2.5, "loss_after": 1.25}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"train": 0, "eval": 0, "sft": 57, "sft_eval": 3}, "57 demonstrations, 3 held out"),
        ({"train": 1, "eval": 0, "sft": 1}, "1 prompt; 1 demonstration"),
        ({"train": 2000, "eval": 256}, "2,000 prompts, 256 held out"),
        ({"preference": 95, "preference_eval": 5}, "95 pairs, 5 held out"),
        ({"eval": 8, "sft": 40}, "8 held-out prompts; 40 demonstrations"),
        ({"train": 0, "eval": 0, "sft": 0}, "no rows"),
    ],
)
def test_rows_are_counted_in_words(rows: dict[Split, int], words: str) -> None:
    assert describe_rows(rows) == words


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with the run `r`, which prepared chats and trained on them."""
    chats = tmp_path / "chats.jsonl"
    lines: list[str] = []
    for number in range(20):
        turns = [{"from": "human", "value": f"Say {number}."}, {"from": "gpt", "value": "Yes."}]
        lines.append(json.dumps({"conversations": turns}))
    chats.write_text("\n".join(lines))
    arguments: dict[str, Any] = {"source": str(chats)}
    data_prep(out=f"{tmp_path}/runs/r/data-prep", **arguments)
    draft = Draft(f"{tmp_path}/runs/r/sft")
    (draft.path / "weights").write_text("")
    draft.commit(
        stage="sft",
        role="trainer",
        kind="checkpoint",
        results={"loss": 1.0, "version": 1},
        facts={"version": 1, "held_out": LOSSES},
    )
    return tmp_path / "runs"


def test_status_says_what_was_recognised_and_the_held_out_loss(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run_cli(["status", "r", "--store", str(store)]) == 0
    out = capsys.readouterr().out
    assert "  data          recognised: ShareGPT; conversations from conversations" in out
    assert "  rows          19 demonstrations, 1 held out\n" in out
    losses = "2.500 → 1.250 nats a token, perplexity 12.18 → 3.49"
    assert f"  held-out loss {losses} (12 target tokens of 1 held-out demonstration)" in out
    assert "train 0" not in out
    assert run_cli(["status", "r", "--store", str(store), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["held_out"] == LOSSES
    assert status["data"]["rows"] == {"train": 0, "eval": 0, "sft": 19, "sft_eval": 1}
    assert status["data"]["recognised"][0].startswith("recognised: ShareGPT")
    summaries = {stage["stage"]: stage["summary"] for stage in status["stages"]}
    assert summaries["data-prep"] == "19 demonstrations, 1 held out"


def test_the_report_has_both(store: Path) -> None:
    (now,) = (
        answer
        for path, answer in read_answers(render_page(Run.open("r", str(store)))).items()
        if path.endswith("/now")
    )
    assert now["data"].startswith("recognised: ShareGPT")
    assert now["rows"] == "19 demonstrations, 1 held out"
    assert now["held_out_loss"].startswith("2.500 → 1.250 nats a token")


def test_the_last_step_of_a_stage_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its loss, or after others; what was over at once has no line of its own."""
    lines = [
        "sft: 4/4 steps  0.4 steps/s  loss 2.182",
        "evaluate: 0/2 prompts",
        "evaluate: 2/2 prompts  0.1 prompts/s",
    ]
    with Display(Run("r", str(tmp_path)), {"spec": {}}) as display:
        for line in [*lines, "data_prep: 57/57 rows  99.0 rows/s"]:
            stage = line.partition(":")[0]
            display.log(Node(stage, stage, stage, stage, "Pod"), line)
    assert [line[10:] for line in capsys.readouterr().out.splitlines()] == lines


def test_the_terminal_of_a_run_shows_what_data_prep_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = Node("d", "r.data-prep", "data-prep", "data-prep", "Pod", outputs={"sft": "19"})
    with Display(Run("r", str(tmp_path)), {"spec": {}}) as display:
        display.log(node, "data_prep: recognised: ShareGPT; conversations from conversations")
        display.log(node, "data_prep: 19 demonstrations, 1 held out")
        node.phase = "Succeeded"
        display.node(node)
    assert [line[10:] for line in capsys.readouterr().out.splitlines()] == [
        "data-prep: recognised: ShareGPT; conversations from conversations",
        "data-prep: 19 demonstrations, 1 held out",
        "data-prep: 0.0 s",
    ]


def test_data_that_is_committed_already_has_its_counts_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = Node("d", "r.data-prep", "data-prep", "data-prep", "Pod", outputs={"sft": "19"})
    with Display(Run("r", str(tmp_path)), {"spec": {}}) as display:
        display.log(node, f"data_prep: {COMMITTED}")
        node.phase = "Succeeded"
        display.node(node)
    assert [line[10:] for line in capsys.readouterr().out.splitlines()] == [
        f"data-prep: {COMMITTED}",
        "data-prep: 0.0 s  sft 19",
    ]
