"""The canary: a fixed token sequence whose log-probabilities tell one set of weights from another.

Whoever writes weights computes it (`canary_logprobs`); whoever serves them must answer with the same numbers within
a tolerance before a batch counts. The ids are derived from the vocabulary size alone, so both sides can name them.
"""

import json
from pathlib import Path
from typing import Any

from tuneloop.core.processor import check_processor
from tuneloop.core.seeds import derive_seed

LENGTH = 24


def canary_ids(vocab_size: int, length: int = LENGTH) -> list[int]:
    """Derive `length` token ids, spread over a vocabulary of `vocab_size` by SHA-256.

    >>> canary_ids(512, 4) == canary_ids(512, 4)
    True
    """
    return [derive_seed(0, "canary", vocab_size, position) % vocab_size for position in range(length)]


def canary_logprobs(model: Any, ids: list[int]) -> list[float]:
    """Compute the natural log-probability, at temperature 1, of each id but the first given those before it.

    Args:
        model: a causal language model of transformers; it is evaluated in its own dtype and left in its own mode.
        ids: at least two token ids.

    Returns:
        ``len(ids) - 1`` floats, computed in float32 from the model's logits.
    """
    import torch

    device = next(model.parameters()).device
    if device.type == "cpu":  # also where a GPU trains: what is written is computed anew, in its own dtype
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


def write_canary(model: Any, path: Path, vocab_size: int | None = None) -> None:
    """Write ``canary.json`` for `model`: ``{"ids": [...], "logprobs": [...]}``.

    Args:
        model: loaded from the files that are served. Not the trainer's float32 masters, and not a model cast by
            ``.to(dtype)`` either: that rounds the rotary frequencies, too (0.004 in log-probability on the tiny model).
        path: the file.
        vocab_size: ids stay below it; default: the model's configuration.
    """
    ids = canary_ids(vocab_size or model.config.vocab_size)
    path.write_text(json.dumps({"ids": ids, "logprobs": canary_logprobs(model, ids)}))
