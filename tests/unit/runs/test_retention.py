"""What `tuneloop gc` takes, and what it leaves."""

from pathlib import Path
from typing import Any

import pytest

from tests.making import checkpoint_artifact, rewards_artifact
from tests.unit import toy
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.runs.audit import audit_run
from tuneloop.runs.retention import delete_leftovers, find_leftovers
from tuneloop.runs.run_record import Run
from tuneloop.stages.policy_update import policy_update
from tuneloop.training.checkpoint import RESIDENT
from tuneloop.training.old_checkpoints import check_trainable
from tuneloop.weights.inspect import list_versions


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Three iterations, and what interrupted attempts have left."""
    toy.make(f"{tmp_path}/x", iterations=3)
    for place in (
        "sft",
        "iterations/2/rollout",
        "iterations/4/rollout",
        "iterations/4/policy-update",
    ):
        (Draft(f"{tmp_path}/x/{place}", attempt="data-dead").path / "half").write_bytes(b"12345")
    for place in ("sft", "iterations/4/policy-update"):
        draft = Draft(f"{tmp_path}/x/{place}/resume/00000002", attempt="data-point")
        (draft.path / "state").write_bytes(b"123")
        draft.commit(stage="sft")
    for place in ("1/policy-update/state", "3/policy-update/state"):
        (Draft(f"{tmp_path}/x/iterations/{place}", attempt="data-dead").path / "half").write_bytes(
            b"1234567"
        )
    draft = Draft(f"{tmp_path}/x/iterations/3/policy-update/state", attempt="data-whole")
    (draft.path / "all").write_bytes(b"12")
    draft.commit(stage="policy_update")
    return Run("x", str(tmp_path))


def test_dead_attempts_go_and_what_a_resume_needs_stays(run: Run) -> None:
    dead = {item.key: (item.reason, item.size) for item in find_leftovers(run, idle=-1)}
    resume = dead.pop("sft/resume")
    assert resume[0] == "resume point of a stage that has committed"
    assert dead == {
        "iterations/1/policy-update/state": ("attempt that lost the race to commit", 7),
        "iterations/3/policy-update/state/data-dead": ("attempt that lost the race to commit", 7),
        "iterations/2/rollout/data-dead": ("attempt that lost the race to commit", 5),
        "iterations/4/policy-update/data-dead": ("attempt of a stage that did not commit", 5),
        "iterations/4/rollout/data-dead": ("attempt of a stage that did not commit", 5),
        "sft/data-dead": ("attempt that lost the race to commit", 5),
    }
    delete_leftovers(run, find_leftovers(run, idle=-1))
    assert find_leftovers(run, idle=-1) == []
    assert Artifact(f"{run.url}/iterations/4/policy-update/resume/00000002").path.is_dir()
    assert Artifact(f"{run.url}/iterations/3/policy-update/state").path.is_dir()
    assert [Artifact(f"{run.url}/{entry.key}").path.is_dir() for entry in run.entries] == [
        True
    ] * 13


def test_writes_that_did_not_end_go(run: Run) -> None:
    """As a kill leaves them where the store is a directory, also beside a manifest."""
    delete_leftovers(run, find_leftovers(run, idle=-1))
    left = ["sft/.manifest.json.12-0123abcd", "weights/weight_v000001/.config.json.7-ffffffff"]
    for key in (*left, "weights/.latest.lock"):
        Path(run.directory, key).parent.mkdir(parents=True, exist_ok=True)
        Path(run.directory, key).write_bytes(b"12")
    assert [(item.key, item.reason, item.size) for item in find_leftovers(run, idle=-1)] == [
        (key, "unfinished write", 2) for key in left
    ]
    assert find_leftovers(run, idle=3600) == []


def test_what_was_written_lately_is_left(run: Run) -> None:
    assert find_leftovers(run, idle=3600) == []


def test_old_checkpoints_keep_their_manifest_and_history(run: Run) -> None:
    curves = run.curves()
    items = find_leftovers(run, keep=1, idle=3600)
    assert {item.key.partition("/data-")[0] for item in items} == {
        *(f"iterations/{i}/policy-update" for i in (1, 2)),
        "iterations/1/policy-update/state",
    }
    delete_leftovers(run, items)
    again = Run("x", run.store_url)
    assert again.curves() == curves and len(again.checkpoints) == len(run.checkpoints)
    assert toy.make(run.url, iterations=3).keys()  # nothing has to be made again
    with pytest.raises(
        Corrupt, match=r"was pruned by retention \(gc --keep\); take a newer version"
    ):
        _ = Artifact(f"{run.url}/iterations/1/policy-update").path
    assert Artifact(f"{run.url}/iterations/3/policy-update").path.is_dir()
    with pytest.raises(UserError, match="must be at least 1"):
        find_leftovers(run, keep=0)


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, set()),
        ({"state_every": 3}, {3, 4}),
        ({"state_every": 9}, {1, 2, 3, 4}),
        ({"state_every": 3, "lora": {"r": 2}}, {1, 3, 4}),
    ],
)
def test_what_a_replay_or_adapters_need_stays(
    tmp_path: Path, options: dict[str, object], needed: set[int]
) -> None:
    """Of five iterations the newest alone is kept, and what the sixth needs, which has the bytes that it would have."""
    policy = checkpoint_artifact(tmp_path / "x/sft")
    for i in range(1, 6):
        place, given = (
            tmp_path / f"x/iterations/{i}",
            # A reset begins from model/ where no state was written, which then must not be rounded.
            {
                "reset_optimizer": i == 2,
                "iteration": i,
                "device": "cpu",
                "save_dtype": "float32",
            },
        )
        rewards = rewards_artifact(place / "reward", policy)
        given |= {
            "learning_rate": 1e-3 if i == 4 else 5e-4
        }  # a change of options opens the model before it
        policy_update(
            out=f"{place}/policy-update", policy=policy.ref, rewards=rewards.ref, **given, **options
        )
        policy = Artifact(f"{place}/policy-update")

    def go_on(name: str) -> str:
        RESIDENT.options = None  # a process of its own
        out = str(tmp_path / name)
        policy_update(
            out=out,
            policy=policy.ref,
            rewards=last.ref,
            iteration=6,
            device="cpu",
            save_dtype="float32",
            **options,
        )
        return Artifact(out).manifest.digest

    last = rewards_artifact(tmp_path / "last", policy)
    before, run = go_on("before"), Run("x", str(tmp_path))
    items = find_leftovers(run, keep=1, idle=3600)
    gone = {int(item.key.split("/")[1]) for item in items if item.key.startswith("iterations/")}
    assert gone == {1, 2, 3, 4} - needed
    delete_leftovers(run, items)
    assert not any(
        any((tmp_path / f"x/iterations/{i}/policy-update/state").rglob("*.*")) for i in gone
    )
    assert go_on("after") == before


@pytest.mark.parametrize(("options", "left"), [({}, {4, 5}), ({"state_every": 3}, {3, 4, 5})])
def test_a_loop_deletes_what_it_has_left_behind(
    tmp_path: Path, options: dict[str, object], left: set[int]
) -> None:
    """With each commit, as `gc --keep` would; what is done again or published finds what it needs."""
    start = policy = checkpoint_artifact(tmp_path / "x/sft")
    made: list[tuple[str, dict[str, Any]]] = []
    for i in range(1, 6):
        place = tmp_path / f"x/iterations/{i}"
        rewards = rewards_artifact(place / "reward", policy)
        given: dict[str, Any] = {
            "policy": policy.ref,
            "rewards": rewards.ref,
            "iteration": i,
            "device": "cpu",
        }
        given |= {"save_total_limit": 2, "weights": f"{tmp_path}/x/weights", **options}
        made.append((f"{place}/policy-update", given))
        policy_update(out=made[-1][0], **given)
        policy = Artifact(f"{place}/policy-update")
    whole = {
        i
        for i in range(1, 6)
        if any((tmp_path / f"x/iterations/{i}/policy-update").glob("data-*/model/*"))
    }
    assert whole == left and start.path.is_dir()
    states = {
        i for i in range(1, 6) if (tmp_path / f"x/iterations/{i}/policy-update/state").is_dir()
    }
    assert states == ({3} if options else left)
    run = Run("x", str(tmp_path))
    assert find_leftovers(run, keep=2) == [] and len(run.checkpoints) == 6
    kept = [len(list(Path(place).glob("data-*/metrics.jsonl"))) for place, _ in made]
    assert kept == [1] * 5, "the curves of all are left"
    again = [policy_update(out=out, **given).digest for out, given in made]
    assert again[-1] == policy.manifest.digest, (
        "a run that is begun again walks over what was committed"
    )
    assert [listed.version for listed in list_versions(f"{tmp_path}/x/weights")] == [1, 2, 3, 4, 5]


def test_models_of_some_iterations_stay_without_the_trainers_state(tmp_path: Path) -> None:
    """What is left says that retention took the rest: to a reader, to the audit and to a fork."""
    policy = checkpoint_artifact(tmp_path / "x/sft")
    for i in range(1, 7):
        place = tmp_path / f"x/iterations/{i}"
        rewards = rewards_artifact(place / "reward", policy)
        options = {"save_total_limit": 2, "keep_every": 2, "iteration": i, "device": "cpu"}
        policy_update(
            out=f"{place}/policy-update", policy=policy.ref, rewards=rewards.ref, **options
        )
        policy = Artifact(f"{place}/policy-update")
        RESIDENT.take(policy, policy_update.options["options"].model_construct())
    models = {path.parts[-5] for path in tmp_path.glob("x/iterations/*/*/data-*/model/config.json")}
    states = {path.parts[-3] for path in tmp_path.glob("x/iterations/*/policy-update/state")}
    assert (models, states) == ({"2", "4", "5", "6"}, {"5", "6"})
    assert Artifact(f"{tmp_path}/x/iterations/2/policy-update").part("model").is_dir()
    with pytest.raises(Corrupt, match=r"was pruned by retention \(save_total_limit=2\)"):
        Artifact(f"{tmp_path}/x/iterations/3/policy-update").part("model")
    run = Run("x", str(tmp_path))
    proofs = {proof.key: proof for proof in audit_run(run)}
    assert not [problem for proof in proofs.values() for problem in proof.problems]
    assert {key for key, proof in proofs.items() if proof.deleted} == {
        "iterations/1/policy-update",
        "iterations/3/policy-update",
    }
    check_trainable(Artifact(f"{tmp_path}/x/iterations/5/policy-update"))
    with pytest.raises(
        UserError, match="ITERATION: 4: the trainer's state of version 4 was pruned"
    ):
        check_trainable(Artifact(f"{tmp_path}/x/iterations/4/policy-update"))


def test_gc_keeps_the_models_that_the_run_keeps(tmp_path: Path) -> None:
    policy = checkpoint_artifact(tmp_path / "x/sft")
    for i in range(1, 5):
        place = tmp_path / f"x/iterations/{i}"
        rewards = rewards_artifact(place / "reward", policy)
        options = {"keep_every": 2, "iteration": i, "device": "cpu"}
        policy_update(
            out=f"{place}/policy-update", policy=policy.ref, rewards=rewards.ref, **options
        )
        policy = Artifact(f"{place}/policy-update")
        RESIDENT.take(policy, policy_update.options["options"].model_construct())
    run = Run("x", str(tmp_path))
    items = find_leftovers(run, keep=1)
    delete_leftovers(run, items)
    assert find_leftovers(run, keep=1) == []
    models = {path.parts[-5] for path in tmp_path.glob("x/iterations/*/*/data-*/model/config.json")}
    states = {path.parts[-4] for path in tmp_path.glob("x/iterations/*/*/state/manifest.json")}
    assert (models, states) == ({"2", "4"}, {"4"})
    assert Artifact(f"{run.url}/iterations/2/policy-update").part("model").is_dir()
    proofs = {proof.key: proof for proof in audit_run(Run("x", str(tmp_path)))}
    assert not [problem for proof in proofs.values() for problem in proof.problems]
    deleted = {key for key, proof in proofs.items() if proof.deleted}
    assert deleted == {"iterations/1/policy-update", "iterations/3/policy-update"}


def test_a_checkpoint_that_was_being_pruned_is_no_damage(run: Run) -> None:
    """As a kill leaves it: the rule is there, and some of the files."""
    checkpoint = run.checkpoints[1]

    def find_problems() -> tuple[str, ...]:
        (proof,) = [proof for proof in audit_run(run) if proof.key == checkpoint.key]
        return proof.problems

    first = sorted(checkpoint.manifest.files)[0]
    assert not find_problems()
    Path(run.directory, checkpoint.key, checkpoint.manifest.root, first).unlink()
    assert [line for line in find_problems() if line.endswith(f"{first} is missing")]
    Path(run.directory, checkpoint.key, "pruned.txt").write_text("save_total_limit=2")
    assert not find_problems()
