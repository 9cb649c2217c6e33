"""Checkpoints without the trainer's state: whoever has lost it repeats the updates, to the same bits or not at all."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from benchmarks.store_bytes import CountingS3, serve_s3
from tests.making import checkpoint_artifact, prompts_artifact, rewards_artifact
from tests.waiting import LIMIT_S, until
from tests.warm import forked, python
from tuneloop.algorithms import grpo
from tuneloop.core.artifacts import Artifact, Manifest, dump_checked_json, find_manifest
from tuneloop.core.errors import Interrupted, UserError
from tuneloop.core.threads import BACKGROUND
from tuneloop.stages.export import export
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.sft import sft
from tuneloop.training.checkpoint import RESIDENT
from tuneloop.training.old_checkpoints import STATE_FACT
from tuneloop.weights.versions import Chain

TERMS = {
    "algorithm_args": {"beta": 0.1},
    "updates_per_batch": 2,
    "warmup_steps": 3,
    "learning_rate": 1e-2,
}
ROUNDED = {**TERMS, "save_dtype": "bfloat16", "device": "cpu"}


@pytest.fixture
def base(tmp_path: Path) -> Artifact:
    return checkpoint_artifact(tmp_path / "base")


def update(
    place: Path | str, iteration: int, policy: Artifact, reference: Artifact, **options: Any
) -> Artifact:
    rewards = rewards_artifact(f"{place}/rewards{iteration}", policy)
    inputs = {"policy": policy.ref, "rewards": rewards.ref, "reference": reference.ref}
    policy_update(out=f"{place}/{iteration}", iteration=iteration, **inputs, **options)
    return Artifact(f"{place}/{iteration}")


def loop(
    place: Path | str,
    base: Artifact,
    count: int = 5,
    lost: bool = False,
    rates: Mapping[int, float] = {},
    **options: Any,
) -> list[Artifact]:
    """The checkpoints of `count` iterations, where `lost` each by a process of its own."""
    made = [base]
    for i in range(1, count + 1):
        if lost:
            RESIDENT.options = None
        own = {**options, "learning_rate": rates.get(i, 1e-2)}
        made.append(update(place, i, made[-1], base, **own))
    return made[1:]


def models(made: list[Artifact]) -> list[str]:
    return [each.manifest.files["model/model.safetensors"].digest for each in made]


def rewrite(made: Artifact, section: str, **values: Any) -> Artifact:
    """Change what a manifest says, and its digest where that covers it."""
    path = Path(made.url.removeprefix("file://")) / "manifest.json"
    told = json.loads(path.read_text())
    told[section] |= values
    manifest = Manifest.model_validate(told)
    told = json.loads(
        manifest.model_copy(update={"digest": manifest.compute_digest()}).model_dump_json()
    )
    path.write_bytes(dump_checked_json(told, path.name))
    return Artifact(made.url)


@pytest.mark.parametrize("more", [{}, {"lora": {"r": 2}}])
def test_lost_state_is_replayed_to_the_same_bytes(
    base: Artifact, tmp_path: Path, more: dict[str, Any]
) -> None:
    options = {**ROUNDED, **more}
    whole = loop(tmp_path / "whole", base, **options)
    kept = loop(tmp_path / "kept", base, state_every=3, **options)
    weights = str(tmp_path / "weights")
    lost = loop(tmp_path / "lost", base, lost=True, state_every=3, weights=weights, **options)
    assert [*Chain(weights).versions] == [1, 2, 3, 4, 5]
    assert models(kept) == models(whole)
    assert [each.manifest.digest for each in lost] == [each.manifest.digest for each in kept]
    assert [each.manifest.digest for each in whole] == [each.manifest.digest for each in kept]
    due = ["not due", "not due", "due", "not due", "not due"]
    for made in (kept, lost):
        assert [each.manifest.notes["state"] for each in made] == due
        states = [find_manifest(f"{each.url}/state") for each in made]
        assert [bool(state) for state in states] == [False, False, True, False, False]
        assert states[2] and states[2].digest == Artifact(f"{whole[2].url}/state").manifest.digest
        assert states[2].inputs == {"checkpoint": made[2].ref}
    assert [each.manifest.notes.get("replayed") for each in kept] == [None] * 5
    assert [each.manifest.notes.get("replayed") for each in lost] == [
        *(None, {"from_version": 0, "updates": 1}, {"from_version": 0, "updates": 2}),
        *(None, {"from_version": 3, "updates": 1}),
    ]


def test_each_update_is_replayed_with_the_options_that_it_had(
    base: Artifact, tmp_path: Path
) -> None:
    rates = {2: 3e-2, 3: 1e-3, 4: 1e-3}
    whole = loop(tmp_path / "whole", base, rates=rates, **ROUNDED)
    assert models(loop(tmp_path / "kept", base, rates=rates, state_every=9, **ROUNDED)) == models(
        whole
    )
    assert models(
        loop(tmp_path / "lost", base, rates=rates, lost=True, state_every=9, **ROUNDED)
    ) == models(whole)


def test_an_update_with_a_parameter_that_is_gone_is_replayed(
    base: Artifact, tmp_path: Path
) -> None:
    _, policy = loop(tmp_path / "run", base, 2, state_every=5, **ROUNDED)
    policy = rewrite(policy, "params", of_an_earlier_release=1)
    RESIDENT.options = None
    third = update(tmp_path / "run", 3, policy, base, state_every=5, **ROUNDED)
    assert third.manifest.notes["replayed"]["updates"] == 2


def test_what_cannot_be_replayed_is_refused(base: Artifact, tmp_path: Path) -> None:
    def refused(name: str, match: str) -> None:
        RESIDENT.options = None
        with pytest.raises(
            UserError,
            match=rf"^--policy: 'file://{tmp_path}/run/2': has no trainer's state, {match}",
        ):
            update(tmp_path / name, 3, policy, base, state_every=5, **ROUNDED)
        assert not (tmp_path / name / "3/manifest.json").exists()

    first, policy = loop(tmp_path / "run", base, 2, state_every=5, **ROUNDED)
    rewrite(first, "provenance", world_size=2)
    refused(
        "world",
        r"and iteration 1 cannot .*: 1: the update was made by 2 processes, .* other bits \(world_size 2 then, 1 now",
    )
    rewrite(first, "provenance", world_size=1)
    state = policy.manifest.facts[STATE_FACT]
    policy = rewrite(policy, "facts", **{STATE_FACT: {**state, "digest": "0"}})
    refused(
        "state",
        r"and iteration 2 cannot be replayed: trainer's state: '\w+': 0 was committed .*torch .* then",
    )
    policy = rewrite(policy, "facts", **{STATE_FACT: state})
    scored = Artifact(str(tmp_path / "run/rewards2")).part("rewards.parquet")
    good = scored.read_bytes()
    scored.write_bytes(good[:-1] + b"\xff")
    refused(
        "rewards",
        r"and iteration 2 cannot be replayed: artifact: .*rewards.parquet': differs from its manifest",
    )
    scored.unlink()
    refused("gone", r"and iteration 2 cannot be replayed: artifact: .*rewards.parquet': is missing")
    scored.write_bytes(good)
    RESIDENT.options = None
    assert (
        update(tmp_path / "good", 3, policy, base, state_every=5, **ROUNDED).manifest.facts[
            "version"
        ]
        == 3
    )


class Signalled(grpo.Algorithm):
    """GRPO in whose loss SIGTERM arrives, once that is wanted."""

    wanted: ClassVar[bool] = False

    def loss(self, tokens: Any) -> Any:
        if Signalled.wanted:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(tokens)


def test_a_signal_ends_a_replay_and_leaves_nothing(
    base: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "signalled", SimpleNamespace(Signalled=Signalled))
    about = {
        "algorithm": "signalled:Signalled",
        "per_device_train_batch_size": 2,
        "device": "cpu",
        "state_every": 9,
    }
    policy = update(tmp_path, 1, base, base, **about)
    monkeypatch.setattr(Signalled, "wanted", True)
    RESIDENT.options = None
    with pytest.raises(Interrupted):
        update(tmp_path, 2, policy, base, **{**about, "algorithm": "grpo"})
    assert not any((tmp_path / "2").iterdir())
    assert Artifact(policy.ref).path.is_dir(), "what is replayed is not touched"


def test_parameters_that_were_rounded_are_not_taken_for_others(
    base: Artifact, tmp_path: Path
) -> None:
    prompts = prompts_artifact(tmp_path / "prompts")
    found = []
    for dtype in ("bfloat16", "float32"):
        about = {**ROUNDED, "save_dtype": dtype}
        whole, rounded = (
            loop(tmp_path / f"{dtype}{k}", base, 1, state_every=k, **about)[0] for k in (1, 2)
        )
        export(out=str(tmp_path / f"{dtype}-model"), policy=rounded.ref)
        for policy in (whole, rounded):
            out = tmp_path / "tuned" / policy.url.rpartition("/tmp")[2].replace("/", "-")
            given = {"prompts": prompts.ref, "max_steps": 2, "device": "cpu"}
            if (dtype, policy) == ("bfloat16", rounded):
                with pytest.raises(
                    UserError,
                    match=r"has no float32 parameters: .* model/ is bfloat16; take a check",
                ):
                    sft(out=str(out), policy=policy.ref, **given)
                with pytest.raises(UserError, match="has no float32 parameters"):
                    update(tmp_path / "reset", 2, policy, base, reset_optimizer=True, **about)
            else:
                sft(out=str(out), policy=policy.ref, **given)
                found.append(Artifact(str(out)))
    _, *exact = models(found)
    assert exact[0] == exact[1]


class Held(CountingS3):
    """Keeps the state of an iteration waiting until somebody writes the rewards of the next, or opens its gate."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gates: dict[int, threading.Event] = defaultdict(threading.Event)

    def path(self, key: str) -> Path:
        if found := re.search(r"/(\d)/state/data-", key):
            assert self.gates[int(found[1])].wait(LIMIT_S), (
                "nothing followed while the state was written"
            )
        elif found := re.search(r"/rewards(\d)/data-", key):
            self.gates[int(found[1]) - 1].set()
        return super().path(key)


