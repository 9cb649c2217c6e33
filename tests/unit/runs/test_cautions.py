"""Verdicts that few rows stand behind carry a caution, and verdicts of many do not."""

from pathlib import Path

import pytest

from tests.unit.ui.test_report import commit_evaluation
from tuneloop.cli import run_cli
from tuneloop.core.artifacts import Draft
from tuneloop.runs.cautions import describe_caution
from tuneloop.runs.run_record import Run
from tuneloop.ui.report import render_page


def commit_losses(store: Path, demonstrations: int) -> Run:
    """Commit a policy that was trained with these held out, and return its run."""
    losses = {"targets": 99, "loss_before": 2.5, "loss_after": 1.25}
    draft = Draft(f"{store}/r/sft")
    draft.commit(
        stage="sft",
        role="trainer",
        kind="checkpoint",
        facts={"version": 1, "held_out": {"demonstrations": demonstrations, **losses}},
    )
    return Run.open("r", str(store))


@pytest.mark.parametrize(
    ("demonstrations", "caution"),
    [
        (1, "Only 1 held-out demonstration was measured: a loss of so few says little; "),
        (19, "Only 19 held-out demonstrations were measured: a loss of so few says little; "),
        (20, ""),
    ],
)
def test_losses_of_few_demonstrations(
    tmp_path: Path, demonstrations: int, caution: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = commit_losses(tmp_path, demonstrations)
    assert describe_caution(run).startswith(caution)
    assert bool(describe_caution(run)) == bool(caution)
    page = render_page(run)
    assert ("hold out at least 20 (data.sft_eval)." in page) == bool(caution)
    assert run_cli(["status", "r", "--store", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert ("  caution " in out and caution in out) == bool(caution)
    assert run_cli(["status", "--store", str(tmp_path)]) == 0


@pytest.mark.parametrize(("times", "is_few"), [(4, True), (5, False)])
def test_rewards_of_few_completions(tmp_path: Path, times: int, is_few: bool) -> None:
    commit_evaluation(tmp_path / "r", "before", times * [0.0, 0.0, 0.0, 1.0], started=1.0)
    run = Run.open("r", str(tmp_path))
    caution = describe_caution(run)
    assert (
        caution.startswith("Only 16 held-out completions were scored (standard error 0.11): ")
        == is_few
    )
    assert bool(caution) == is_few


@pytest.mark.parametrize(("steps", "is_few"), [(1, True), (19, True), (20, False)])
def test_few_steps_name_the_setting_that_trains_longer(
    tmp_path: Path, steps: int, is_few: bool
) -> None:
    draft = Draft(f"{tmp_path}/r/sft")
    facts = {"version": 1, "step": steps}
    draft.commit(
        stage="sft", role="trainer", kind="checkpoint", params={"epochs": 3.0}, facts=facts
    )
    caution = describe_caution(Run.open("r", str(tmp_path)))
    assert ("--set sft.epochs=9." in caution) == is_few
    if steps == 1:
        assert caution.startswith("sft took 1 optimizer step in 3 epochs: ")


@pytest.mark.parametrize(
    ("epochs", "passes", "longer"),
    [(0.1, "0.1 epochs", "0.3"), (0.5, "0.5 epochs", "1.5"), (1.0, "1 epoch", "3")],
)
def test_a_part_of_an_epoch_is_named_as_one(
    tmp_path: Path, epochs: float, passes: str, longer: str
) -> None:
    draft = Draft(f"{tmp_path}/r/sft")
    facts = {"version": 1, "step": 2}
    draft.commit(
        stage="sft", role="trainer", kind="checkpoint", params={"epochs": epochs}, facts=facts
    )
    caution = describe_caution(Run.open("r", str(tmp_path)))
    assert caution.startswith(f"sft took 2 optimizer steps in {passes}: ")
    assert caution.endswith(f"--set sft.epochs={longer}.")


def test_without_held_out_rows_there_is_no_caution(tmp_path: Path) -> None:
    Draft(f"{tmp_path}/r/base-model").commit(
        stage="base_model", role="trainer", facts={"version": 0}
    )
    assert describe_caution(Run.open("r", str(tmp_path))) == ""
