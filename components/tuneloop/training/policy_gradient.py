"""Steps on samples: the log-probabilities of micro-batches, an algorithm's loss on them, and its
metrics.

`stages/policy_update.py` scores samples by other policies with `Objective.score`, and takes each
step with `Objective.step`. The names of metrics are those of curves in trackers and on the page,
which has titles for some (`ui/static/dom.js`: ``QUANTITIES``), and of alarms (`runs/alarms.py`). A
metric that an algorithm adds is averaged and shown without more; docs/training.md lists them.

Tests: `tests/unit/stages/test_policy_update.py`, and `tests/local/test_training.py` on two ranks.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Literal

from tuneloop.algorithms._objective import LossOutput, PolicyGradient, Tokens
from tuneloop.core.component import Stage
from tuneloop.core.errors import UserError
from tuneloop.training import checkpoint
from tuneloop.training.samples import Sample

if TYPE_CHECKING:
    from torch import Tensor

    from tuneloop.training.batching import Batch
    from tuneloop.training.fsdp.policy import Policy
    from tuneloop.training.fsdp.ranks import Ranks
    from tuneloop.training.fsdp.trainer import Trainer


@dataclass(frozen=True)
class StepMetrics:
    """What is recorded of every step, whatever the algorithm. Names are those in ``metrics.jsonl``.

    `mean_reward` is recorded and not drawn: that curve is made of the results of the stage reward
    (`runs/run_record.py: NO_CURVES`).

    Attributes:
        loss: summed over the tokens, each with its weight.
        grad_norm: before clipping.
        tokens: targets of the samples that count in the mean.
        used: the share of the samples that went through the model.
        mean_reward: of all samples.
        age: the mean number of versions between the policy that sampled and this one.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    used: float
    mean_reward: float
    age: float


LARGEST_GAP = "logprob_gap_max"
SAMPLE_SIZE = "importance_ess"
RESERVED_METRICS = {"step", LARGEST_GAP, SAMPLE_SIZE} | {
    field.name for field in fields(StepMetrics)
}
"""Names that no auxiliary loss may have: metrics of every step, and those that `Tally` adds."""


