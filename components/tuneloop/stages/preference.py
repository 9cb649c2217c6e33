"""Preference optimization: the policy learns which of two completions is the better one.

`reference_logprobs` runs before it, on the same data and with the same `max_length`. With another
backend that one trains (`training/delegation.py`), and computes its reference itself.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from tuneloop.algorithms._preference import Judged, Preference
from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import Input, Results, Stage
from tuneloop.core.errors import UserError
from tuneloop.core.wording import format_count
from tuneloop.formats.facts import LogprobFacts
from tuneloop.formats.token_files import Document
from tuneloop.training import algorithm_lookup, checkpoint, epochs
from tuneloop.training.delegation import WARMUP_TEXT, BackendOptions, train_by_backend
from tuneloop.training.options import PairOptions
from tuneloop.training.pairs import (
    Mismatched,
    Pairs,
    Split,
    compute_accuracy,
    digest_pairs,
    fit_pairs,
    read_pairs,
    score_documents,
    sum_logprobs,
)
from tuneloop.weights.publication import Weights

if TYPE_CHECKING:
    from tuneloop.training.fsdp.trainer import Trainer

Reference = Mapping[str, np.ndarray]
"""``chosen``, ``rejected``, and for KTO ``chosen_kl``, ``rejected_kl``: each float64 of the shape
``[pairs]``. They are the columns that `stages/reference_logprobs.py` writes, but ``id``,
``tokens`` and ``tokens_kl``.
"""

METRICS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
"""Metrics that are summed over the pairs of all ranks, under TRL's names: the loss, and those of
`algorithms/_preference.py: Preference.measures`. A measure that is not named here is dropped.
"""


class PreferenceOptions(PairOptions, BackendOptions):
    """Options of a trainer on pairs."""

    warmup_steps: int = Field(10, ge=0, description=WARMUP_TEXT)


@checkpoint.checkpoint_stage(loss=float, accuracy=float, version=int)
def preference(
    stage: Stage,
    policy: Input,
    prompts: Input,
    logprobs: Input,
    *,
    algorithm: Annotated[
        algorithm_lookup.AlgorithmName,
        algorithm_lookup.validate_kind(Preference),
        Field(description="dpo, ipo, kto, or pkg.mod:attr"),
    ] = "dpo",
    algorithm_args: algorithm_lookup.AlgorithmArgs = {},  # noqa: B006
    options: PreferenceOptions,
    weights: Weights = None,
    seed: int = 0,
) -> Results:
    """Take steps on pairs, against the reference's log-probabilities that `reference_logprobs` made.

    `accuracy`, before in ``facts.accuracy_before``, is the share of held-out pairs
    (``preference_eval``) of which the policy finds the chosen completion likelier than the rejected
    one; without any, of the training pairs.

    Raises:
        UserError: no pairs, one that is too long, or log-probabilities of other tokens.
        Interrupted: after SIGTERM, once a resume point is committed.
    """
    from tuneloop.training.fsdp.trainer import Trainer

    objective = algorithm_lookup.open_algorithm(algorithm, algorithm_args, Preference)
    ranks = checkpoint.open_ranks(stage, options)
    with stage.timed("data"):
        pairs = read_pairs(prompts, policy, "preference")
        held_out = read_pairs(prompts, policy, "preference_eval")
    # The steps of `epochs` are computed from all pairs, though `fit_pairs` may drop some below.
    options = options.resolve_steps(len(pairs), ranks.world)
    with stage.timed("load"):
        trainer = epochs.open_trainer(stage, Trainer, policy, ranks, options)
        pairs = fit_pairs(stage, pairs, prompts, trainer, options)
        held_out = fit_pairs(stage, held_out, prompts, trainer, options) or pairs
        mismatched: Mismatched | None = None
        if objective.needs_kl:
            limit = min(options.max_length, trainer.context)
            mismatched = Mismatched(pairs.documents, limit)
        reference = read_reference(logprobs, pairs, "preference", mismatched)
        reference_digest = LogprobFacts.read(logprobs, "--logprobs").digest
    stage.facts["objective"] = {"algorithm": algorithm} | objective.model_dump()
    with stage.timed("evaluate"):
        before = compute_accuracy(stage, trainer, held_out, 2 * options.per_device_train_batch_size)
    learner = Learner(
        stage, trainer, objective, reference, mismatched, options.per_device_train_batch_size
    )
    if not options.backend:
        loss = epochs.train_epochs(
            stage, trainer, len(pairs), options, pairs.__getitem__, learner.step
        )
    elif reference_digest == policy.manifest.digest:
        # Another backend computes the reference itself, from the policy that it begins with.
        loss = train_by_backend(stage, trainer, policy, prompts, options.max_steps)
    else:
        raise UserError(
            "--logprobs", logprobs.url, f"is not of --policy, the reference of {options.backend}"
        )
    dtype = checkpoint.choose_saved_dtype(policy, options.save_dtype)
    with stage.timed("evaluate"), trainer.rounded(dtype):
        after = compute_accuracy(stage, trainer, held_out, 2 * options.per_device_train_batch_size)
    stage.facts.update(accuracy_before=before, reference=reference_digest)
    stage.log(f"accuracy {before:.3f} → {after:.3f} on {format_count(len(held_out), 'pair')}")
    checkpoint.release_device(stage, trainer)
    version = checkpoint.write_checkpoint(stage, trainer, policy, dtype)
    return {"loss": loss, "accuracy": after, "version": version}


def read_reference(
    logprobs: Artifact, pairs: Pairs, split: Split, mismatched: Mismatched | None
) -> Reference:
    """Read the reference's log-probabilities of `pairs`, in order, and of `mismatched` ones, where
    the algorithm needs them.

    Raises UserError: of others, or none for KTO.
    """
    file = logprobs.part(f"{split}.parquet", "--logprobs", "give it what reference_logprobs made")
    table = pq.read_table(file).combine_chunks()
    # The table has more pairs where it was made with a larger max_length.
    rows = table.take(pc.index_in(pairs.ids, table["id"]))
    other = _find_other(rows["tokens"], pairs.documents)
    if other is not None:
        remedy = (
            f"{logprobs.url} has other tokens for it; run reference_logprobs on these very pairs "
            "and tokenizer"
        )
        raise UserError("--logprobs", pairs.ids[other].as_py(), remedy)
    if mismatched is not None:
        # A table of an earlier release does not say which documents it has mismatched.
        if "tokens_kl" not in rows.column_names:
            remedy = (
                "lacks what kto needs; set reference_logprobs' mismatched_pairs and run it again"
            )
            raise UserError("--logprobs", logprobs.url, remedy)
        other = _find_other(rows["tokens_kl"], mismatched)
        if other is not None:
            remedy = (
                f"{logprobs.url} has another completion behind its prompt; run reference_logprobs "
                "with the same max_length"
            )
            raise UserError("--logprobs", pairs.ids[other].as_py(), remedy)
    no_logprobs = ("id", "tokens", "tokens_kl")
    return {name: rows[name].to_numpy() for name in rows.column_names if name not in no_logprobs}


def _find_other(digests: pa.ChunkedArray, documents: Sequence[Document]) -> int | None:
    """Find the first pair whose digest is another one than that of its two `documents`."""
    # A pair that the table lacks is a row of nulls.
    is_same = pc.fill_null(pc.equal(digests, digest_pairs(documents)), False)
    index: int = is_same.index(False).as_py()
    return None if index < 0 else index


class Learner:
    """Takes optimizer steps on pairs, with at most `limit` pairs in a micro-batch."""

    def __init__(
        self,
        stage: Stage,
        trainer: "Trainer",
        objective: Preference,
        reference: Reference,
        mismatched: Mismatched | None,
        limit: int,
    ) -> None:
        self.stage = stage
        self.trainer = trainer
        self.objective = objective
        self.reference = reference
        self.limit = limit
        self.mismatched = mismatched

    def step(self, prepared: epochs.Prepared) -> dict[str, float]:
        """Take one optimizer step and return its metrics, under TRL's names."""
        import torch

        indices = prepared.indices
        divergence = self._divergence(indices)
        # Dropout is seeded for each step: one that is repeated after an interruption is the same.
        torch.manual_seed(self.stage.seed("dropout", self.trainer.step, self.stage.rank))
        totals: dict[str, float] = {}
        for micro, batch in self.trainer.accumulate(prepared.batches):
            logprobs = sum_logprobs(self.trainer, batch)
            reference = [
                self.reference[side][indices[i]] for i in micro for side in ("chosen", "rejected")
            ]
            ratios = logprobs - logprobs.new_tensor(reference)
            counts = batch.counts.to(logprobs.device)
            judged = Judged(ratios, counts, logprobs.new_tensor(divergence))
            loss = self.objective.loss(judged).sum() / len(indices)
            loss.backward()
            measures = {"loss": loss.detach()} | self.objective.measures(judged)
            for name, values in measures.items():
                totals[name] = totals.get(name, 0.0) + float(values.sum())
        norm, rate = self.trainer.update()
        # A rank without micro-batches has no totals, and takes part in the sum all the same.
        sums = self.trainer.ranks.sum([totals.get(name, 0.0) for name in METRICS])
        metrics = dict(zip(METRICS, sums))
        for name in METRICS:
            if name != "loss":
                metrics[name] /= len(indices)
        metrics["grad_norm"] = norm
        metrics["learning_rate"] = rate
        if self.mismatched is not None:
            metrics["kl"] = divergence
        return metrics

    def _divergence(self, indices: Sequence[int]) -> float:
        """Compute the mean log-ratio over mismatched completions of this step, at least 0, without
        gradient.
        """
        if self.mismatched is None:
            return 0.0
        # All ranks score the whole step's documents together, so each gets the same mean.
        documents = [self.mismatched[index] for i in indices for index in (2 * i, 2 * i + 1)]
        logprobs = score_documents(None, self.trainer, documents, 2 * self.limit)
        reference = [
            self.reference[side][i] for i in indices for side in ("chosen_kl", "rejected_kl")
        ]
        ratios = [ours - theirs for ours, theirs in zip(logprobs, reference)]
        return max(0.0, sum(ratios) / len(ratios))


if __name__ == "__main__":
    preference.main()
