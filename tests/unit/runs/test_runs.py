from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit import toy
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.runs import records, run_record
from tuneloop.runs.records import Record
from tuneloop.runs.run_record import Run
from tuneloop.runs.summary import list_devices
from tuneloop.runs.verification import verify_artifact


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store")
    toy.make(f"{path}/demo")
    return path


def test_a_run_is_read_from_its_artifacts(store: Path) -> None:
    run = Run.open("demo", str(store))
    assert [e.key for e in run.entries] == [
        "sft", "evaluate-before", "iterations/1/rollout", "iterations/1/reward", "iterations/1/policy-update",
        "iterations/2/rollout", "iterations/2/reward", "iterations/2/policy-update", "evaluate-after", "export",
    ]  # fmt: skip
    assert (run.iteration, run.phase, run.record) == (2, "elsewhere", None)
    assert [(e.key, e.manifest.facts["version"]) for e in run.checkpoints] == [
        ("sft", 1), ("iterations/1/policy-update", 2), ("iterations/2/policy-update", 3)
    ]  # fmt: skip


def test_rewards_say_how_they_were_obtained(store: Path) -> None:
    run = Run.open("demo", str(store))
    assert [(s.value, s.version, s.method) for s in run.evaluations()] == [
        (0.5, 1, "greedy, held-out prompts"), (1.0, 3, "greedy, held-out prompts")
    ]  # fmt: skip
    assert [(s.value, s.version, s.method) for s in run.training_rewards()] == [
        (0.5, 1, "temperature 1, training prompts"), (0.75, 2, "temperature 1, training prompts")
    ]  # fmt: skip
    latest = run.latest_reward()
    assert latest and latest.entry.key == "evaluate-after"
    assert run.count_scored_completions(latest.entry) == 4


def test_curves_have_every_point_and_its_place(store: Path) -> None:
    curves = {(c.stage, c.name): c for c in Run.open("demo", str(store)).curves()}
    assert curves["evaluate", "mean_reward"].x == [0, 2], "the iteration whose policy was judged"
    assert curves["evaluate", "mean_reward"].y == [0.5, 1.0]
    assert (curves["reward", "mean_reward"].x, curves["reward", "mean_reward"].y) == (
        [1, 2],
        [0.5, 0.75],
    )
    assert (curves["sft", "loss"].axis, curves["sft", "loss"].x) == ("step", [1, 2, 3])
    assert curves["policy_update", "kl"].x == [0.5, 1.0, 1.5, 2.0], (
        "two optimizer steps an iteration"
    )
    assert curves["policy_update", "kl"].y == [0.01, 0.02, 0.01, 0.02]
    assert curves["rollout", "mean_length"].y == [7.0, 6.0]
    assert all(len(c.x) == len(c.y) == len(c.at) for c in curves.values())


def test_what_an_evaluation_records_is_a_curve_over_the_iterations_that_it_judged(
    tmp_path: Path,
) -> None:
    toy.make(f"{tmp_path}/demo")
    for at, made in (
        ("a", "iterations/2/policy-update"),
        ("b", "sft"),
        ("c", "iterations/1/policy-update"),
    ):
        draft = Draft(f"{tmp_path}/demo/{at}")
        (draft.path / "metrics.jsonl").write_text(f'{{"step": 9, "task/acc": {len(made)}}}\n')
        draft.commit(
            stage="measure",
            role="evaluator",
            inputs={"policy": Artifact(f"{tmp_path}/demo/{made}").ref},
        )
    (curve,) = (
        each for each in Run.open("demo", str(tmp_path)).curves() if each.stage == "measure"
    )
    assert (curve.axis, curve.x, curve.y) == ("iteration", [0, 1, 2], [3, 26, 26])


def test_equal_bytes_at_two_places_are_told_apart(tmp_path: Path) -> None:
    made = toy.make(
        f"{tmp_path}/same", 4
    )  # skill is full after two updates: versions 3, 4 and 5 are equal bytes
    assert made["2/policy-update"].files == made["4/policy-update"].files
    run = Run.open("same", str(tmp_path))
    assert [(s.version, x) for s, x in zip(run.evaluations(), run.curves()[1].x)] == [
        (1, 0),
        (5, 4),
    ]
    assert [run.find_version(e) for e in run.with_role("sampler")] == [1, 2, 3, 4]


