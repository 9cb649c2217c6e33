"""Train a reward model on pairs (Bradley-Terry); `model_reward` scores rollouts with it.

Its artifact is no policy: it has no version, no canary and no trainer's state, and only
`model_reward` opens it. No shipped pipeline has these two stages. Tests:
`tests/unit/stages/test_preference.py`, and `tests/local/test_parity.py` against TRL.
"""

import shutil
from functools import partial
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tuneloop.core.component import Input, Results, Stage, component
from tuneloop.core.wording import format_count
from tuneloop.formats.model_files import WEIGHTS
from tuneloop.training import checkpoint, epochs
from tuneloop.training.options import PairOptions
from tuneloop.training.pairs import compute_accuracy, fit_pairs, read_pairs

if TYPE_CHECKING:
    from torch import Tensor

    from tuneloop.training.scorer import ScoreTrainer


@component(
    "scorer",
    image="trainer",
    accelerator=True,
    role="trainer",
    results={"loss": float, "accuracy": float},
)
def reward_model(
    stage: Stage,
    policy: Input,
    prompts: Input,
    *,
    center_rewards_coefficient: Annotated[
        float, Field(ge=0, description="pulls a pair's summed scores to 0")
    ] = 0.0,
    options: PairOptions,
    seed: int = 0,
) -> Results:
    """Replace the policy's head by one that outputs a score, and train chosen completions to score above rejected ones.

    ``-log σ(score chosen - score rejected)`` plus ``center_rewards_coefficient * (their sum)²``, as
    in TRL. `accuracy` is the share of held-out pairs in that order; without any, of the training
    pairs.

    Raises:
        UserError: no pairs, one that is too long, or a model without a form for sequence
            classification.
        Interrupted: after SIGTERM, once a resume point is committed.
    """
    from tuneloop.training.scorer import ScoreTrainer

    ranks = checkpoint.open_ranks(stage, options)
    with stage.timed("data"):
        pairs = read_pairs(prompts, policy, "preference")
        held_out = read_pairs(prompts, policy, "preference_eval")
    with stage.timed("load"):
        trainer = epochs.open_trainer(stage, ScoreTrainer, policy, ranks, options)
        pairs = fit_pairs(stage, pairs, prompts, trainer, options)
        held_out = fit_pairs(stage, held_out, prompts, trainer, options) or pairs
    step = partial(train_step, stage, trainer, center=center_rewards_coefficient)
    loss = epochs.train_epochs(stage, trainer, len(pairs), options, pairs.__getitem__, step)
    dtype = checkpoint.choose_saved_dtype(policy, options.save_dtype)
    with stage.timed("evaluate"), trainer.rounded(dtype):
        accuracy = compute_accuracy(
            stage, trainer, held_out, 2 * options.per_device_train_batch_size, ScoreTrainer.scores
        )
    checkpoint.release_device(stage, trainer)
    with stage.timed("save"):
        source = checkpoint.model_dir(policy)
        target = stage.out / "model"
        if stage.leader:
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(*WEIGHTS))
        # No trainer's state: a scorer is not trained on.
        trainer.export(source, target, dtype)
    stage.facts.update(step=trainer.step, save_dtype=dtype, accuracy=accuracy)
    stage.log(f"accuracy {accuracy:.3f} on {format_count(len(held_out), 'pair')}")
    return {"loss": loss, "accuracy": accuracy}


def train_step(
    stage: Stage, trainer: "ScoreTrainer", prepared: epochs.Prepared, center: float
) -> dict[str, float]:
    """Take one optimizer step and return its metrics, under TRL's names."""
    import torch

    # Dropout is seeded for each step: one that is repeated after an interruption is the same.
    torch.manual_seed(stage.seed("dropout", trainer.step, stage.rank))
    totals = torch.zeros(3, dtype=torch.float64)
    for _, batch in trainer.accumulate(prepared.batches):
        # Documents alternate: a pair's chosen one, then its rejected one.
        chosen, rejected = trainer.scores(batch).view(-1, 2).unbind(1)
        loss = bradley_terry(chosen, rejected, center).sum() / len(prepared.indices)
        loss.backward()
        margin = chosen - rejected
        # A further metric is added here, to the length of `totals`, and where the sums of all ranks
        # are taken apart below.
        sums = torch.stack([loss.detach(), (margin > 0).sum(), margin.detach().sum()])
        totals += sums.double().cpu()
    norm, rate = trainer.update()
    # The loss is divided by the count of all ranks already, the others are sums over pairs.
    total_loss, right, margins = trainer.ranks.sum(totals.tolist())
    count = len(prepared.indices)
    return {
        "loss": total_loss,
        "accuracy": right / count,
        "margin": margins / count,
        "grad_norm": norm,
        "learning_rate": rate,
    }


def bradley_terry(chosen: "Tensor", rejected: "Tensor", center: float) -> "Tensor":
    """Compute each pair's loss: minus the log-probability that the chosen one wins, and the pull of
    the sum to 0.
    """
    from torch.nn.functional import logsigmoid

    return center * (chosen + rejected).square() - logsigmoid(chosen - rejected)


if __name__ == "__main__":
    reward_model.main()
