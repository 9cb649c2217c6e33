"""Log-probabilities of pairs under the reference policy, once for all epochs and all runs over the
same data.

`preference` reads the file of each split by the ids of pairs, and compares the digests of their
tokens. It takes every column but these three as log-probabilities. Tests:
`tests/unit/stages/test_preference.py`.
"""

from typing import Annotated, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from tuneloop.core.component import Input, Results, Stage, component
from tuneloop.training import checkpoint
from tuneloop.training.options import ScoringOptions
from tuneloop.training.pairs import (
    SPLITS,
    Mismatched,
    digest_pairs,
    fit_pairs,
    read_pairs,
    score_documents,
)


class ReferenceOptions(ScoringOptions):
    """Options of the reference policy."""

    flags: ClassVar[tuple[str, ...]] = ("max_length", *ScoringOptions.flags)


@component("logprobs", image="trainer", accelerator=True, results={"pairs": int})
def reference_logprobs(
    stage: Stage,
    policy: Input,
    prompts: Input,
    *,
    mismatched_pairs: Annotated[
        bool, Field(description="also score mismatched pairs, which KTO needs")
    ] = False,
    per_device_eval_batch_size: Annotated[
        int, Field(ge=1, description="completions in a micro-batch")
    ] = 64,
    options: ReferenceOptions,
) -> Results:
    """Score every chosen and rejected completion under `policy`, the reference that `preference`
    stays close to.

    Raises:
        UserError: no pairs, or one that is longer than `max_length` or the model's context.
        Interrupted: on SIGTERM. Nothing is kept: a retry begins anew.
    """
    from tuneloop.training.fsdp.policy import Policy

    ranks = checkpoint.open_ranks(stage, options)
    with stage.timed("load"):
        model = Policy(checkpoint.model_dir(policy), ranks, **options.model_options)
        checkpoint.load_masters(model, policy)
    counts: dict[str, int] = {}
    for split in SPLITS:
        pairs = read_pairs(prompts, policy, split)
        # Held-out pairs are optional.
        if not pairs:
            continue
        pairs = fit_pairs(stage, pairs, prompts, model, options)
        with stage.timed("score"):
            # Documents alternate: a pair's chosen one, then its rejected one.
            logprobs = score_documents(stage, model, pairs.documents, per_device_eval_batch_size)
            rows = {
                "id": pairs.ids,
                # By which `preference` proves that it trains on these very tokens.
                "tokens": digest_pairs(pairs.documents),
                "chosen": logprobs[0::2],
                "rejected": logprobs[1::2],
            }
            if mismatched_pairs:
                limit = min(options.max_length, model.context)
                mismatched = Mismatched(pairs.documents, limit)
                rows["tokens_kl"] = digest_pairs(mismatched)
                logprobs = score_documents(stage, model, mismatched, per_device_eval_batch_size)
                rows["chosen_kl"] = logprobs[0::2]
                rows["rejected_kl"] = logprobs[1::2]
        counts[split] = len(pairs)
        if stage.leader:
            pq.write_table(pa.table(rows), stage.out / f"{split}.parquet")
    stage.facts.update(model.chosen(), digest=policy.manifest.digest, rows=counts)
    stage.log(f"{counts} pairs")
    return {"pairs": counts["preference"]}


if __name__ == "__main__":
    reference_logprobs.main()
