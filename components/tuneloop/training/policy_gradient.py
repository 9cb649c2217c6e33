"""Steps on samples: the log-probabilities of micro-batches, an algorithm's loss on them, and its metrics."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tuneloop.algorithms._objective import PolicyGradient, Tokens
from tuneloop.core.component import Stage
from tuneloop.training import checkpoint
from tuneloop.training.samples import Sample

if TYPE_CHECKING:
    from torch import Tensor

    from tuneloop.training.batching import Batch
    from tuneloop.training.fsdp.policy import Policy
    from tuneloop.training.fsdp.ranks import Ranks
    from tuneloop.training.fsdp.trainer import Trainer


@dataclass(frozen=True)
class Objective:
    """The objective to minimise: an algorithm's loss, over micro-batches of at most `limit` rollouts."""

    stage: Stage
    algorithm: PolicyGradient
    temperature: float
    limit: int

    def score(
        self, policy: Policy, samples: Sequence[Sample], name: Literal["old", "reference"]
    ) -> None:
        """Set `name` of all samples to the log-probabilities under `policy`, on every rank."""
        found: dict[int, list[float]] = {}
        documents = [sample.document for sample in samples]
        plan = policy.plan([len(document.ids) for document in documents], self.limit)
        with policy.frozen():
            for micro, batch in zip(plan, policy.collate_ahead(documents, plan)):
                checkpoint.check_stop(self.stage, policy)
                values, _ = policy.logprobs(batch, self.temperature)
                found |= {
                    i: part.tolist() for i, part in zip(micro, values.split(batch.counts.tolist()))
                }
        for i, logprobs in policy.ranks.merge(found).items():
            setattr(samples[i], name, array("f", logprobs))

    def step(self, trainer: Trainer, samples: Sequence[Sample]) -> float:
        """Take one optimizer step on a mini-batch, and return its loss; measures go to the stage's metrics."""
        import torch

        counted = [sample for sample in samples if sample.counted]
        used = [sample for sample in counted if sample.used]
        weights = self.algorithm.token_weights(
            torch.tensor([s.document.target_count for s in counted])
        )
        weight = {sample.id: value for sample, value in zip(counted, weights.tolist())}
        torch.manual_seed(self.stage.seed("dropout", trainer.step, self.stage.rank))
        tally = Tally(trainer.ranks)
        documents = [sample.document for sample in used]
        plan = trainer.plan([len(document.ids) for document in documents], self.limit)
        for micro, batch in zip(trainer.accumulate(plan), trainer.collate_ahead(documents, plan)):
            checkpoint.check_stop(self.stage, trainer)
            loss, measures = self._forward(trainer, [used[i] for i in micro], batch, weight)
            loss.sum().backward()
            tally.add(loss=loss.detach(), **measures)
        norm, rate = trainer.update()
        measured = tally.result()
        loss = measured.pop("loss") * tally.count
        self.stage.metric(
            trainer.step,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=sum(sample.document.target_count for sample in counted),
            used=len(used) / len(samples),
            mean_reward=sum(s.score or 0.0 for s in samples) / len(samples),
            age=sum(s.age for s in samples) / len(samples),
            **measured,
        )
        return loss

    def _forward(
        self, trainer: Trainer, samples: Sequence[Sample], batch: Batch, weight: dict[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the weighed loss of each target token, and measures."""
        import torch

        device = trainer.ranks.device

        def column(name: str) -> Tensor:
            values = [value for sample in samples for value in getattr(sample, name)]
            return torch.tensor(values, dtype=torch.float32, device=device)

        logprobs, entropy = trainer.logprobs(batch, self.temperature)
        counts = batch.counts.to(device)
        tokens = Tokens(
            logprobs,
            old=column("old") if any(sample.old for sample in samples) else logprobs.detach(),
            advantages=column("advantages"),
            sequence=torch.arange(len(samples), device=device).repeat_interleave(counts),
            engine=column("engine"),
            reference=column("reference") if self.algorithm.beta else None,
        )
        loss, measures = self.algorithm.loss(tokens)
        each = torch.tensor([weight[s.id] for s in samples], dtype=torch.float32, device=device)
        return loss * each.repeat_interleave(counts), {**measures, "entropy": entropy}


class Tally:
    """Averages metrics of tokens over micro-batches and ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.count = ranks, 0
        self.parts: dict[str, list[Tensor]] = {}

    def add(self, **measures: Tensor) -> None:
        """Add metrics with one value for each token."""
        for name, values in measures.items():
            self.parts.setdefault(name, []).append(values.double().cpu())

    def result(self) -> dict[str, float]:
        """Return the mean of each, ``logprob_gap_max``, and ``importance_ess``: Kish's effective sample size over the
        token count, ``(Σw)² / (n Σw²)``."""
        import torch

        whole = {name: torch.cat(parts) for name, parts in self.parts.items()}
        count, *sums = self.ranks.sum(
            [float(len(whole["loss"])), *(float(values.sum()) for values in whole.values())]
        )
        self.count = round(count)
        result = {name: total / count for name, total in zip(whole, sums)}
        if "logprob_gap" in whole:
            gap, weight = whole["logprob_gap"], whole["importance_weight"]
            (result["logprob_gap_max"],) = self.ranks.max([float(gap.max()) if len(gap) else 0.0])
            (squares,) = self.ranks.sum([float(weight.square().sum())])
            result["importance_ess"] = (result["importance_weight"] * count) ** 2 / (
                count * squares
            )
        return result
