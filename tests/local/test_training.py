"""Training against TRL, and over several processes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.making import checkpoint_artifact, prompts_artifact, rewards_artifact, rollout_rows, tiny_model
from tuneloop.algorithms import grpo
from tuneloop.artifacts import Artifact
from tuneloop.component import Component
from tuneloop.errors import UserError
from tuneloop.policy_update import policy_update
from tuneloop.sft import sft
from tuneloop.trainers._batch import Document
from tuneloop.trainers.fsdp import Optimization, Policy, Ranks, Trainer

pytestmark = pytest.mark.local


def trl_loss(model: Path, work: Path, inputs: dict[str, torch.Tensor], beta: float) -> tuple[float, dict[str, Any]]:
    """Loss and gradients by TRL's own loss code, with the correction it applies to rollouts of vLLM."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        output_dir=str(work),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        loss_type="dapo",
        beta=beta,
        epsilon=0.2,
        epsilon_high=0.28,
        temperature=1.0,
        per_device_train_batch_size=8,
        num_generations=4,
        disable_dropout=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "say 1 ="}] * 8),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True  # where its loss applies the ratio
    trainer.model.eval()  # the same gradient, and the normalizer of one whole batch
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("arch", ["qwen3", "llama"])
@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_grpo_loss_and_gradient_equal_trl(arch, beta, tmp_path):
    """Ratios away from 1 so that some are clipped, an engine that disagrees, prompts and completions of all lengths."""
    model = tiny_model(tmp_path / "model", arch, dtype=torch.float32)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 41) for _ in range(rng.randint(1, 9))] for _ in range(8)]
    completions = [[rng.randrange(3, 41) for _ in range(rng.randint(1, 7))] for _ in range(8)]
    documents = [Document(p + c, [False] * len(p) + [True] * len(c)) for p, c in zip(prompts, completions)]
    policy = Policy(model, Ranks("cpu"))
    logprobs, _ = policy.logprobs(documents)
    noise = torch.Generator().manual_seed(0)
    old = logprobs.detach() + 0.3 * torch.randn(len(logprobs), generator=noise)
    engine = old + 0.5 * torch.randn(len(old), generator=noise)
    reference = logprobs.detach() + 0.2 * torch.randn(len(old), generator=noise)
    rewards, groups = torch.tensor([1.0, 0, 0, 0, 0.5, 1, 0, 1]), torch.tensor([0] * 4 + [1] * 4)
    advantages = grpo.advantages(rewards, groups, torch.ones(8, dtype=torch.bool))
    each = advantages.repeat_interleave(torch.tensor([len(c) for c in completions]))
    tokens, measures = grpo.loss(
        logprobs, old, each, engine_logprobs=engine, reference_logprobs=reference if beta else None, beta=beta
    )
    loss = tokens.sum() / len(tokens)
    loss.backward()

    def right(values: list[Any], fill: float = 0) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(v) for v in values], True, fill)

    def by_row(values: torch.Tensor) -> torch.Tensor:
        return right(list(values.split([len(c) for c in completions])))

    width = max(map(len, prompts))
    inputs = {
        "prompt_ids": torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": right(completions),
        "completion_mask": right([[1] * len(c) for c in completions]),
        "advantages": advantages,
        "old_per_token_logps": by_row(old),
        "ref_per_token_logps": by_row(reference),
        "importance_sampling_ratio": by_row((old - engine).exp().clamp(max=2.0)),
        "num_items_in_batch": torch.tensor(float(len(tokens))),
    }
    theirs, gradients = trl_loss(model, tmp_path / "trl", inputs, beta)
    assert 0 < float(measures["clip_fraction"].mean()) < 1
    assert float(loss.detach()) == pytest.approx(theirs, rel=1e-5)
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


