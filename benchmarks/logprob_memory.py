"""Peak memory and time of log-probabilities with gradient at a vocabulary of 32768, beside TRL's own function.

One process each, the same Qwen3: two small layers under a wide head, so that logits weigh.
    python benchmarks/logprob_memory.py
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROWS, LENGTH, VOCABULARY = 8, 512, 32768


def make(directory: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    config = Qwen3Config(
        vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=2, **shape
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


def measure(which: str, directory: Path) -> dict[str, float]:
    """Seconds of a forward and backward pass, and what the process's peak rose by in bytes."""
    import torch

    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    if which == "tuneloop":
        from tuneloop.formats.token_files import Document
        from tuneloop.training.fsdp.policy import Policy
        from tuneloop.training.fsdp.ranks import Ranks

        policy = Policy(directory, Ranks("cpu"))
        model = policy.model
        documents = [Document(row, [False] + [True] * (LENGTH - 1)) for row in ids.tolist()]

        def forward() -> torch.Tensor:
            return policy.logprobs(documents)[0]
    else:
        from transformers import AutoModelForCausalLM
        from trl.trainer.utils import entropy_from_logits, selective_log_softmax

        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

        def forward() -> torch.Tensor:  # as GRPOTrainer._get_per_token_logps_and_entropies
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            with torch.no_grad():
                entropy_from_logits(logits)
            return selective_log_softmax(logits, ids[:, 1:])

    before, start = peak(), time.perf_counter()
    loss = -forward().mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    seconds = time.perf_counter() - start
    return {
        "loss": float(loss.detach()),
        "norm": float(norm),
        "s": seconds,
        "MiB": (peak() - before) / 2**20,
    }


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
        return
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        print(f"{ROWS} x {LENGTH} tokens, vocabulary {VOCABULARY}, float32: forward and backward")
        print(f"{'':10} {'loss':>9} {'grad norm':>10} {'seconds':>8} {'peak MiB':>9}")
        for which in ("trl", "tuneloop"):
            command = [sys.executable, __file__, which, folder]
            said = subprocess.run(
                command, check=True, capture_output=True, text=True
            ).stdout.splitlines()[-1]
            found = json.loads(said)
            row = f"{which:10} {found['loss']:9.5f} {found['norm']:10.6f}"
            print(f"{row} {found['s']:8.2f} {found['MiB']:9.0f}", flush=True)


if __name__ == "__main__":
    main()
