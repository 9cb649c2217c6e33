"""The commonest mistakes: each command says setting, value and remedy in a line, before anything starts."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit import toy
from tests.unit.cli.mistakes import MISTAKES
from tuneloop.cli import execute, run_cli
from tuneloop.core.errors import EXIT_USER

LONGEST = 700
"""Characters of a line; most are far shorter."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: a run, data for each pipeline, and files that are not what they should be."""
    folder = tmp_path_factory.mktemp("user")
    toy.make(f"file://{folder}/runs/toy", 1)
    chat = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]
    rows = {
        "chats.jsonl": {"messages": chat},
        "problems.jsonl": {"question": "What is 1 + 2?", "answer": "3"},
        "pairs.jsonl": {"prompt": "a?", "chosen": "b", "rejected": "c"},
    }
    for name, row in rows.items():
        (folder / name).write_text(f"{json.dumps(row)}\n" * 30)
    texts = {
        "empty.jsonl": "",
        "notes.txt": "hello",
        "broken.yaml": "a: [1,\n",
        "list.yaml": "- a\n",
        "typo.yaml": "sft:\n  lerning_rate: 1\n",
        "plain.py": "X = 1\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    def refuse_start(*_: object) -> int:
        raise AssertionError("the run was started")

    monkeypatch.chdir(folder)
    # Whatever is not refused would train a model.
    monkeypatch.setattr(execute.Executor, "execute", refuse_start)
    yield folder


def split_command(command: str, model: Path) -> list[str]:
    """Split a command of the table into words."""
    data = {"SFT": "chats.jsonl", "GRPO": "problems.jsonl", "DPO": "pairs.jsonl"}
    first, *words = command.split()
    if first not in data:
        return [first, *words]
    settings = [f"base_model={model}", f"data={data[first]}", *words]
    options = [word for setting in settings for word in ("--set", setting)]
    return ["run", first.lower(), *options]


@pytest.mark.slow
@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_said_in_a_line(
    command: str, smollm2: Path, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_cli(split_command(command, smollm2))
    lines = capsys.readouterr().err.splitlines()
    assert code == EXIT_USER, lines
    # Several things may be wrong at once; notes say what is not known.
    assert all(line.startswith(("error: ", "note: ")) for line in lines), lines
    assert all(len(line) <= LONGEST for line in lines), lines
    assert any(MISTAKES[command] in line for line in lines), lines


def test_there_are_a_hundred_of_them() -> None:
    assert len(MISTAKES) >= 100


def test_help_lists_commands_below_headings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options:", "Run:", "Look:", "Prove:", "Cluster:", "Extensions:"]
    assert not [line for line in lines if line.endswith("...") and not line.startswith("Usage")]
    assert lines.index("Extensions:") < next(
        number for number, line in enumerate(lines) if line.split()[:1] == ["sweep"]
    )
