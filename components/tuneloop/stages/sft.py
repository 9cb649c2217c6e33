"""Supervised fine-tuning: the policy learns the completions of the demonstrations.

With another backend, that backend trains, and this stage still reads the data, measures and writes
the checkpoint (`training/delegation.py`). The loop over steps is `training/epochs.py:
train_epochs`.

Tests: `tests/unit/stages/test_sft.py`, `test_held_out.py`, `test_too_long.py`; with TRL
`tests/local/test_trl.py`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pydantic import Field

from tuneloop.core.component import Input, Results, Stage
from tuneloop.core.context import METRICS
from tuneloop.core.errors import UserError
from tuneloop.core.wording import format_count
from tuneloop.training import checkpoint, epochs
from tuneloop.training.corpora import read_corpus, report_split_conversations
from tuneloop.training.delegation import (
    WARMUP_TEXT,
    BackendOptions,
    check_conversation_choices,
    train_by_backend,
)
from tuneloop.training.held_out import open_held_out_loss
from tuneloop.training.lengths import fit_corpus
from tuneloop.training.options import ADAM_BETA2_TEXT, LEARNING_RATE_TEXT
from tuneloop.weights.publication import Weights

if TYPE_CHECKING:
    from tuneloop.training.fsdp.trainer import Trainer


class SftOptions(BackendOptions):
    """Options of a trainer on demonstrations.

    `config/rules.py: RULES` lists the defaults of `warmup_steps`, `learning_rate` and others, and
    `config/trainer.py` repeats that of `adam_beta2` in words.
    """

    max_steps: int = Field(250, ge=1, description="optimizer steps, unless epochs is set")
    eval_steps: int | None = Field(
        None,
        ge=1,
        description="optimizer steps between two measurements of the loss on held-out "
        "demonstrations (data.sft_eval); default: about ten in the run",
    )
    per_device_train_batch_size: int = Field(
        32, ge=1, description="demonstrations in a micro-batch"
    )
    gradient_accumulation_steps: int = Field(
        1, ge=1, description="a step has batch x this x processes demonstrations"
    )
    learning_rate: float = Field(1e-3, gt=0, description=LEARNING_RATE_TEXT)
    warmup_steps: int = Field(20, ge=0, description=WARMUP_TEXT)
    adam_beta2: float = Field(0.95, ge=0, lt=1, description=ADAM_BETA2_TEXT)


@checkpoint.checkpoint_stage(loss=float, version=int)
def sft(
    stage: Stage,
    policy: Input,
    prompts: Input,
    *,
    options: SftOptions,
    weights: Weights = None,
    seed: int = 0,
) -> Results:
    """Fine-tune on demonstrations: cross-entropy of the completion's tokens and its end of sequence.

    The loss is the mean over all target tokens of a step, whatever the micro-batches and processes.
    Demonstrations come in epochs, each in a random order that is a function of (seed, epoch); see
    `epochs.train_epochs` on resuming. The optimizer starts fresh; parameters start from the
    checkpoint's float32 masters, where it has some.

    Where the data has held-out demonstrations, their loss is measured before the first step, every
    `eval_steps`, and at the end: ``eval_loss`` and ``eval_perplexity`` in ``metrics.jsonl``, and
    ``facts.held_out``.

    Raises:
        UserError: no demonstrations, a missing column, choices for conversations that another
            backend does not know, more that are longer than `max_length` or the model's context
            than may be dropped (``data.too_long``).
        Interrupted: after SIGTERM, once a resume point is committed.
    """
    from tuneloop.training.fsdp.trainer import Trainer

    if options.backend:
        check_conversation_choices(prompts)
    ranks = checkpoint.open_ranks(stage, options)
    with stage.timed("data"):
        documents = read_corpus(prompts, policy, "sft")
        if not documents:
            raise UserError(
                "--prompts",
                prompts.url,
                "holds no demonstrations; set data_prep's sft, or leave sft out",
            )
    options = options.resolve_steps(len(documents), ranks.world)
    with stage.timed("load"):
        trainer = epochs.open_trainer(stage, Trainer, policy, ranks, options)
        documents = fit_corpus(
            stage,
            documents,
            prompts,
            trainer,
            options.max_length,
            is_delegated=options.is_delegated,
        )
    held_out = open_held_out_loss(stage, trainer, prompts, policy, options, options.eval_steps)
    report_split_conversations(stage, documents)
    stage.log(
        f"{format_count(len(documents), 'demonstration')}, {len(held_out.documents)} held out, "
        f"{format_count(options.max_steps, 'step')}, {trainer.chosen()}"
    )

    if options.backend:
        held_out.record_first()
        loss = train_by_backend(stage, trainer, policy, prompts, options.max_steps)
        if held_out:
            stage.metric(trainer.step, **held_out.measure())
    else:
        step = partial(train_step, stage, trainer)
        loss = epochs.train_epochs(
            stage, trainer, len(documents), options, lambda i: [documents[i]], step, held_out
        )
    if held_out and stage.leader:
        losses = held_out.summarize(stage.out / METRICS)
        stage.facts.update(losses.to_facts())
        stage.log(f"held-out loss {losses}")
    checkpoint.release_device(stage, trainer)
    version = checkpoint.write_checkpoint(stage, trainer, policy, options.save_dtype)
    return {"loss": loss, "version": version}


def train_step(stage: Stage, trainer: Trainer, prepared: epochs.Prepared) -> dict[str, float]:
    """Take one optimizer step and return its metrics: the loss is the mean negative log-probability
    of a target, and the gradient's norm is taken before clipping.
    """
    import torch

    torch.manual_seed(stage.seed("dropout", trainer.step, stage.rank))
    total = 0.0
    for _, batch in trainer.accumulate(prepared.batches):
        logprobs, _ = trainer.logprobs(batch)
        part = -logprobs.sum() / prepared.targets
        part.backward()
        total += float(part.detach())
    norm, rate = trainer.update()
    loss = trainer.ranks.sum([total])[0]
    return {"loss": loss, "grad_norm": norm, "learning_rate": rate, "targets": prepared.targets}


if __name__ == "__main__":
    sft.main()
