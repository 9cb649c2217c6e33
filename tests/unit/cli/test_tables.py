"""Tables on terminals of several widths: what identifies a row is whole, messages are cut."""

import io
from collections.abc import Callable

import pytest

from tuneloop.cli.show import show_stages
from tuneloop.cli.tables import print_table
from tuneloop.runs.stages import StageStatus

NAMES = ("data-prep", "evaluate-before", "policy-update")
STAGES = [
    StageStatus(
        "data-prep", "Succeeded", done=1, seconds=1.5, retries=0, results={"train": 512, "eval": 64}
    ),
    StageStatus(
        "evaluate-before",
        "Interrupted",
        done=1,
        seconds=12.25,
        retries=0,
        results={"mean_reward": 0.4375},
    ),
    StageStatus(
        "policy-update",
        "Running",
        progress="3/9",
        done=60,
        seconds=4321.0,
        retries=12,
        iteration=60,
    ),
    StageStatus(
        "export",
        "Failed",
        retries=1,
        message="exit code 1: no space left on the device below /var/lib/tuneloop",
    ),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, show: Callable[[], None]
) -> list[str]:
    screen = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", screen)
    show()
    return [
        line.replace("\x1b[1m", "").replace("\x1b[0m", "")
        for line in screen.getvalue().splitlines()
        if line
    ]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_status_cuts_messages_and_never_names(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    head, rule, *lines = on_terminal(monkeypatch, columns, lambda: show_stages(STAGES))
    assert head.split() == ["stage", "phase", "done", "seconds", "retries", "newest"]
    for stage, line in zip(STAGES, lines):
        assert (
            line.startswith(stage.stage + " ")
            and f" {stage.phase}" in line
            and stage.progress in line
        )
        assert max(len(head), len(rule), len(line)) <= max(columns, 68), line
    assert lines[2].split()[:6] == ["policy-update", "Running", "(3/9)", "60", "4321.0", "12"]
    assert lines[3].endswith("…") == (columns < 110)
    assert lines[3].split()[:4] == ["export", "Failed", "1", "exit"]


def test_nothing_is_cut_where_nobody_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    show_stages(STAGES)
    assert STAGES[3].message in capsys.readouterr().out


def test_wide_characters_are_counted_by_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("東京", "東京" * 10)]
    head, _, line = on_terminal(
        monkeypatch, 20, lambda: print_table(("run", "message"), rows, cut="message")
    )
    assert head.rstrip() == "run   message"
    assert line == "東京  東京東京東京 …"


def test_a_message_of_several_lines_is_one_row_and_no_markup(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table(("run", "message"), [("a", "one\n  [bold]two[/bold]")])
    assert capsys.readouterr().out.splitlines()[-2:] == ["a    one [bold]two[/bold]", ""]
