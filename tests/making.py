"""Small models and artifacts, made where a test needs them, in the formats of docs/stages.md."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.waiting import until
from tuneloop.core import fencing
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.formats.canary import write_canary
from tuneloop.sharing.lease_storage import open_lease_group

CHARACTERS = [*"0123456789abcdefghijklmnopqrstuvwxyz", " ", "="]


def tiny_model(
    directory: Path,
    arch: str = "qwen3",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    tie: bool = True,
) -> Path:
    """A decoder of two layers, 32 wide, with a tokenizer of one token a character; returns `directory`."""
    kind = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[
        arch
    ]
    vocabulary = {text: i for i, text in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=64,
    )
    torch.manual_seed(seed)
    config = kind[0](
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.3,
    )
    kind[1](config).to(dtype).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def commit(url: Path | str, stage: str, files: Path | None = None, **facts: Any) -> Artifact:
    """Commit a draft whose files `files` holds (None: they lie in the draft already)."""
    draft = Draft(str(url), attempt="data-test")
    if files is not None:
        for path in files.iterdir():
            path.rename(draft.path / path.name)
    draft.commit(stage=stage, facts=facts)
    return Artifact(str(url))


@contextlib.contextmanager
def lease_of(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Artifact, Path], None]]:
    """A device lease for what computes in the block; what is given asserts that it was released in time.

    That is, after the last step (its metrics), and before any weights of the checkpoint, its canary, its manifest and
    the `weights` that were published were written.
    """
    turns, file = open_lease_group(f"{directory}/group", who="a"), directory / "lease.json"
    monkeypatch.setenv(fencing.VARIABLE, str(file))

    def check(made: Artifact, weights: Path) -> None:
        until(lambda: turns.read().is_idle)
        at = file.with_suffix(".released").stat().st_mtime_ns
        committed = [
            made.path.parent / "manifest.json",
            made.path / "canary.json",
            *made.path.rglob("*.safetensors"),
        ]
        published = [path for path in weights.rglob("*") if path.is_file()]
        assert len(committed) > 2 and published
        assert (made.path / "metrics.jsonl").stat().st_mtime_ns <= at
        assert all(at <= path.stat().st_mtime_ns for path in [*committed, *published])

    with turns.acquire(file=file):
        yield check


def checkpoint_artifact(
    url: Path | str, arch: str = "qwen3", *, version: int = 0, **model: Any
) -> Artifact:
    """What `base_model` commits, with a tiny model."""
    draft = Draft(str(url), attempt="data-test")
    tiny_model(draft.path / "model", arch, **model)
    opened = (Qwen3ForCausalLM if arch == "qwen3" else LlamaForCausalLM).from_pretrained(
        draft.path / "model"
    )
    write_canary(opened, draft.path / "canary.json")
    return commit(url, "base_model", version=version)


def demonstrations(count: int = 24, seed: int = 0) -> list[dict[str, Any]]:
    """Numbers of one to eight digits to repeat."""
    rng = random.Random(seed)
    texts = [str(rng.randrange(10 ** rng.randint(1, 8))) for _ in range(count)]
    return [
        {"id": f"sft-{i:04d}", "prompt": f"say {t} =", "chat": False, "completion": f" {t}"}
        for i, t in enumerate(texts)
    ]


def prompts_artifact(url: Path | str, sft: Sequence[dict[str, Any]] | None = None) -> Artifact:
    """What `data_prep` commits; `sft` are the demonstrations."""
    rows = demonstrations() if sft is None else list(sft)
    draft = Draft(str(url), attempt="data-test")
    questions = [
        {
            "id": f"train-{i:04d}",
            "prompt": row["prompt"],
            "chat": row["chat"],
            "answer": row["prompt"].split()[1],
            "reward": json.dumps({"exact": 1.0}),
            "metadata": "{}",
        }
        for i, row in enumerate(demonstrations(8, seed=1))
    ]
    for name in ("train", "eval"):
        pq.write_table(pa.Table.from_pylist(questions), draft.path / f"{name}.parquet")
    schema = pa.schema(
        [("id", "string"), ("prompt", "string"), ("chat", "bool"), ("completion", "string")]
    )
    pq.write_table(pa.Table.from_pylist(rows, None if rows else schema), draft.path / "sft.parquet")
    return commit(url, "data_prep")


def rollout_rows(
    policy: Artifact,
    groups: int = 4,
    n: int = 4,
    *,
    seed: int = 0,
    vocab_size: int = 41,
    gap: float = 0.0,
) -> list[dict[str, Any]]:
    """Random completions of random prompts, scored at random, with the log-probabilities of the policy's model.

    `gap` is the standard deviation of noise on these: an engine that disagrees with the trainer.
    """
    rng = random.Random(seed)
    model = _model(policy)
    rows = []
    for g in range(groups):
        prompt = [rng.randrange(3, vocab_size) for _ in range(rng.randint(2, 9))]
        for s in range(n):
            completion = [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 7))]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].float()
            picked = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(
                1, torch.tensor(completion)[:, None]
            )[:, 0]
            version = policy.manifest.facts["version"]
            rows.append(
                {
                    "request_id": f"i000000-p{g:05d}-s{s:02d}",
                    "group": f"p{g:05d}",
                    "id": f"train-{g:04d}",
                    "prompt_ids": prompt,
                    "completion_ids": completion,
                    "logprobs": [float(v) + rng.gauss(0, gap) for v in picked],
                    "loss_mask": [True] * len(completion),
                    "policy_versions": [version] * len(completion),
                    "finish_reason": "stop",
                    "prompt": "",
                    "completion": "",
                    "answer": "",
                    "reward_spec": json.dumps({"exact": 1.0}),
                    "metadata": "{}",
                    "outcome": "score",
                    "score": float(rng.random() < 0.5),
                    "breakdown": "{}",
                }
            )
    return rows


def rewards_artifact(
    url: Path | str, policy: Artifact, rows: Sequence[dict[str, Any]] | None = None, **facts: Any
) -> Artifact:
    """What `reward` commits, sampled by `policy` unless `facts` say otherwise."""
    rows = rollout_rows(policy) if rows is None else rows
    ints = pa.list_(pa.int32())
    types = {"prompt_ids": ints, "completion_ids": ints, "policy_versions": ints}
    types |= {
        "logprobs": pa.list_(pa.float32()),
        "loss_mask": pa.list_(pa.bool_()),
        "score": pa.float32(),
    }
    columns = list(rows[0]) if rows else list(rollout_rows(policy, 1, 1)[0])
    schema = pa.schema([(name, types.get(name, pa.string())) for name in columns])
    draft = Draft(str(url), attempt="data-test")
    pq.write_table(pa.Table.from_pylist(list(rows), schema), draft.path / "rewards.parquet")
    said = {"version": policy.manifest.facts["version"], "digest": policy.manifest.digest}
    return commit(
        url, "reward", **{**said, "engine": "test", "sampling": {"temperature": 1.0}, **facts}
    )


def _model(policy: Artifact) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy.path / "model", dtype=torch.float32)


def sigterm_while_training(out: Path) -> None:
    """Send this process SIGTERM when the stage that will write to `out` has taken a step, before it takes the next."""
    armed = [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if (
            armed
            and event == "open"
            and re.fullmatch(rf"{out}/data-[^/]*/metrics\.jsonl", str(arguments[0]))
        ):
            armed.clear()
            os.kill(os.getpid(), signal.SIGTERM)

    sys.addaudithook(hook)  # which can not be taken away again
