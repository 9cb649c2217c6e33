"""Supervised fine-tuning: the policy learns the completions of the demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow.parquet as pq
from pydantic import Field

from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import Input, Results, Stage, component
from tuneloop.core.errors import UserError
from tuneloop.formats.token_files import Corpus
from tuneloop.training import checkpoint, epochs
from tuneloop.weights.publication import Weights, publish_checkpoint

if TYPE_CHECKING:
    from tuneloop.formats.token_files import Document
    from tuneloop.training.fsdp import Trainer

COLUMNS = ("id", "prompt", "chat", "completion")


@component(
    "checkpoint",
    image="trainer",
    accelerator=True,
    role="trainer",
    results={"loss": float, "version": int},
    after=publish_checkpoint,
)
def sft(
    stage: Stage,
    policy: Input,
    prompts: Input,
    *,
    max_steps: epochs.MaxSteps = 250,
    per_device_train_batch_size: Annotated[int, Field(ge=1, description="demonstrations in a micro-batch")] = 32,
    gradient_accumulation_steps: Annotated[
        int, Field(ge=1, description="a step is batch x accumulation x processes demonstrations")
    ] = 1,
    learning_rate: epochs.LearningRate = 1e-3,
    lr_scheduler_type: epochs.Scheduler = "constant",
    warmup_steps: epochs.WarmupSteps = 20,
    weight_decay: epochs.NotNegative = 0.0,
    adam_beta1: epochs.Beta = 0.9,
    adam_beta2: epochs.Beta = 0.95,
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
    weights: Weights = None,
    seed: int = 0,
) -> Results:
    """Fine-tune on demonstrations: cross-entropy of the completion's tokens and its end of sequence.

    The loss is the mean over all target tokens of a step, whatever the micro-batches and processes. Demonstrations
    come in epochs, each in a random order that is a function of (seed, epoch); see `steps.train` on resuming.
    The optimizer starts fresh; parameters start from the checkpoint's float32 masters, where it has some.

    Raises:
        UserError: no demonstrations, a missing column, one that is longer than `max_length` or the model's context.
        Interrupted: after SIGTERM, once a resume point is committed.
    """
    from tuneloop.training.fsdp import Trainer

    ranks = checkpoint.open_ranks(stage, device, expected_world_size)
    with stage.timed("data"):
        documents = read_demonstrations(prompts, checkpoint.model_dir(policy), max_length)
    with stage.timed("load"):
        trainer = epochs.open_trainer(stage, Trainer, policy, ranks)
        epochs.check_fits({name: [document] for name, document in documents.extremes.items()}, trainer, max_length)
    stage.log(f"{len(documents)} demonstrations, {trainer.chosen()}")
    batch = per_device_train_batch_size * gradient_accumulation_steps * ranks.world

    def step(chosen: list[int]) -> tuple[dict[str, float], int]:
        picked = [documents[i] for i in chosen]
        loss, norm, rate = train_step(stage, trainer, picked, per_device_train_batch_size)
        targets = sum(document.target_count for document in picked)
        measures = {"loss": loss, "grad_norm": norm, "learning_rate": rate, "targets": targets}
        return measures, sum(len(document.ids) for document in picked)

    loss = epochs.train(stage, trainer, len(documents), batch, max_steps, save_steps, step)
    version = checkpoint.write(stage, trainer, policy, epochs.saved_dtype(stage))
    return {"loss": loss, "version": version}


def train_step(stage: Stage, trainer: Trainer, documents: Sequence[Document], limit: int) -> tuple[float, float, float]:
    """One optimizer step on `documents`, which every rank is given all of.

    Returns:
        Mean negative log-probability of a target, gradient norm before clipping, learning rate.
    """
    import torch

    torch.manual_seed(stage.seed("dropout", trainer.step, stage.rank))
    targets = sum(document.target_count for document in documents)
    total = 0.0
    for micro in trainer.accumulate(trainer.plan(documents, limit)):
        logprobs, _ = trainer.logprobs([documents[i] for i in micro])
        loss = -logprobs.sum() / targets
        loss.backward()
        total += float(loss.detach())
    norm, rate = trainer.update()
    return trainer.ranks.sum([total])[0], norm, rate


def read_demonstrations(prompts: Artifact, model: Path, max_length: int) -> Corpus:
    """The demonstrations, tokenized, never all in memory at once.

    A target is every completion token, or in a conversation all that the assistant says.

    Raises:
        UserError: none, a missing column, or one longer than `max_length`.
    """
    from tuneloop.formats.tokens import load_tokenizer

    if "sft.parquet" not in prompts.manifest.files:
        raise UserError("--prompts", prompts.url, "holds no sft.parquet; give it what data_prep commits")
    table = pq.ParquetFile(prompts.path / "sft.parquet")
    for column in COLUMNS:
        if column not in table.schema_arrow.names:
            raise UserError("--prompts", column, f"is no column of {prompts.url}/sft.parquet; make the data again")
    if not table.metadata.num_rows:
        raise UserError("--prompts", prompts.url, "holds no demonstrations; raise data_prep's sft, or leave sft out")
    tokenizer = load_tokenizer(model)
    batches = table.iter_batches(1024, columns=list(COLUMNS))
    rows = (row for batch in batches for row in batch.to_pylist())
    return Corpus((row["id"], _tokenize(row, tokenizer, max_length)) for row in rows)


def _tokenize(row: dict[str, Any], tokenizer: Any, max_length: int) -> Document:
    from tuneloop.formats.token_files import Document
    from tuneloop.formats.tokens import encode_completion, encode_conversation, encode_prompt

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
