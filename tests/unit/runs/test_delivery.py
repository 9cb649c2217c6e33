"""Six timings of each version, on each way to the engine: pulled by our server, by somebody else's fleet, refitted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.frozen import read_answers
from tests.unit.inference.crew import Crew
from tests.unit.weights.test_publication import chain
from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import Input, Results, Stage, component
from tuneloop.core.errors import Corrupt
from tuneloop.core.store import Store
from tuneloop.inference.fleet import open_fleet
from tuneloop.inference.fleet.refit import make_target, refit_fleet
from tuneloop.runs.delivery import (
    NUMBERS,
    Delivery,
    find_delivery,
    get_measurements,
    list_deliveries,
)
from tuneloop.runs.run_record import Run
from tuneloop.ui.report import render_page
from tuneloop.weights import live
from tuneloop.weights.publication import read_publications

TOOK = {"fetch_s": 0.25, "apply_s": 0.5, "drain_s": 4.0, "pause_s": 0.125, "tensors": 6}


@component("rollouts", image="rollout", role="sampler", results={})
def rollout(stage: Stage, policy: Input, *, notes: dict[str, Any]) -> Results:
    """What `tuneloop.inference.generate.generate_completions` leaves in a stage."""
    stage.timings.update(load=0.5, canary=1.0)
    stage.notes.update(notes)
    stage.facts.update(
        version=policy.manifest.facts["version"], staleness={"max": 1, "mean": 0.25, "bound": 1}
    )
    (stage.out / "rollouts").touch()
    return {}


def pulled(version: int, served_at: float, **more: Any) -> dict[str, Any]:
    """What a replica says of its last pull."""
    return {
        **TOOK,
        "version": version,
        "full": None,
        "identical": 6,
        "served_at": served_at,
        **more,
    }


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[Run, list[Artifact]]]:
    policies = chain(tmp_path / "demo", 3, weights=f"{tmp_path}/demo/weights")
    yield Run.open("demo", str(tmp_path)), policies


def asked(run: Run, policy: Artifact, **notes: Any) -> Delivery:
    """What is known of a version once it was rolled out with."""
    rollout(out=f"{run.url}/iterations/1/rollout", policy=policy.ref, notes=notes)
    run.refresh()
    return next(d for d in list_deliveries(run) if d.version == policy.manifest.facts["version"])


def test_what_is_published_is_known_before_anybody_asks(run: tuple[Run, list[Artifact]]) -> None:
    full, first, _ = list_deliveries(run[0])
    assert (full.way, full.encoding, full.density) == ("published", None, None)
    assert (full.sent_bytes or 0) >= (full.full_bytes or 0) > 0
    assert first.encoding == "gap8-xor" and 0 < (first.sent_bytes or 0) < (first.full_bytes or 0)
    assert (
        0 < (first.density or 0) < 0.05 and (first.encode_s or 0) > 0 and (first.publish_s or 0) > 0
    )
    assert first.pause_s is first.waited_s is None


def test_pulled_by_our_server(run: tuple[Run, list[Artifact]]) -> None:
    at = read_publications(f"{run[0].url}/weights")[1]["at"]
    done = asked(run[0], run[1][1], pulled=pulled(1, at + 2.0))
    assert (done.way, done.replicas, done.proved) == ("pulled", 1, "6/6")
    assert (done.materialize_s, done.pause_s, done.waited_s, done.behind) == (
        0.75,
        0.125,
        1.5,
        0.25,
    )
    assert done.converged_s == pytest.approx(2.0)
    assert all(getattr(done, name) is not None for name in NUMBERS)


def test_pulled_by_an_opaque_fleet(run: tuple[Run, list[Artifact]]) -> None:
    """Its replicas record what they did; one that joined late does not count as slow, a later one not at all."""
    root, at = Store(f"{run[0].url}/weights"), read_publications(f"{run[0].url}/weights")[1]["at"]
    assert asked(run[0], run[1][2]).waited_s == 1.5, (
        "of replicas that record nothing, all that is known"
    )
    live.record_pull(root, "a", pulled(1, at + 0.001))
    live.record_pull(root, "b", pulled(1, at + 0.003, pause_s=0.25, identical=5))
    live.record_pull(root, "late", pulled(1, at + 0.005, full=0, fetch_s=1.0))
    live.record_pull(root, "later", pulled(1, time.time() + 3600, fetch_s=9.0))
    rollout(out=f"{run[0].url}/iterations/2/rollout", policy=run[1][1].ref, notes={})
    run[0].refresh()
    done = list_deliveries(run[0])[1]
    assert (done.replicas, done.materialize_s, done.pause_s, done.proved) == (3, 1.5, 0.25, "5/6")
    assert done.converged_s == pytest.approx(0.003, abs=1e-6)
    assert live.list_served_versions(root) == {}, "a record is no lease"


def test_refitted(tmp_path: Path) -> None:
    """A refit that found the version there does not hide the one that brought it."""
    policies, crew = chain(tmp_path / "demo", 2), Crew()
    members = [crew.hire("a"), crew.hire("b")]
    members[0].on_update = lambda: time.sleep(0.05)
    run = Run.open("demo", str(tmp_path))
    for iteration in (1, 2):
        about = asdict(
            refit_fleet(open_fleet(",".join(map(crew.url, "ab"))), make_target(policies[1]))
        )
        rollout(
            out=f"{run.url}/iterations/{iteration}/rollout",
            policy=policies[1].ref,
            notes={"refitted": about},
        )
    run.refresh()
    for name in "ab":
        crew.lose(name)
    (done,) = list_deliveries(run)
    assert (done.version, done.way, done.replicas, done.encode_s) == (1, "refitted", 2, None)
    assert done.sent_bytes == (policies[1].path / "model" / "model.safetensors").stat().st_size
    assert 0.05 <= (done.materialize_s or 0) <= (done.pause_s or 0) <= (done.converged_s or 0)
    assert (done.waited_s, done.behind) == (1.5, 0.25)


def test_in_the_report(run: tuple[Run, list[Artifact]]) -> None:
    at = read_publications(f"{run[0].url}/weights")[1]["at"]
    asked(run[0], run[1][1], pulled=pulled(1, at + 2.0))
    shown = read_answers(render_page(run[0]))["/runs/demo/weights"]["deliveries"]
    assert [(each["version"], each["way"]) for each in shown] == [
        (0, "published"),
        (1, "pulled"),
        (2, "published"),
    ]
    names = ("replicas", "materialize_s", "pause_s", "converged_s", "waited_s", "behind", "proved")
    assert [shown[1][name] for name in names] == [
        1,
        0.75,
        0.125,
        pytest.approx(2.0),
        1.5,
        0.25,
        "6/6",
    ]
    (entry,) = run[0].with_role("sampler")
    one = find_delivery(run[0], entry)
    assert (
        one
        and set(get_measurements(one)) == set(NUMBERS)
        and get_measurements(one)["pause_s"] == 0.125
    )


@pytest.mark.parametrize(
    "notes", [{"pulled": {"version": 1}}, {"pulled": [1]}, {"refitted": {"workers": 3}}]
)
def test_a_note_of_another_shape_is_refused_by_name(
    run: tuple[Run, list[Artifact]], notes: dict[str, Any]
) -> None:
    """A manifest's digest does not cover its notes."""
    with pytest.raises(Corrupt, match=r"iterations/1/rollout.: has no readable delivery"):
        asked(run[0], run[1][1], **notes)
