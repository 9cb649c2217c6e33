"""The loss on held-out demonstrations, measured before, while and after a policy is trained.

`stages/sft.py` uses it. What is measured ends up as `formats/held_out.py: HeldOutFacts` in the
facts of the checkpoint, which `runs/summary.py` and `runs/cautions.py` read.
`inference/held_out.py` is about samples. Tests: `tests/unit/stages/test_held_out.py`.
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import Stage
from tuneloop.formats.held_out import HeldOutFacts, compute_perplexity
from tuneloop.formats.token_files import Corpus
from tuneloop.training.checkpoint import choose_saved_dtype
from tuneloop.training.corpora import read_corpus
from tuneloop.training.lengths import fit_corpus
from tuneloop.training.options import TrainerOptions
from tuneloop.training.pairs import score_documents
from tuneloop.training.protocols import EpochTrainer

if TYPE_CHECKING:
    from tuneloop.training.fsdp.trainer import Trainer

SPLIT = "sft_eval"
MEASUREMENTS = 10
"""How often the loss is measured in a run that does not say so, the first and the last time aside.
The description of `eval_steps` in `stages/sft.py` says "about ten".
"""


class HeldOutLoss:
    """Measures the mean negative log-probability of a held-out target, in nats a token.

    The mean is over all target tokens of all held-out demonstrations, not over demonstrations.

    Attributes:
        documents: the held-out demonstrations, tokenized; may be empty.
        dtype: in which the model is written.
        limit: demonstrations in a micro-batch.
        interval: optimizer steps between two measurements.
    """

    def __init__(
        self,
        stage: Stage,
        trainer: EpochTrainer,
        documents: Corpus,
        dtype: str,
        limit: int,
        interval: int,
    ) -> None:
        self.stage = stage
        self.trainer = trainer
        self.documents = documents
        self.dtype = dtype
        self.limit = limit
        self.interval = interval
        self.targets = sum(document.target_count for document in documents)

    def __bool__(self) -> bool:
        return bool(self.targets)

    def is_due(self, step: int, max_steps: int) -> bool:
        """Tell whether to measure after optimizer step `step`: in every interval and after the
        last."""
        return bool(self) and (step == max_steps or step % self.interval == 0)

    def measure(self) -> dict[str, float]:
        """Compute the loss and the perplexity of the policy as it would be written now.

        Rounded parameters are what is served, and may have lost what training changed. Called by
        all ranks. Neither parameters nor random streams change. The stage finishes the measurement on
        SIGTERM, so that the resume point that follows has the metrics of its step.
        """
        return self._measure_in(self.dtype)

    def _measure_in(self, dtype: str) -> dict[str, float]:
        with self.stage.timed("evaluate"), self.trainer.rounded(dtype):
            logprobs = score_documents(None, self.trainer, self.documents, self.limit)
        loss = -math.fsum(logprobs) / self.targets
        return {"eval_loss": loss, "eval_perplexity": compute_perplexity(loss)}

    def record_first(self) -> None:
        """Record the loss before the first step, unless an earlier attempt did."""
        if self and self.trainer.step == 0:
            # The policy as it came is not rounded, whatever dtype the next one is written in.
            self.stage.metric(0, **self._measure_in("float32"))

    def summarize(self, metrics: Path) -> HeldOutFacts:
        """Summarize what `metrics` (``metrics.jsonl``) recorded, for the facts of the checkpoint."""
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        losses = [row["eval_loss"] for row in rows if "eval_loss" in row]
        return HeldOutFacts(len(self.documents), self.targets, losses[0], losses[-1])


def open_held_out_loss(
    stage: Stage,
    trainer: "Trainer",
    prompts: Artifact,
    policy: Artifact,
    options: TrainerOptions,
    eval_steps: int | None,
) -> HeldOutLoss:
    """Open the held-out demonstrations of `prompts`, which may have none.

    Args:
        eval_steps: optimizer steps between measurements; None: about ten measurements in the run.

    Raises:
        UserError: more than may be dropped are longer than `max_length` or the model's context.
    """
    with stage.timed("data"):
        documents = read_corpus(prompts, policy, SPLIT, required=False)
    if documents:
        documents = fit_corpus(
            stage,
            documents,
            prompts,
            trainer,
            options.max_length,
            is_delegated=options.is_delegated,
        )
    interval = eval_steps or math.ceil(options.max_steps / MEASUREMENTS)
    dtype = choose_saved_dtype(policy, options.save_dtype)
    limit = options.per_device_train_batch_size
    return HeldOutLoss(
        stage,
        trainer,
        documents,
        dtype=dtype,
        limit=limit,
        interval=interval,
    )
