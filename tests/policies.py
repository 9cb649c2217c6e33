"""Policies and prompts made on the spot, for tests of what generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils.logging import disable_progress_bar

from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.data.tables import DEMONSTRATIONS, PROMPTS
from tuneloop.formats.canary import write_canary
from tuneloop.formats.carried import pass_carried
from tuneloop.stages.base_model import train_tokenizer

disable_progress_bar()
TEXTS = [f"reverse {i} =" for i in range(1000, 1200)]
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's CPU attention wants a multiple of 32
}


def tokenizer(context: int = 1024) -> Any:
    """A byte-level BPE for prompts like those of `commit_prompts`."""
    return train_tokenizer(iter(TEXTS), 512, context)


def model(
    seed: int = 0, *, tied: bool = True, family: type[Any] = Qwen3Config, context: int = 1024
) -> Any:
    """A random decoder with matrices four times the usual, so that its distributions have peaks."""
    words = tokenizer()
    config = family(
        **SHAPE,
        vocab_size=len(words),
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return made.to(torch.bfloat16).eval()


def commit_policy(
    url: Path,
    version: int = 0,
    *,
    canary_of: Any = None,
    rewards: Artifact | None = None,
    **about: Any,
) -> Artifact:
    """A checkpoint of `model(version, **about)`; with the canary of another model, and the groups that rewards carry,
    where these are given."""
    draft = Draft(str(url))
    made = model(version, **about)
    made.save_pretrained(draft.path / "model")
    tokenizer(made.config.max_position_embeddings).save_pretrained(draft.path / "model")
    write_canary(canary_of or made, draft.path / "canary.json")
    if rewards:
        pass_carried(rewards, draft.path)
    draft.commit(stage="sft", facts={"version": version})
    return Artifact(str(url))


def commit_prompts(
    url: Path, prompts: list[str], *, chat: bool = False, reward: str = '{"exact": 1.0}'
) -> Artifact:
    """The same prompts to train on and to evaluate; the answer is the prompt itself."""
    draft = Draft(str(url))
    rows = [
        {
            "id": f"p{i}",
            "prompt": text,
            "chat": chat,
            "answer": text,
            "reward": reward,
            "metadata": "{}",
        }
        for i, text in enumerate(prompts)
    ]
    for name in ("train", "eval"):
        pq.write_table(pa.Table.from_pylist(rows, schema=PROMPTS), draft.path / f"{name}.parquet")
    pq.write_table(pa.Table.from_pylist([], schema=DEMONSTRATIONS), draft.path / "sft.parquet")
    draft.commit(stage="data_prep")
    return Artifact(str(url))
