"""The canary: a fixed token sequence whose log-probabilities tell one set of weights from another.

Whoever writes weights computes it (`canary_logprobs`); whoever serves them must answer with the same numbers within a
tolerance before a batch counts. The ids are derived from the vocabulary size alone, so both sides can name them. A
training step moves these numbers by less than the tolerance, so a checkpoint's canary also has those of the version
before: an engine must be nearer to its own version than to that one (`tell_versions_apart`)."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuneloop.core.processor import check_processor
from tuneloop.core.seeds import derive_seed

LENGTH = 24
SEPARATED = 8.0
"""Answers tell two versions apart that differ by this many standard deviations of an engine's noise: four each side."""
RESOLUTION = 1e-6
"""The least noise assumed of any engine, in nats: float32 log-probabilities differ this much between kernels."""


def canary_ids(vocab_size: int, length: int = LENGTH) -> list[int]:
    """Derive `length` token ids, spread over a vocabulary of `vocab_size` by SHA-256.

    >>> canary_ids(512, 4) == canary_ids(512, 4)
    True
    """
    return [
        derive_seed(0, "canary", vocab_size, position) % vocab_size for position in range(length)
    ]


def canary_logprobs(model: Any, ids: list[int]) -> list[float]:
    """Compute the natural log-probability, at temperature 1, of each of `ids` (at least two) but the first, given those
    before it: ``len(ids) - 1`` floats, in float32 from the logits of `model`. This is a causal language model of
    transformers; it is evaluated in its own dtype, and left in its own mode."""
    import torch

    device = next(model.parameters()).device
    if (
        device.type == "cpu"
    ):  # also where a GPU trains: what is written is computed anew, in its own dtype
        check_processor()
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            tokens = torch.tensor([ids], device=device)
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
            chosen = torch.log_softmax(logits, dim=-1).gather(1, tokens[0, 1:, None])
    finally:
        model.train(training)
    return [float(value) for value in chosen[:, 0].cpu()]


def tell_versions_apart(
    answers: Sequence[float], now: Sequence[float], before: Sequence[float]
) -> dict[str, float]:
    """Measure which of two versions an engine's log-probabilities (`answers`) belong to: the one that is claimed, or
    the one before, for which the trainer computed `now` and `before`.

    The engine's noise is taken as Gaussian and equal at all positions. Its standard deviation is estimated from the
    answers' distance to the line between the two versions' numbers; only their position along the line decides. This is
    the discriminant of R. A. Fisher, "The use of multiple measurements in taxonomic problems" (1936).

    Returns the ``separation`` of the versions in standard deviations of the noise, 0 where they are the same, and the
    ``log_likelihood_ratio`` (nats) of `now` against `before`: positive where `now` is nearer."""
    step = [a - b for a, b in zip(now, before, strict=True)]
    if not (length := math.hypot(*step)):
        return {"separation": 0.0, "log_likelihood_ratio": 0.0}
    moved = [a - b for a, b in zip(answers, before, strict=True)]
    position = (
        sum(m * s for m, s in zip(moved, step)) / length**2
    )  # 0: the version before, 1: the one that is claimed
    across = math.hypot(*(m - position * s for m, s in zip(moved, step)))
    separation = length / max(across / math.sqrt(len(step) - 1), RESOLUTION)
    return {"separation": separation, "log_likelihood_ratio": (position - 0.5) * separation**2}


def write_canary(model: Any, path: Path, vocab_size: int | None = None) -> None:
    """Write ``canary.json`` for `model`: ``{"ids": [...], "logprobs": [...]}``, ids below `vocab_size` (default: the
    model's). The model is loaded from the files that are served: neither the trainer's float32 masters, nor a model
    cast by ``.to(dtype)``, which rounds the rotary frequencies, too (0.004 in log-probability on the tiny model)."""
    ids = canary_ids(vocab_size or model.config.vocab_size)
    path.write_text(json.dumps({"ids": ids, "logprobs": canary_logprobs(model, ids)}))