def test_what_is_committed_later_is_seen_and_what_is_deleted_is_not(tmp_path: Path) -> None:
    toy.make(f"{tmp_path}/grows", iterations=1)
    run = Run.open("grows", str(tmp_path))
    assert run.iteration == 1
    manifest = tmp_path / "grows" / "iterations" / "1" / "policy-update" / "manifest.json"
    kept = manifest.read_bytes()
    manifest.unlink()
    run.refresh()
    assert [e.stage for e in run.checkpoints] == ["sft"]
    manifest.write_bytes(kept)
    run.refresh()
    assert [e.stage for e in run.checkpoints] == ["sft", "policy-update"]


def test_a_flipped_byte_is_found_by_name(tmp_path: Path) -> None:
    toy.make(f"{tmp_path}/bad", iterations=1)
    run = Run.open("bad", str(tmp_path))
    entry = run.checkpoints[-1]
    at = tmp_path / "bad" / entry.key / entry.manifest.root
    weights, rows = at / "model" / "weights.json", at / "metrics.jsonl"
    assert all(c.is_unchanged for c in verify_artifact(run, entry))
    data = bytearray(weights.read_bytes())
    data[0] ^= 1
    weights.write_bytes(data)
    rows.unlink()
    assert {
        c.key.rpartition("/")[2]: bool(c.actual)
        for c in verify_artifact(run, entry)
        if not c.is_unchanged
    } == {
        "weights.json": True,
        "metrics.jsonl": False,
    }
    with pytest.raises(Corrupt, match=r"metrics\.jsonl"):
        run.curves()


def test_verify_reads_object_stores_too(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch that downloads, on a store that is local but does not say so."""
    from tuneloop.core.store import Store

    run = Run.open("demo", str(store))
    whole = Store.__init__

    def remote(self: Store, url: str) -> None:
        whole(self, url)
        import obstore

        self._objects, self.root = obstore.store.from_url(self.url), None

    monkeypatch.setattr(Store, "__init__", remote)
    entry = run.checkpoints[-1]
    assert all(c.is_unchanged for c in verify_artifact(run, entry))
    (store / "demo" / entry.key / entry.manifest.root / "metrics.jsonl").unlink()
    assert [c.actual for c in verify_artifact(run, entry) if not c.is_unchanged] == [None]


def record(store: Path, **config: object) -> Record:
    return Record(run="r", pipeline="toy", path="toy.py", config=config, store=f"file://{store}")


def test_a_record_is_written_once_and_read_back(tmp_path: Path) -> None:
    run = run_record.Run.create(record(tmp_path, a=1), "kind: Workflow\n")
    assert (run.directory, run.phase) == (tmp_path / "r", "created")
    assert (tmp_path / "r" / "workflow.yaml").read_text() == "kind: Workflow\n"
    assert (tmp_path / "r" / "config.yaml").read_text() == "a: 1\n"
    assert records.read_record("r", str(tmp_path)) == run.record
    assert records.list_runs(str(tmp_path)) == ["r"]
    with pytest.raises(UserError, match="another process"):
        run_record.Run.create(record(tmp_path, a=2), "kind: Workflow\n")


def test_local_state_of_a_remote_run_lies_in_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert records.get_run_directory("r", "s3://bucket/prefix") == tmp_path / "runs" / "r"
    assert records.get_run_directory("r", "somewhere") == tmp_path / "somewhere" / "r"


@pytest.mark.parametrize("name", ["", "-a", "A", "a_b", "a/b", "../a", "x" * 41, "sessions"])
def test_names_that_kubernetes_refuses_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lower-case"):
        Run.open(name, str(tmp_path))


def test_an_unknown_run_and_a_broken_record(tmp_path: Path) -> None:
    run_record.Run.create(record(tmp_path), "")
    with pytest.raises(UserError, match="known there: r"):
        Run.open("other", str(tmp_path))
    (tmp_path / "r" / "run.json").write_text("{")
    with pytest.raises(Corrupt, match=r"run\.json"):
        Run.open("r", str(tmp_path))


def test_differences_are_dotted_keys() -> None:
    assert records.find_differences(
        {"a": 1, "b": {"c": 1, "d": 2}}, {"a": 1, "b": {"c": 2, "d": 2}, "e": 0}
    ) == [
        "b.c",
        "e",
    ]


def test_what_is_not_used_of_a_processor_is_said() -> None:
    limited = {
        "device": "cpu (x86_64)",
        "processor": {"amx": "not used", "why": "TUNELOOP_PROCESSOR_CHECK=bad"},
    }
    entries: Any = [
        SimpleNamespace(manifest=SimpleNamespace(provenance=each))
        for each in (limited, {}, limited)
    ]
    assert list_devices(entries) == ["cpu (x86_64)", "AMX not used: TUNELOOP_PROCESSOR_CHECK=bad"]