def test_state_is_written_beside_what_follows_and_before_the_next_update(
    base: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = loop(tmp_path / "whole", base, 3, **ROUNDED)
    monkeypatch.setenv("TUNELOOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(BACKGROUND, "is_concurrent", True)
    with serve_s3(tmp_path / "objects", Held) as server:
        made = loop("s3://bucket/run", base, 3, **ROUNDED)
        server.gates[3].set()  # type: ignore[attr-defined]
        BACKGROUND.wait()
        for ours, theirs in zip(made, whole):
            assert ours.manifest.digest == theirs.manifest.digest
            state, same = (Artifact(f"{each.url}/state") for each in (ours, theirs))
            assert state.manifest.digest == same.manifest.digest and state.part("trainer")
    written = [key.removeprefix("bucket/run/") for method, key, _ in server.log if method == "PUT"]
    for i in (1, 2, 3):
        committed = written.index(f"{i}/state/manifest.json")
        assert written.index(f"{i}/manifest.json") < committed
        assert not any(key.startswith(f"{i + 1}/") for key in written[:committed]), (
            "the next update has not begun"
        )


def test_killed_between_a_checkpoint_and_its_state_it_replays_the_update(
    base: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = loop(tmp_path / "whole", base, 3, **ROUNDED)
    monkeypatch.setenv("TUNELOOP_CACHE", str(tmp_path / "cache"))
    line = [python(), "-m", "tests.unit.stages.two_updates", base.ref]
    with serve_s3(tmp_path / "objects", Held) as server:
        root = Path(__file__).parents[3]
        child = subprocess.Popen(line, cwd=root, stderr=subprocess.PIPE)
        try:
            until(server.path("bucket/run/2/manifest.json").is_file, child=child)
        finally:
            os.kill(forked(child.pid), signal.SIGKILL)
        child.wait()
        for i in (2, 3):
            server.gates[i].set()  # type: ignore[attr-defined]
        RESIDENT.options = None
        last = update("s3://bucket/run", 3, Artifact("s3://bucket/run/2"), base, **ROUNDED)
        assert [bool(find_manifest(f"s3://bucket/run/{i}/state")) for i in (1, 2, 3)] == [
            True,
            False,
            True,
        ]
        assert last.manifest.notes["replayed"] == {"from_version": 1, "updates": 1}
        assert last.manifest.digest == whole[2].manifest.digest
        state, same = (Artifact(f"{each.url}/state") for each in (last, whole[2]))
        assert state.manifest.digest == same.manifest.digest
