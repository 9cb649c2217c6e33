"""A warm-up that lasts as long as the training is said before the run starts, with what to set."""

import pytest

from tuneloop.cli import run_cli


@pytest.mark.parametrize(
    ("pipeline", "settings", "note"),
    [
        (
            "sft",
            ["sft.max_steps=40", "sft.warmup_steps=50"],
            "sft.warmup_steps: 50: is no less than the 40 steps of sft.max_steps",
        ),
        ("sft", ["sft.max_steps=20"], "set sft.warmup_steps=2 (a tenth)"),
        ("dpo", ["preference.max_steps=4"], "preference.warmup_steps: 10: is no less than the 4"),
        (
            "grpo",
            ["update.max_steps=3", "update.warmup_steps=4"],
            "update.warmup_steps: 4: is no less than the 3",
        ),
        ("sft", ["sft.max_steps=40", "sft.warmup_steps=10"], ""),
        ("sft", ["sft.max_steps=1", "sft.warmup_steps=0"], ""),
        # Of epochs the warm-up is a tenth of the steps, whatever is set.
        ("sft", ["sft.epochs=1", "sft.max_steps=4"], ""),
        ("sft_then_grpo", [], ""),
    ],
)
def test_a_long_warmup_is_one_line(
    pipeline: str, settings: list[str], note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [word for setting in settings for word in ("--set", setting)]
    for command in ("lint", "plan"):
        assert run_cli([command, pipeline, *sets]) == 0
        notes = [line for line in capsys.readouterr().err.splitlines() if "warmup" in line]
        assert len(notes) == bool(note)
        assert all(line.startswith("note: ") and note in line for line in notes)
