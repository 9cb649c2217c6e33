"""Supervised fine-tuning: the policy learns the completions of the demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
from pydantic import Field

from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import Input, Results, Stage
from tuneloop.core.errors import UserError
from tuneloop.formats.token_files import Corpus, Document
from tuneloop.formats.tokens import encode_completion, encode_conversation, encode_prompt, load_tokenizer
from tuneloop.training import checkpoint, epochs
from tuneloop.training.options import TrainerOptions
from tuneloop.weights.publication import Weights

if TYPE_CHECKING:
    from tuneloop.training.fsdp.trainer import Trainer

COLUMNS = ("id", "prompt", "chat", "completion")


class SftOptions(TrainerOptions):
    """Of a trainer on demonstrations."""

    max_steps: int = Field(250, ge=1, description="optimizer steps")
    per_device_train_batch_size: int = Field(32, ge=1, description="demonstrations in a micro-batch")
    gradient_accumulation_steps: int = Field(1, ge=1, description="a step: batch x accumulation x processes")
    learning_rate: float = Field(1e-3, gt=0)
    warmup_steps: int = Field(20, ge=0)
    adam_beta2: float = Field(0.95, ge=0, lt=1)


@checkpoint.checkpoint_stage(loss=float, version=int)
def sft(
    stage: Stage, policy: Input, prompts: Input, *, options: SftOptions, weights: Weights = None, seed: int = 0
) -> Results:
    """Fine-tune on demonstrations: cross-entropy of the completion's tokens and its end of sequence.

    The loss is the mean over all target tokens of a step, whatever the micro-batches and processes. Demonstrations
    come in epochs, each in a random order that is a function of (seed, epoch); see `epochs.train_epochs` on resuming.
    The optimizer starts fresh; parameters start from the checkpoint's float32 masters, where it has some.

    Raises:
        UserError: no demonstrations, a missing column, one that is longer than `max_length` or the model's context.
        Interrupted: after SIGTERM, once a resume point is committed.
    """
    from tuneloop.training.fsdp.trainer import Trainer

    ranks = checkpoint.open_ranks(stage, options)
    with stage.timed("data"):
        documents = read_demonstrations(prompts, checkpoint.model_dir(policy), options.max_length)
    with stage.timed("load"):
        trainer = epochs.open_trainer(stage, Trainer, policy, ranks, options)
        extremes = {name: [document] for name, document in documents.extremes.items()}
        epochs.check_fits(extremes, trainer, options.max_length)
    stage.log(f"{len(documents)} demonstrations, {trainer.chosen()}")

    def step(chosen: list[int]) -> tuple[dict[str, float], int]:
        picked = [documents[i] for i in chosen]
        loss, norm, rate = train_step(stage, trainer, picked, options.per_device_train_batch_size)
        targets = sum(document.target_count for document in picked)
        measures = {"loss": loss, "grad_norm": norm, "learning_rate": rate, "targets": targets}
        return measures, sum(len(document.ids) for document in picked)

    loss = epochs.train_epochs(stage, trainer, len(documents), options, step)
    version = checkpoint.write_checkpoint(stage, trainer, policy, options.saved_dtype)
    return {"loss": loss, "version": version}


def train_step(stage: Stage, trainer: Trainer, documents: Sequence[Document], limit: int) -> tuple[float, float, float]:
    """Take one optimizer step on `documents`, which every rank is given all of.

    Returns:
        Mean negative log-probability of a target, gradient norm before clipping, learning rate.
    """
    import torch

    torch.manual_seed(stage.seed("dropout", trainer.step, stage.rank))
    targets = sum(document.target_count for document in documents)
    total = 0.0
    for micro in trainer.accumulate(trainer.plan([len(document.ids) for document in documents], limit)):
        logprobs, _ = trainer.logprobs([documents[i] for i in micro])
        loss = -logprobs.sum() / targets
        loss.backward()
        total += float(loss.detach())
    norm, rate = trainer.update()
    return trainer.ranks.sum([total])[0], norm, rate


def read_demonstrations(prompts: Artifact, model: Path, max_length: int) -> Corpus:
    """Read the demonstrations, tokenized, never all in memory at once.

    A target is every completion token, or in a conversation all that the assistant says.

    Raises:
        UserError: none, a missing column, or one longer than `max_length`.
    """
    if "sft.parquet" not in prompts.manifest.files:
        raise UserError("--prompts", prompts.url, "holds no sft.parquet; give it what data_prep commits")
    table = pq.ParquetFile(prompts.part("sft.parquet"))
    for column in COLUMNS:
        if column not in table.schema_arrow.names:
            raise UserError("--prompts", column, f"is not a column of {prompts.url}/sft.parquet; make the data again")
    if not table.metadata.num_rows:
        raise UserError("--prompts", prompts.url, "holds no demonstrations; raise data_prep's sft, or leave sft out")
    tokenizer = load_tokenizer(model)
    batches = table.iter_batches(1024, columns=list(COLUMNS))
    rows = (row for batch in batches for row in batch.to_pylist())
    return Corpus((row["id"], _tokenize(row, tokenizer, max_length)) for row in rows)


def _tokenize(row: dict[str, Any], tokenizer: Any, max_length: int) -> Document:
    if row["completion"] is None:
        ids, targets = encode_conversation(tokenizer, row["prompt"])
    else:
        prompt = encode_prompt(tokenizer, row["prompt"], row["chat"])
        completion = encode_completion(tokenizer, row["completion"])
        ids, targets = prompt + completion, [False] * len(prompt) + [True] * len(completion)
    if len(ids) > max_length:
        field = "prompt" if True not in targets[:max_length] else "completion"
        text = row[field] or row["prompt"]
        remedy = f"{len(ids)} tokens in all, over max_length {max_length}; raise it"
        raise UserError(f"{field} of {row['id']}", text[:60], remedy)
    return Document(ids, targets)


if __name__ == "__main__":
    sft.main()