@dataclass(frozen=True)
class Objective:
    """The objective to minimise: an algorithm's loss on samples, weighed token by token.

    It is the sum over the tokens of a mini-batch on all ranks, so that the cut into micro-batches
    has no influence on it. Gradients of ranks are therefore summed, and not averaged
    (`set_gradient_divide_factor` in `fsdp/policy.py`).

    Attributes:
        stage: gets the metrics, and names the random streams.
        temperature: of the sampling; logits are divided by it here as there.
        limit: the maximum of rollouts in a micro-batch.
    """

    stage: Stage
    algorithm: PolicyGradient
    temperature: float
    limit: int

    def score(
        self,
        policy: Policy,
        samples: Sequence[Sample],
        name: Literal["old", "reference"],
    ) -> None:
        """Set `name` of all samples to the log-probabilities under `policy`, on every rank."""
        logprobs_by_index: dict[int, list[float]] = {}
        documents = [sample.document for sample in samples]
        plan = policy.plan([len(document.ids) for document in documents], self.limit)
        with policy.frozen():
            for micro, batch in zip(plan, policy.collate_ahead(documents, plan)):
                checkpoint.check_stop(self.stage, policy)
                values, _ = policy.logprobs(batch, self.temperature)
                for index, part in zip(micro, values.split(batch.counts.tolist())):
                    logprobs_by_index[index] = part.tolist()
        # Each rank has scored other samples, and all need all of them.
        for index, logprobs in policy.ranks.merge(logprobs_by_index).items():
            if name == "old":
                samples[index].old = array("f", logprobs)
            else:
                samples[index].reference = array("f", logprobs)

    def step(self, trainer: Trainer, samples: Sequence[Sample]) -> float:
        """Take one optimizer step on a mini-batch, and return its loss; measures go to the stage's
        metrics.

        Args:
            trainer: whose policy it changes.
            samples: all of the mini-batch, on every rank; `trainer.plan` chooses those of this rank.
        """
        import torch

        # `mini_batches.set_advantages` has set both. A sample without a gradient is not computed,
        # but its tokens count in the mean, as the algorithm defines it.
        counted = [sample for sample in samples if sample.counted]
        used = [sample for sample in counted if sample.used]
        targets = torch.tensor([sample.document.target_count for sample in counted])
        # Of all ranks: the parts of an auxiliary term, over micro-batches and ranks, sum to its mean.
        target_count = int(targets.sum())
        weights = self.algorithm.token_weights(targets)
        weight_by_id = {sample.id: weight for sample, weight in zip(counted, weights.tolist())}
        # Dropout is seeded for each step, so that a step that is repeated after an interruption is
        # the same.
        torch.manual_seed(self.stage.seed("dropout", trainer.step, self.stage.rank))
        tally = Tally(trainer.ranks)
        documents = [sample.document for sample in used]
        plan = trainer.plan([len(document.ids) for document in documents], self.limit)
        for micro, batch in zip(trainer.accumulate(plan), trainer.collate_ahead(documents, plan)):
            checkpoint.check_stop(self.stage, trainer)
            output = self._forward(trainer, [used[i] for i in micro], batch, weight_by_id)
            loss = output.per_token
            for term in output.batch_terms.values():
                loss = loss + term / target_count
            loss.sum().backward()
            tally.add(loss=loss.detach(), **output.metrics)
        norm, rate = trainer.update()
        means = tally.result()
        # A token's loss is weighed already: the loss of the batch is the sum over its tokens.
        loss = means.pop("loss") * tally.count
        metrics = StepMetrics(
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=target_count,
            used=len(used) / len(samples),
            mean_reward=sum(sample.score or 0.0 for sample in samples) / len(samples),
            age=sum(sample.age for sample in samples) / len(samples),
        )
        self.stage.metric(trainer.step, **asdict(metrics), **means)
        return loss

    def _forward(
        self,
        trainer: Trainer,
        samples: Sequence[Sample],
        batch: Batch,
        weight_by_id: dict[str, float],
    ) -> LossOutput:
        """Compute the algorithm's loss of a micro-batch, with that of each token weighed.

        Auxiliary terms are among the metrics, too, as one value a token.
        """
        import torch

        device = trainer.ranks.device

        def join(parts: Iterable[array[float]]) -> Tensor:
            values = list(itertools.chain.from_iterable(parts))
            return torch.tensor(values, dtype=torch.float32, device=device)

        logprobs, entropy = trainer.logprobs(batch, self.temperature)
        counts = batch.counts.to(device)
        # In a batch of a single step nothing is older: the old log-probabilities are this step's
        # own.
        old = logprobs.detach()
        if any(sample.old for sample in samples):
            old = join(sample.old for sample in samples)
        reference = None
        if self.algorithm.beta:
            reference = join(sample.reference for sample in samples)
        tokens = Tokens(
            logprobs,
            old=old,
            advantages=join(sample.advantages for sample in samples),
            sequence=torch.arange(len(samples), device=device).repeat_interleave(counts),
            engine=join(sample.engine for sample in samples),
            reference=reference,
        )
        output = self.algorithm.loss(tokens)
        weights = torch.tensor(
            [weight_by_id[sample.id] for sample in samples],
            dtype=torch.float32,
            device=device,
        )
        metrics = output.metrics | {"entropy": entropy}
        for name, term in output.batch_terms.items():
            if name in metrics or name in RESERVED_METRICS:
                remedy = f"names an auxiliary loss {name!r}, which is a metric; use another name"
                raise UserError("algorithm", type(self.algorithm).__module__, remedy)
            metrics[name] = term.detach().expand(len(entropy))
        return LossOutput(
            per_token=output.per_token * weights.repeat_interleave(counts),
            metrics=metrics,
            batch_terms=output.batch_terms,
        )


class Tally:
    """Averages metrics of tokens over micro-batches and ranks.

    All ranks must add the same names in the same order, as their sums are added by position. So an
    algorithm must return the same metrics for every micro-batch, also for an empty one.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.count = 0
        self.parts: dict[str, list[Tensor]] = {}

    def add(self, **measures: Tensor) -> None:
        """Add metrics with one value for each token."""
        for name, values in measures.items():
            # Float64, as sums over the tokens of a whole batch would lose digits in float32.
            self.parts.setdefault(name, []).append(values.double().cpu())

    def result(self) -> dict[str, float]:
        """Return the mean of each, and two figures of the importance weights; called by all ranks.

        ``logprob_gap_max`` is the largest gap, and ``importance_ess`` Kish's effective sample size
        over the token count, ``(Σw)² / (n Σw²)``. They need the metrics ``logprob_gap`` and
        ``importance_weight``, which an algorithm has both or neither (`PolicyGradient.loss`).
        """
        import torch

        values_by_name = {name: torch.cat(parts) for name, parts in self.parts.items()}
        sums = [float(len(values_by_name["loss"]))]
        sums += [float(values.sum()) for values in values_by_name.values()]
        count, *totals = self.ranks.sum(sums)
        self.count = round(count)
        result = {name: total / count for name, total in zip(values_by_name, totals)}
        if "logprob_gap" not in values_by_name:
            return result
        gaps = values_by_name["logprob_gap"]
        # A rank may have no tokens of the last mini-batch.
        (result[LARGEST_GAP],) = self.ranks.max([float(gaps.max()) if len(gaps) else 0.0])
        weights = values_by_name["importance_weight"]
        (squares,) = self.ranks.sum([float(weights.square().sum())])
        total_weight = result["importance_weight"] * count
        result[SAMPLE_SIZE] = total_weight**2 / (count * squares)
        return result
