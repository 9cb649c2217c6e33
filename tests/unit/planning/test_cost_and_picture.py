"""What `plan --measured RUN --price P` adds up, and the picture of `plan --svg`."""

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.unit import toy
from tests.unit.planning.test_plan import WORKFLOW
from tuneloop.cli import run_cli
from tuneloop.config.loading import find_pipeline
from tuneloop.core.artifacts import MANIFEST, dump_checked_json, load_checked_json
from tuneloop.planning.cost import estimate_cost, read_seconds
from tuneloop.planning.picture import draw_graph
from tuneloop.runs.run_record import Run

SVG = "{http://www.w3.org/2000/svg}"


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
        found.configure(None, ["engine.name=vllm", f"engine.replicas={replicas}", *sets])
    )
    hours, _, cost = estimate_cost(
        built, read_seconds(Run.open("r", str(tmp_path))), "at most", "as r took", None
    )
    total = float(hours.split()[3].rstrip(","))
    assert float(cost.split()[-1]) == pytest.approx(replicas * total, rel=0.02), (
        "ten workflows, one after the other"
    )


def test_a_price_needs_seconds_and_a_picture_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli(["plan", "sft", "--price", "2"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: --price: 2.0: needs seconds: give --measured RUN or --device NAME"
    )
    assert run_cli(["plan", "sft", "--svg", "nowhere/a.svg"]) == 2
    assert (
        capsys.readouterr().err
        == "error: --svg: 'nowhere/a.svg': cannot be written (No such file or directory)\n"
    )
    assert (
        run_cli(["plan", "sft", "--svg", "a.svg"]) == 0
        and ET.parse("a.svg").getroot().tag == f"{SVG}svg"
    )


def read_picture(text: str) -> tuple[dict[str, tuple[float, float]], list[dict[str, Any]]]:
    """Return stage → where its box is, and the paths."""
    root = ET.fromstring(text)
    names = [each.text or "" for each in root.iter(f"{SVG}text") if "class" not in each.attrib]
    boxes = [(float(each.attrib["x"]), float(each.attrib["y"])) for each in root.iter(f"{SVG}rect")]
    assert len(names) == len(boxes) == len({*boxes}), "no two boxes at one place"
    assert all(
        x < float(root.attrib["width"]) and y < float(root.attrib["height"]) for x, y in boxes
    )
    return dict(zip(names, boxes, strict=True)), [each.attrib for each in root.iter(f"{SVG}path")]


@pytest.mark.parametrize("sets", [["loop.iterations_per_pod=0"], ["loop.iterations_per_pod=5"]])
def test_every_stage_is_right_of_those_that_it_comes_after_and_the_loop_leads_back(
    sets: list[str],
) -> None:
    found = find_pipeline("grpo")
    boxes, paths = read_picture(
        draw_graph(found.build(found.configure(None, ["engine.name=transformers", *sets])))
    )
    line = ["data-prep", "base-model", "rollout", "reward", "policy-update", "evaluate-after"]
    across = [boxes[name][0] for name in line]
    assert across == sorted({*across}) and boxes["export"][0] > boxes["policy-update"][0]
    assert boxes["evaluate-before"][0] > boxes["base-model"][0]
    assert any(path.get("class") == "back" for path in paths)


def test_steps_come_one_group_after_the_other() -> None:
    boxes, _ = read_picture(draw_graph(WORKFLOW))
    assert boxes["base"][0] == boxes["sft"][0] < boxes["rollout"][0]
