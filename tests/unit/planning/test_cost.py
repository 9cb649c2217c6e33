"""What `plan --measured RUN --price P` adds up."""

from pathlib import Path

import pytest

from tests.unit import toy
from tests.unit.planning.test_plan import WORKFLOW
from tuneloop.cli import run_cli
from tuneloop.config.loading import find_pipeline
from tuneloop.core.artifacts import MANIFEST, dump_checked_json, load_checked_json
from tuneloop.planning.cost import estimate_cost, read_seconds
from tuneloop.runs.run_record import Run


def test_the_price_is_that_of_all_accelerators_for_as_long_as_their_stages_took(
    tmp_path: Path,
) -> None:
    toy.make(f"{tmp_path}/r", 2)
    for path, seconds in (
        ("sft", 3600.0),
        ("iterations/1/rollout", 300.0),
        ("iterations/2/rollout", 420.0),
    ):
        file = tmp_path / "r" / path / MANIFEST
        manifest = load_checked_json(file.read_bytes(), MANIFEST, path, "")
        manifest["timings"]["total"] = seconds
        file.write_bytes(dump_checked_json(manifest, MANIFEST))
    seconds = read_seconds(Run.open("r", str(tmp_path)))
    hours, pauses, cost = estimate_cost(WORKFLOW, seconds, "at most", "as r took", 2.5)
    # 11 of sft by an hour, 10 rollouts by the median of 6 minutes, and 22 pods
    assert hours.startswith("hours: at most 12.1, as r took, one stage after another: ")
    assert (
        "sft 11 × 3.6e+03 s, rollout 10 × 360 s, without base-model, of which it says nothing"
        in hours
    )
    assert "10 s for each of at most 22 pods" in pauses
    assert cost == "accelerator hours: at most 22 × 2.5 = 55", (
        "of two accelerators each, and of no other stage"
    )
    del seconds["sft"]
    *_, cost = estimate_cost(WORKFLOW, seconds, "at most", "as r took", 2.5)
    assert cost == "accelerator hours: at most 0 × 2.5 = 0, without sft"


@pytest.mark.parametrize("replicas", [1, 3])
def test_every_replica_of_a_server_costs_from_the_first_pod_to_the_last(
    tmp_path: Path, replicas: int
) -> None:
    toy.make(f"{tmp_path}/r", 2)
    sets = [
        "cluster.sampler.gpus=1",
        "cluster.trainer.gpus=0",
        "loop.iterations=100",
        "loop.per_workflow=10",
    ]
    found = find_pipeline("grpo")
    built = found.build(
        found.configure(None, ["engine.kind=vllm", f"engine.replicas={replicas}", *sets])
    )
    hours, _, cost = estimate_cost(
        built, read_seconds(Run.open("r", str(tmp_path))), "at most", "as r took", None
    )
    total = float(hours.split()[3].rstrip(","))
    assert float(cost.split()[-1]) == pytest.approx(replicas * total, rel=0.02), (
        "ten workflows, one after the other"
    )


def test_a_price_needs_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli(["plan", "sft", "--price", "2"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: --price: 2.0: needs seconds: give --measured RUN or --device NAME"
    )
