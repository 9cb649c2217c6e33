"""Supervised fine-tuning: the policy learns the completions of the demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pyarrow.parquet as pq
from pydantic import Field

from tuneloop import checkpoint
from tuneloop.artifacts import Artifact, canonical
from tuneloop.component import UNTRACKED, Input, Results, Stage, component
from tuneloop.errors import UserError
from tuneloop.publication import Weights, publish_checkpoint

if TYPE_CHECKING:
    from tuneloop.trainers._batch import Document
    from tuneloop.trainers.fsdp import Trainer


@component(
    "checkpoint", image="trainer", accelerator=True, results={"loss": float, "version": int}, after=publish_checkpoint
)
def sft(
    stage: Stage,
    policy: Input,
    prompts: Input,
    *,
    max_steps: Annotated[int, Field(ge=1, description="optimizer steps")] = 250,
    per_device_train_batch_size: Annotated[int, Field(ge=1, description="demonstrations in a micro-batch")] = 64,
    gradient_accumulation_steps: Annotated[
        int, Field(ge=1, description="a step is batch x accumulation x processes demonstrations")
    ] = 1,
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3,
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant",
    warmup_steps: Annotated[int, Field(ge=0)] = 20,
    weight_decay: Annotated[float, Field(ge=0)] = 0.0,
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9,
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95,
    max_grad_norm: Annotated[float, Field(ge=0, description="0: no clipping")] = 1.0,
    max_length: Annotated[int, Field(ge=2, description="tokens of prompt and completion; longer is an error")] = 256,
    packing: Annotated[
        Literal["auto", "packed", "padded"], Field(description="auto: packed on CUDA, padded on CPU")
    ] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16"], Field(description="of the computation; parameters stay float32")
    ] = "float32",
    attn_implementation: Annotated[
        str, Field(description="transformers' name; auto: FlashAttention 2 where it is installed, else sdpa")
    ] = "auto",
    save_dtype: Annotated[Literal["bfloat16", "float16", "float32"], Field(description="of model/")] = "bfloat16",
    save_steps: Annotated[int, Field(ge=0, description="a resume point each so many steps; 0: on SIGTERM only")] = 0,
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="auto: CUDA where there is some")] = "auto",
    expected_world_size: Annotated[
        int | None, Field(ge=1, description="refuse to train with another", json_schema_extra=UNTRACKED)
    ] = None,
    weights: Weights = None,
    seed: int = 0,
) -> Results:
    """Fine-tune on demonstrations: cross-entropy of the completion's tokens and its end of sequence.

    The loss is the mean over all target tokens of a step, whatever the micro-batches and processes. Demonstrations
    come in epochs, each in a random order that is a function of (seed, epoch): resuming must know the step alone.
    The optimizer starts fresh; parameters start from the checkpoint's float32 masters, where it has some.

    Raises:
        UserError: no demonstrations, a missing column, one that is longer than `max_length` or the model's context.
        Interrupted: after SIGTERM, once a resume point is committed.
    """
    from tuneloop.trainers.fsdp import Optimization, Trainer

    model = checkpoint.model_dir(policy)
    ranks = checkpoint.open_ranks(stage, device, expected_world_size)
    with stage.timed("data"):
        documents = read_demonstrations(prompts, model, max_length)
    with stage.timed("load"):
        trainer = Trainer(
            model,
            ranks,
            Optimization(
                learning_rate,
                lr_scheduler_type,
                warmup_steps,
                max_steps,
                weight_decay,
                adam_beta1,
                adam_beta2,
                max_grad_norm,
            ),
            dtype=dtype,
            attn_implementation=attn_implementation,
            packing=packing,
            max_length=max_length,
        )
        _check_fits(documents, trainer, prompts)
        checkpoint.load_masters(trainer, policy)
        _resume(stage, trainer)
    stage.facts.update(trainer.chosen(), optimizer="fresh")
    stage.log(f"{len(documents)} demonstrations, {trainer.chosen()}")
    batch = per_device_train_batch_size * gradient_accumulation_steps * ranks.world
    with stage.timed("train"):
        loss, tokens = _train(
            stage, trainer, list(documents.values()), batch, per_device_train_batch_size, max_steps, save_steps
        )
    stage.timings["tokens_per_s"] = tokens / stage.timings["train"] if tokens else 0.0
    version = checkpoint.write(stage, trainer, policy, save_dtype)
    return {"loss": loss, "version": version}


def _train(
    stage: Stage, trainer: Trainer, documents: list[Document], batch: int, limit: int, max_steps: int, save_steps: int
) -> tuple[float, int]:
    """Steps up to `max_steps`; the last loss, and the tokens that went through the model."""
    bar = stage.progress(max_steps, "steps")
    loss, seen = float("nan"), 0
    while trainer.step < max_steps:
        chosen = [documents[i] for i in draw(stage, len(documents), trainer.step * batch, batch)]
        loss, norm, rate = train_step(stage, trainer, chosen, limit)
        (stop,) = trainer.ranks.max([float(stage.stopping)])  # together, or one rank waits for another for ever
        targets = sum(document.target_count for document in chosen)
        stage.metric(trainer.step, loss=loss, grad_norm=norm, learning_rate=rate, targets=targets)
        seen += sum(len(document.ids) for document in chosen)
        bar.update(trainer.step, loss=loss)
        due = save_steps and trainer.step % save_steps == 0
        if (stop or due) and trainer.step < max_steps:
            stage.save_resume(trainer.step, lambda path: _write_resume(stage, trainer, path))
            stage.stopping = bool(stop)
            stage.check_stop()
    return loss, seen


def train_step(stage: Stage, trainer: Trainer, documents: Sequence[Document], limit: int) -> tuple[float, float, float]:
    """One optimizer step on `documents`, which every rank is given all of.

    Returns:
        Mean negative log-probability of a target, gradient norm before clipping, learning rate.
    """
    import torch

    torch.manual_seed(stage.seed("dropout", trainer.step, stage.rank))
    targets = sum(document.target_count for document in documents)
    total = 0.0
    for micro in trainer.plan(documents, limit):
        logprobs, _ = trainer.logprobs([documents[i] for i in micro])
        loss = -logprobs.sum() / targets
        loss.backward()
        total += float(loss.detach())
    norm, rate = trainer.update()
    return trainer.ranks.sum([total])[0], norm, rate


def draw(stage: Stage, count: int, start: int, batch: int) -> list[int]:
    """Places `start` … `start + batch - 1` of the endless stream of epochs over `count` demonstrations."""
    import torch

    chosen: list[int] = []
    while len(chosen) < batch:
        epoch, offset = divmod(start + len(chosen), count)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(stage.seed("order", epoch)))
        chosen += order[offset : offset + batch - len(chosen)].tolist()
    return chosen


def read_demonstrations(prompts: Artifact, model: Path, max_length: int) -> dict[str, Document]:
    """The demonstrations by id, tokenized; every completion token is a target.

    Raises:
        UserError: none, a missing column, or one longer than `max_length`.
    """
    from tuneloop.tokens import encode_completion, encode_prompt, load_tokenizer
    from tuneloop.trainers._batch import Document

    if "sft.parquet" not in prompts.manifest.files:
        raise UserError("--prompts", prompts.url, "holds no sft.parquet; give it what data_prep commits")
    table = pq.read_table(prompts.path / "sft.parquet")
    for column in ("id", "prompt", "chat", "completion"):
        if column not in table.column_names:
            raise UserError("--prompts", column, f"is no column of {prompts.url}/sft.parquet; make the data again")
    if not table.num_rows:
        raise UserError("--prompts", prompts.url, "holds no demonstrations; raise data_prep's sft, or leave sft out")
    tokenizer = load_tokenizer(model)
    documents = {}
    for row in table.to_pylist():
        prompt = encode_prompt(tokenizer, row["prompt"], row["chat"])
        completion = encode_completion(tokenizer, row["completion"])
        length = len(prompt) + len(completion)
        if length > max_length:
            field = "prompt" if len(prompt) >= max_length else "completion"
            raise UserError(
                f"{field} of {row['id']}",
                row[field][:60],
                f"{length} tokens in all, over max_length {max_length}; raise it",
            )
        documents[row["id"]] = Document(prompt + completion, [False] * len(prompt) + [True] * len(completion))
    return documents


def _check_fits(documents: dict[str, Document], trainer: Trainer, prompts: Artifact) -> None:
    for name, document in documents.items():
        if len(document.ids) > trainer.context:
            raise UserError(
                f"prompt of {name}",
                len(document.ids),
                f"tokens are over the model's context of {trainer.context}; drop it",
            )
        if max(document.ids) >= trainer.vocab_size:
            raise UserError(
                "--policy", max(document.ids), f"its tokenizer goes beyond its vocabulary of {trainer.vocab_size}"
            )


def _resume(stage: Stage, trainer: Trainer) -> None:
    """Go on from where an earlier attempt was interrupted.

    Raises:
        UserError: it had another number of processes, so its steps were of another size.
    """
    point = stage.latest_resume()
    if point is None:
        return
    about = checkpoint.trainer_state(point)
    assert about is not None
    if about["world_size"] != trainer.ranks.world:
        remedy = f"{about['world_size']} were at work before {stage.out_url}/resume; start as many, or delete it"
        raise UserError("processes", trainer.ranks.world, remedy)
    trainer.load(point.path / "trainer", about["step"])
    if stage.leader:
        (stage.out / "metrics.jsonl").write_bytes((point.path / "metrics.jsonl").read_bytes())
    stage.facts["resumed_from"] = about["step"]
    stage.log(f"resumed after step {about['step']}")


def _write_resume(stage: Stage, trainer: Trainer, path: Path) -> None:
    trainer.save(path / "trainer")
    if stage.leader:
        about: dict[str, Any] = {"step": trainer.step, "world_size": trainer.ranks.world}
        (path / "trainer" / "state.json").write_text(canonical(about))
        (path / "metrics.jsonl").write_bytes((stage.out / "metrics.jsonl").read_bytes())


if __name__ == "__main__":
    sft.main()