def launch(stage: Component, out: Path, processes: int, **arguments: Any) -> "subprocess.Popen[str]":
    words = [sys.executable, *stage.command(processes)[1:], "--checkpoint", str(out)]
    words += [word for name, value in arguments.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(child: "subprocess.Popen[str]") -> str:
    said, _ = child.communicate(timeout=300)
    assert child.returncode == 0, said[-4000:]
    return said


def rows(artifact: Artifact) -> list[dict[str, float]]:
    return [json.loads(line) for line in (artifact.path / "metrics.jsonl").read_text().splitlines()]


def assert_same_training(one: Artifact, two: Artifact) -> None:
    assert one.manifest.facts["world_size"] == 1
    assert two.manifest.facts["world_size"] == 2
    assert len(rows(one)) == len(rows(two)) > 0
    for a, b in zip(rows(one), rows(two)):
        assert b == pytest.approx(a, rel=2e-3, abs=1e-5)
    theirs = load_file(two.path / "model" / "model.safetensors")
    for name, value in load_file(one.path / "model" / "model.safetensors").items():
        torch.testing.assert_close(theirs[name], value, rtol=1e-3, atol=2e-4)


def moments(checkpoint: Artifact) -> dict[str, torch.Tensor]:
    """Everything in ``trainer/``, read by one process."""
    trainer = Trainer(
        checkpoint.path / "model", Ranks("cpu"), Optimization(1e-3, "constant", 0, 0, 0.0, 0.9, 0.95, 1.0)
    )
    trainer.load(checkpoint.path / "trainer", 1)
    return trainer._state()


def test_two_processes_fine_tune_as_one(tmp_path):
    base, prompts = checkpoint_artifact(tmp_path / "base"), prompts_artifact(tmp_path / "prompts")
    about = {"policy": base.ref, "prompts": prompts.ref, "max_steps": 8, "warmup_steps": 2}
    about |= {"device": "cpu", "save_dtype": "float32"}
    finish(launch(sft, tmp_path / "two", 2, per_device_train_batch_size=4, expected_world_size=2, **about))
    sft(out=str(tmp_path / "one"), per_device_train_batch_size=8, **about)
    one, two = (Artifact(str(tmp_path / name)) for name in ("one", "two"))
    assert_same_training(one, two)
    torch.testing.assert_close(moments(two), moments(one), rtol=1e-2, atol=2e-4)


def test_two_processes_update_as_one(tmp_path):
    """Llama, with a KL term, several steps, and micro-batches that do not divide by the processes."""
    base = checkpoint_artifact(tmp_path / "base", "llama")
    reference = checkpoint_artifact(tmp_path / "reference", "llama", seed=1)
    rewards = rewards_artifact(tmp_path / "rewards", base, rollout_rows(base, 5, 3, gap=0.1))
    about = {"policy": base.ref, "rewards": rewards.ref, "reference": reference.ref, "beta": 0.1}
    about |= {"updates_per_batch": 2, "warmup_steps": 0, "device": "cpu", "save_dtype": "float32"}
    finish(launch(policy_update, tmp_path / "two", 2, per_device_train_batch_size=2, **about))
    policy_update(out=str(tmp_path / "one"), per_device_train_batch_size=16, **about)
    assert_same_training(Artifact(str(tmp_path / "one")), Artifact(str(tmp_path / "two")))


def test_two_processes_stopped_and_resumed_end_with_the_same_bytes(tmp_path):
    base, prompts = checkpoint_artifact(tmp_path / "base"), prompts_artifact(tmp_path / "prompts")
    about = {"policy": base.ref, "prompts": prompts.ref, "max_steps": 120, "device": "cpu"}
    about |= {"per_device_train_batch_size": 5}
    child = launch(sft, tmp_path / "stopped", 2, **about)
    deadline = time.monotonic() + 200
    while not any((tmp_path / "stopped").glob("data-*/metrics.jsonl")):
        assert time.monotonic() < deadline
        assert child.poll() is None, child.communicate()[0][-4000:]
        time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    assert "stopped by a signal" in child.communicate(timeout=100)[0]
    assert child.returncode != 0
    assert not (tmp_path / "stopped" / "manifest.json").exists()
    with pytest.raises(UserError, match="2 were at work before"):
        sft(out=str(tmp_path / "stopped"), **about)
    assert "resumed after step" in finish(launch(sft, tmp_path / "stopped", 2, **about))
    finish(launch(sft, tmp_path / "whole", 2, **about))
    stopped, whole = Artifact(str(tmp_path / "stopped")), Artifact(str(tmp_path / "whole"))
    assert stopped.manifest.digest == whole.manifest.digest
