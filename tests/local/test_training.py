"""Training over several processes."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.making import (
    checkpoint_artifact,
    prompts_artifact,
    rewards_artifact,
    rollout_rows,
    sigterm_while_training,
    tiny_model,
)
from tests.waiting import LIMIT_S, until
from tests.warm import python
from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import Component
from tuneloop.core.errors import Interrupted, UserError
from tuneloop.formats.token_files import Document
from tuneloop.stages.export import write_adapter
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.sft import sft
from tuneloop.training.checkpoint import find_state, trainer_state
from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.training.fsdp.trainer import Trainer
from tuneloop.training.lora import Lora
from tuneloop.training.options import Optimization

pytestmark = pytest.mark.local


def launch(
    stage: Component, out: Path, processes: int, **arguments: Any
) -> "subprocess.Popen[str]":
    words = [python(), *stage.command(processes)[1:], "--checkpoint", str(out)]
    words += [
        word
        for name, value in arguments.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(child: "subprocess.Popen[str]") -> str:
    said, _ = child.communicate(timeout=3 * LIMIT_S)
    assert child.returncode == 0, said[-4000:]
    return said


def rows(artifact: Artifact) -> list[dict[str, float]]:
    return [json.loads(line) for line in (artifact.path / "metrics.jsonl").read_text().splitlines()]


def assert_same_training(one: Artifact, two: Artifact) -> None:
    assert one.manifest.notes["world_size"] == 1
    assert two.manifest.notes["world_size"] == 2
    assert len(rows(one)) == len(rows(two)) > 0
    for a, b in zip(rows(one), rows(two)):
        assert b == pytest.approx(a, rel=2e-3, abs=1e-5)
    theirs = load_file(two.path / "model" / "model.safetensors")
    for name, value in load_file(one.path / "model" / "model.safetensors").items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-3, atol=2e-4)


def moments(checkpoint: Artifact) -> dict[str, torch.Tensor]:
    """Everything in ``trainer/``, read by one process."""
    held, state = find_state(checkpoint), trainer_state(checkpoint)
    assert held and state
    adam = Optimization(1e-3, "constant", 0, 0, 0.0, 0.9, 0.95, 1.0)
    adapters = state.lora
    trainer = Trainer(
        checkpoint.path / "model", Ranks("cpu"), adam, lora=adapters and Lora(**adapters)
    )
    trainer.load(held.part("trainer"), 1)
    return trainer._state()


@pytest.mark.parametrize("lora", [None, pytest.param({"r": 3}, marks=pytest.mark.slow)])
def test_two_processes_fine_tune_as_one(tmp_path, lora):
    base, prompts = checkpoint_artifact(tmp_path / "base"), prompts_artifact(tmp_path / "prompts")
    about = {"policy": base.ref, "prompts": prompts.ref, "max_steps": 8, "warmup_steps": 2}
    about |= {"device": "cpu", "save_dtype": "float32", "lora": json.dumps(lora)}
    finish(
        launch(
            sft, tmp_path / "two", 2, per_device_train_batch_size=4, expected_world_size=2, **about
        )
    )
    sft(out=str(tmp_path / "one"), per_device_train_batch_size=8, **{**about, "lora": lora})
    one, two = (Artifact(str(tmp_path / name)) for name in ("one", "two"))
    assert_same_training(one, two)
    torch.testing.assert_close(moments(two), moments(one), rtol=1e-2, atol=2e-4)
    if lora:  # of whose three rows one process holds two
        write_adapter(two, tmp_path / "adapter", "adapter")
        taken, trained = load_file(tmp_path / "adapter/adapter_model.safetensors"), moments(two)
        assert len(taken) == 28
        for name, value in taken.items():
            key = name.removeprefix("base_model.").removesuffix(".weight")
            assert value.equal(trained[f"{key}.default.weight"]), name
    spent = two.manifest.notes["efficiency"]
    assert 0 < spent["communication_s"] < spent["step_s"]
    assert "communication_s" not in one.manifest.notes["efficiency"]


@pytest.mark.slow
def test_compiled_layers_compute_the_same(tmp_path):
    """Of two lengths and with adapters; what is exported has the names that it always has."""
    directory = tiny_model(tmp_path / "model", dtype=torch.float32)
    documents = [
        Document([5, 6, 7, 8], [False, True, True, True]),
        Document([9, 8, 7], [False, False, True]),
    ]
    found: list[list[torch.Tensor]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        adam = Optimization(1e-2, "constant", 0, 0, 0.0, 0.9, 0.95, 1.0)
        trainer = Trainer(directory, Ranks("cpu"), adam, lora=Lora(r=2), torch_compile=compiled)
        for _ in range(2):
            (
                -trainer.logprobs(documents[:1])[0].sum() - trainer.logprobs(documents)[0].sum()
            ).backward()
            trainer.update()
        found.append([*trainer.trainable.values()])
        trainer.export(directory, tmp_path / str(compiled), "float32")
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("False", "True"))
    assert one.keys() == two.keys() == load_file(directory / "model.safetensors").keys()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"r": 3}])
def test_two_processes_update_as_one(tmp_path, lora):
    """Llama, with a KL term, several steps, and micro-batches that do not divide by the processes. With adapters the
    reference is the base."""
    base = checkpoint_artifact(tmp_path / "base", "llama")
    reference = checkpoint_artifact(tmp_path / "reference", "llama", seed=1)
    rewards = rewards_artifact(tmp_path / "rewards", base, rollout_rows(base, 5, 3, gap=0.1))
    about = {
        "policy": base.ref,
        "rewards": rewards.ref,
        "reference": base.ref if lora else reference.ref,
    }
    about |= {"updates_per_batch": 2, "warmup_steps": 0, "device": "cpu", "save_dtype": "float32"}
    terms = {"beta": 0.1}
    finish(
        launch(
            policy_update,
            tmp_path / "two",
            2,
            iteration=1,
            per_device_train_batch_size=2,
            algorithm_args=json.dumps(terms),
            lora=json.dumps(lora),
            **about,
        )
    )
    about |= {"iteration": 1, "algorithm_args": terms, "lora": lora}
    policy_update(out=str(tmp_path / "one"), per_device_train_batch_size=16, **about)
    assert_same_training(Artifact(str(tmp_path / "one")), Artifact(str(tmp_path / "two")))
    spent = Artifact(str(tmp_path / "two")).manifest.notes["efficiency"]
    assert 0 < spent["communication_s"] < spent["step_s"]


@pytest.mark.slow
def test_two_processes_replay_what_two_processes_did(tmp_path):
    """Each rank's shards to the same bits, with the rate that the update had. One process alone is refused: it would
    add up in another order."""
    base = checkpoint_artifact(tmp_path / "base")
    about = {"warmup_steps": 0, "device": "cpu", "per_device_train_batch_size": 2}
    made = {}
    for every in (1, 9):
        policy = base
        for i in (1, 2):
            rewards = rewards_artifact(
                tmp_path / f"rewards{every}-{i}", policy, rollout_rows(policy, 5, 3)
            )
            inputs = {
                "policy": policy.ref,
                "rewards": rewards.ref,
                "iteration": i,
                "state_every": every,
            }
            inputs["learning_rate"] = i * 1e-3
            if (every, i) == (9, 2):
                with pytest.raises(
                    UserError,
                    match=r"by 2 processes, and another number gives other bits \(world_size 2 then, 1 now",
                ):
                    policy_update(out=str(tmp_path / "alone"), **inputs, **about)
            finish(launch(policy_update, tmp_path / f"{every}-{i}", 2, **inputs, **about))
            policy = made[every, i] = Artifact(str(tmp_path / f"{every}-{i}"))
    assert made[9, 2].manifest.notes["replayed"] == {"from_version": 0, "updates": 1}
    for i in (1, 2):
        one, nine = (made[every, i].manifest.files["model/model.safetensors"] for every in (1, 9))
        assert one == nine


@pytest.mark.slow
def test_two_processes_stopped_and_resumed_end_with_the_same_bytes(tmp_path):
    base, prompts = checkpoint_artifact(tmp_path / "base"), prompts_artifact(tmp_path / "prompts")
    about = {"policy": base.ref, "prompts": prompts.ref, "max_steps": 60, "device": "cpu"}
    about |= {"per_device_train_batch_size": 5}
    child = launch(sft, tmp_path / "stopped", 2, **about)
    until(lambda: any((tmp_path / "stopped").glob("data-*/metrics.jsonl")), 2 * LIMIT_S, child)
    child.send_signal(signal.SIGTERM)
    assert "stopped by a signal" in child.communicate(timeout=LIMIT_S)[0]
    assert child.returncode == 75
    assert not (tmp_path / "stopped" / "manifest.json").exists()
    shutil.copytree(tmp_path / "stopped" / "resume", tmp_path / "alone" / "resume")
    assert "resumed after step" in finish(launch(sft, tmp_path / "stopped", 2, **about))
    finish(launch(sft, tmp_path / "whole", 2, **about))
    stopped, whole = Artifact(str(tmp_path / "stopped")), Artifact(str(tmp_path / "whole"))
    assert stopped.manifest.digest == whole.manifest.digest
    sft(out=str(tmp_path / "alone"), **about)  # by one process, in steps of two processes' size
    alone = Artifact(str(tmp_path / "alone"))
    assert alone.manifest.notes["resumed_world_size"] == 2
    assert_same_training(alone, whole)


@pytest.mark.slow
def test_one_process_stopped_and_resumed_by_two_trains_the_same(tmp_path):
    """Adapters and their moments are dealt to more ranks than wrote them."""
    base, prompts = checkpoint_artifact(tmp_path / "base"), prompts_artifact(tmp_path / "prompts")
    about = {"policy": base.ref, "prompts": prompts.ref, "max_steps": 12, "device": "cpu"}
    about |= {"per_device_train_batch_size": 6, "lora": {"r": 3}, "save_dtype": "float32"}

    sigterm_while_training(tmp_path / "two")
    with pytest.raises(Interrupted):
        sft(out=str(tmp_path / "two"), **about)
    finish(launch(sft, tmp_path / "two", 2, **{**about, "lora": json.dumps(about["lora"])}))
    sft(out=str(tmp_path / "one"), **about)
    one, two = (Artifact(str(tmp_path / name)) for name in ("one", "two"))
    assert two.manifest.notes["resumed_world_size"] == 1
    assert 0 < two.manifest.notes["resumed_from"] < 12
    assert_same_training(one, two)
