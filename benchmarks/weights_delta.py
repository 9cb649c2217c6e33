"""Weight versions beside the two ways in use: all of it with safetensors, and XOR under zstd-1 (slime, miles, NeMo-RL).

    python benchmarks/weights_delta.py [--megabytes 128] [--lr 1e-6] [--steps 4] [--repeats 3] [--directory DIR]

A bf16 copy of a random model (normal, std 0.02, 16 equal tensors) is published before and after AdamW steps (0.9/0.95,
no decay, fresh normal gradients) on its float32 masters. Everything is measured in this process, alternating, and the
median is printed with the spread; GB/s are of dense bf16 bytes. Use ``--megabytes 1024`` for the size of the issue.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import xxhash
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from tuneloop.weights import delta, materialize, publish
from tuneloop.weights.layout import Checkpoint

TENSORS = 16


def last_step(size: int, lr: float, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One tensor of `size` elements in bf16, before and after the last of `steps` AdamW steps."""
    master = torch.randn(size) * 0.02
    first, second, before = torch.zeros_like(master), torch.zeros_like(master), master.to(torch.bfloat16)
    for step in range(1, steps + 1):
        before = master.to(torch.bfloat16)
        gradient = torch.randn_like(master)
        first.mul_(0.9).add_(gradient, alpha=0.1)
        second.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
        scale = (second / (1 - 0.95**step)).sqrt_().add_(1e-8)
        master.addcdiv_(first, scale, value=-lr / (1 - 0.9**step))
    return before, master.to(torch.bfloat16)


def exports(place: Path, size: int, lr: float, steps: int) -> tuple[Path, Path]:
    """Two model directories, one optimizer step apart."""
    made = [last_step(size // 2 // TENSORS, lr, steps) for _ in range(TENSORS)]
    for which, name in enumerate(("old", "new")):
        (place / name).mkdir()
        save_file({f"layer.{i}": both[which] for i, both in enumerate(made)}, place / name / "model.safetensors")
    return place / "old", place / "new"


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", help="where to write; the temporary directory otherwise")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        bench(Path(scratch), options.megabytes << 20, options.lr, options.steps, options.repeats)


def bench(place: Path, size: int, lr: float, steps: int, repeats: int) -> None:
    old, new = exports(place, size, lr, steps)
    loaded = load_file(new / "model.safetensors")
    times: dict[str, list[float]] = {}
    sizes = {"safetensors save + fsync": size, "safetensors load": size, "memcpy": size}

    def note(name: str, work: Callable[[], object]) -> None:
        times.setdefault(name, []).append(timed(work))

    a, b = Checkpoint(old), Checkpoint(new)
    threads = delta.thread_count()
    source = np.memmap(new / "model.safetensors", np.uint8, "r").view(np.ndarray)
    target = np.zeros_like(source)
    density = 0.0
    for repeat in range(repeats):
        root = f"file://{place}/root{repeat}"
        publish(root, 0, old)

        def save() -> None:
            save_file(loaded, place / "saved")
            fsync(place / "saved")

        note("memcpy", lambda: np.copyto(target, source))
        note("safetensors save + fsync", save)
        note("safetensors load", lambda: [t.clone() for t in load_file(place / "saved").values()])
        for encoding in ("xor", "gap8-xor"):
            path = place / "delta.safetensors"
            name = "XOR + zstd-1" if encoding == "xor" else "gap8-xor"
            written: list[delta.Written] = []
            note(f"{name}: encode", lambda: written.append(delta.write(a, b, path, encoding, 1 << 62, threads)))  # noqa: B023
            done = written[0]
            density = done.changed / done.elements
            sizes[f"{name}: encode"] = sizes[f"{name}: apply + verify"] = done.size
            shutil.rmtree(place / "copy", ignore_errors=True)
            shutil.copytree(old, place / "copy")
            opened = delta.DeltaFile(path, encoding, done.names, done.new)
            model = Checkpoint(place / "copy")
            note(f"{name}: apply + verify", lambda: delta.patch(model, [opened], done.new, threads))  # noqa: B023
            for tensor, checksum in done.new.items():
                assert xxhash.xxh3_128_hexdigest(model.view(tensor).data) == checksum
        materialize(root, 0, place / f"replica{repeat}")
        note("publish (encode, write, fsync, pointer)", lambda: publish(root, 1, new, base=old))  # noqa: B023
        note("materialize in place", lambda: materialize(root, 1, place / f"replica{repeat}"))  # noqa: B023
        note("materialize from nothing", lambda: materialize(root, 0, place / f"fresh{repeat}"))  # noqa: B023
        for left in (f"root{repeat}", f"replica{repeat}", f"fresh{repeat}"):
            shutil.rmtree(place / left)
    title = f"{size >> 20} MiB of bf16, AdamW at {lr:g}, step {steps}: {density:.2%} changed; {threads} threads"
    table = Table("what", "bytes", "share", "seconds (min-max)", "GB/s", title=title)
    for name, seconds in times.items():
        count, middle = sizes.get(name), statistics.median(seconds)
        spread = f"{middle:.3f} ({min(seconds):.3f}-{max(seconds):.3f})"
        bytes_, share = (f"{count:,}", f"{count / size:.2%}") if count else ("", "")
        table.add_row(name, bytes_, share, spread, f"{size / 1e9 / middle:.2f}")
    Console(width=120).print(table)
    ours, theirs = sizes["gap8-xor: encode"], sizes["XOR + zstd-1: encode"]
    Console(width=120).print(f"bytes: 1/{size / ours:.0f} of full, {ours / theirs:.2f} of XOR + zstd-1")


if __name__ == "__main__":
    main()
