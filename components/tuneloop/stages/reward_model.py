"""Train a reward model on pairs (Bradley-Terry); `model_reward` scores rollouts with it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tuneloop.core.component import Input, Results, Stage, component
from tuneloop.training import checkpoint, epochs
from tuneloop.training.pairs import Pair, check_fits, plan, read_pairs

if TYPE_CHECKING:
    from torch import Tensor

    from tuneloop.training.scorer import Scorer, ScoreTrainer


@component("scorer", image="trainer", accelerator=True, role="trainer", results={"loss": float, "accuracy": float})
def reward_model(
    stage: Stage,
    policy: Input,
    prompts: Input,
    *,
    center_rewards_coefficient: Annotated[float, Field(ge=0, description="draws scores of a pair to 0 in sum")] = 0.0,
    max_steps: epochs.MaxSteps = 100,
    per_device_train_batch_size: epochs.BatchSize = 32,
    gradient_accumulation_steps: epochs.Accumulation = 1,
    learning_rate: epochs.LearningRate = 1e-4,
    lr_scheduler_type: epochs.Scheduler = "constant",
    warmup_steps: epochs.WarmupSteps = 10,
    weight_decay: epochs.NotNegative = 0.0,
    adam_beta1: epochs.Beta = 0.9,
    adam_beta2: epochs.Beta = 0.99,
    max_grad_norm: epochs.MaxGradNorm = 1.0,
    max_length: epochs.MaxLength = 256,
    packing: epochs.Packing = "auto",
    gradient_checkpointing: epochs.GradientCheckpointing = False,
    lora: epochs.LoraOption = None,
    cpu_offload: epochs.CpuOffload = False,
    torch_compile: epochs.TorchCompile = False,
    use_liger_kernel: epochs.UseLigerKernel = False,
    dtype: epochs.Dtype = "float32",
    attn_implementation: epochs.Attention = "auto",
    save_dtype: epochs.SaveDtype = "auto",
    save_steps: epochs.SaveSteps = 0,
    device: epochs.Device = "auto",
    expected_world_size: epochs.WorldSize = None,
    seed: int = 0,
) -> Results:
    """Give the policy's body a head of one number, and train both until chosen completions score above rejected ones.

    ``-log σ(score chosen - score rejected)`` plus ``center_rewards_coefficient * (their sum)²``, as in TRL.
    `accuracy` is the share of held-out pairs in that order; without any, of the training pairs.

    Raises:
        UserError: no pairs, one that is too long, or a model without such a form.
        Interrupted: after SIGTERM, once a resume point is committed.
    """
    from tuneloop.training.scorer import ScoreTrainer

    ranks = checkpoint.open_ranks(stage, device, expected_world_size)
    with stage.timed("data"):
        pairs = read_pairs(prompts, policy, "preference")
        held_out = read_pairs(prompts, policy, "preference_eval") or pairs
    with stage.timed("load"):
        trainer = epochs.open_trainer(stage, ScoreTrainer, policy, ranks)
        check_fits([pairs, held_out], trainer, max_length)

    def step(chosen: list[int]) -> tuple[dict[str, float], int]:
        picked = [pairs[i] for i in chosen]
        measures = train_step(stage, trainer, picked, per_device_train_batch_size, center_rewards_coefficient)
        return measures, sum(pair.length for pair in picked)

    batch = per_device_train_batch_size * gradient_accumulation_steps * ranks.world
    loss = epochs.train(stage, trainer, len(pairs), batch, max_steps, save_steps, step)
    with stage.timed("evaluate"):
        right = accuracy(stage, trainer, held_out, per_device_train_batch_size)
    with stage.timed("save"):
        source, target = checkpoint.model_dir(policy), stage.out / "model"
        if stage.leader:
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*"))
        trainer.export(source, target, epochs.saved_dtype(stage))
    stage.facts.update(step=trainer.step, save_dtype=save_dtype, accuracy=right)
    stage.log(f"accuracy {right:.3f} on {len(held_out)} pairs")
    return {"loss": loss, "accuracy": right}


def train_step(
    stage: Stage, trainer: ScoreTrainer, pairs: Sequence[Pair], limit: int, center: float
) -> dict[str, float]:
    """One optimizer step on `pairs`, which every rank is given all of; its measures, under TRL's names."""
    import torch

    torch.manual_seed(stage.seed("dropout", trainer.step, stage.rank))
    totals = torch.zeros(3, dtype=torch.float64)
    for micro in trainer.accumulate(plan(trainer, pairs, limit)):
        chosen, rejected = _scores(trainer, [pairs[i] for i in micro])
        loss = bradley_terry(chosen, rejected, center).sum() / len(pairs)
        loss.backward()
        margin = chosen - rejected
        totals += torch.stack([loss.detach(), (margin > 0).sum(), margin.detach().sum()]).double().cpu()
    norm, rate = trainer.update()
    loss_, right, margins = trainer.ranks.sum(totals.tolist())
    count = len(pairs)
    measures = {"loss": loss_, "accuracy": right / count, "margin": margins / count}
    return {**measures, "grad_norm": norm, "learning_rate": rate}


def bradley_terry(chosen: Tensor, rejected: Tensor, center: float) -> Tensor:
    """The loss of each pair: minus the log-probability that the chosen one wins, and the pull of the sum to 0."""
    from torch.nn.functional import logsigmoid

    return center * (chosen + rejected).square() - logsigmoid(chosen - rejected)


def accuracy(stage: Stage, scorer: Scorer, pairs: Sequence[Pair], limit: int) -> float:
    """The share of pairs whose chosen completion scores above the rejected one."""
    right = 0.0
    with scorer.frozen():
        for micro in plan(scorer, pairs, limit):
            checkpoint.check_stop(stage, scorer)
            chosen, rejected = _scores(scorer, [pairs[i] for i in micro])
            right += float((chosen > rejected).sum())
    return scorer.ranks.sum([right])[0] / len(pairs)


def _scores(scorer: Scorer, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """Of the chosen and of the rejected ones, ``[pairs]`` each."""
    found = scorer.scores([d.ids for pair in pairs for d in pair.documents()])
    chosen, rejected = found.view(-1, 2).unbind(1)
    return chosen, rejected


if __name__ == "__main__":
    reward_model.main()
