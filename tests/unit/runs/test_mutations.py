"""Whatever is changed in a run's files: its readers say the same, or refuse. `python -m tests.mutations` has more."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutations.changes import KINDS
from tests.mutations.judge import list_verdicts
from tests.mutations.sample_run import RUN, SampleRun, make_sample_run
from tuneloop.cli import run_cli
from tuneloop.core.artifacts import MANIFEST
from tuneloop.core.errors import Corrupt
from tuneloop.runs.retention import find_leftovers
from tuneloop.runs.run_record import Run
from tuneloop.weights.materialize import materialize_version
from tuneloop.weights.versions import INDEX

COUNT = len(KINDS)
"""One of each kind of file."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    return make_sample_run(tmp_path_factory.mktemp("mutated"))


@pytest.fixture
def run(made: SampleRun) -> Iterator[SampleRun]:
    yield made
    made.restore()


def test_no_change_is_taken_for_the_truth(run: SampleRun) -> None:
    outcomes = [*list_verdicts(run, COUNT, seed=20)]
    wrong = [each for each in outcomes if each.verdict in ("accepted", "traceback", "hang")]
    assert not wrong, wrong[0]
    assert {each.kind for each in outcomes} == {kind for kind, _ in KINDS}
    assert sum(each.verdict == "refused" for each in outcomes) > COUNT


def test_a_damaged_manifest_is_refused_the_second_time_too(run: SampleRun) -> None:
    """An index that had taken it up unproved would vouch for it."""
    manifest = Path(run.url, "iterations/1/reward", MANIFEST)
    opened = Run.open(RUN, run.store)
    manifest.write_text(manifest.read_text().replace('"mean_reward": 0.5', '"mean_reward": 0.99'))
    for _ in range(2):
        with pytest.raises(Corrupt, match=r"iterations/1/reward/manifest\.json.*was changed"):
            opened.refresh()
        with pytest.raises(Corrupt, match=r"iterations/1/reward/manifest\.json.*was changed"):
            Run.open(RUN, run.store)


def test_a_manifest_at_another_place_is_refused(run: SampleRun) -> None:
    places = [Path(run.url, f"evaluate-{when}", MANIFEST) for when in ("before", "after")]
    places[0].write_bytes(places[1].read_bytes())
    with pytest.raises(Corrupt, match="is the manifest of evaluate-after"):
        Run.open(RUN, run.store)


def test_nothing_goes_whose_manifest_is_damaged_or_swapped(run: SampleRun) -> None:
    """Else the files of an artifact would pass for those of an attempt that lost."""
    opened = Run.open(RUN, run.store)
    states = [Path(run.url, f"iterations/{i}/tune/state", MANIFEST) for i in (3, 4)]
    one, other = (state.read_bytes() for state in states)
    for first, second in (
        (other, one),
        (one.replace(b'"root": "data-', b'"root": "data-0'), other),
    ):
        states[0].write_bytes(first)
        states[1].write_bytes(second)
        assert not find_leftovers(opened, idle=-1)


def test_a_version_asked_for_by_number_is_proved_by_those_that_follow(
    run: SampleRun, tmp_path: Path
) -> None:
    index = Path(run.weights, "weight_v000012", INDEX)
    told = json.loads(index.read_bytes())
    told["tuneloop"]["files"]["renamed.json"] = told["tuneloop"]["files"].pop("config.json")
    index.write_text(json.dumps(told))
    with pytest.raises(
        Corrupt, match=r"weight_v000012/.*what `latest` or the next version builds on"
    ):
        materialize_version(run.weights, 12, tmp_path / "model")


def test_a_workflow_that_was_changed_is_not_gone_on_with(
    run: SampleRun, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, workflow = Path(run.url, "nodes.jsonl"), Path(run.url, "workflow.yaml")
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-1]))
    workflow.write_text(workflow.read_text().replace("temperature", "temperatura"))
    assert run_cli(["resume", RUN, "--store", run.store, "--no-track"]) == 2
    assert (
        "workflow.yaml': is missing or was changed; restore it from a copy"
        in capsys.readouterr().err
    )
