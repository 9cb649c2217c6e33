"""Weight versions beside what is in use: all of it with safetensors or under zstd-1; XOR under zstd-1 (slime, miles).

    python benchmarks/weights_delta.py [--megabytes 1024] [--lr 1e-6] [--steps 4] [--repeats 5] [--directory DIR]

A bf16 copy of a random model (normal, std 0.02, shapes of Qwen2.5-0.5B, as many layers as the size holds) is written
before and after the last of `steps` steps of torch's AdamW (0.9/0.95, no decay, fresh normal gradients everywhere) on
float32 masters. Everything is measured in this process, in turns; the best turn, and the slowest beside it. GB/s are of
dense bf16 bytes, of the wall; `cpu s` is the time of all threads, also of the best turn, which other processes on the
machine change less. What is compared are best turns.

Lines with `RAM` work on arrays in memory, as many threads as there are CPUs, and compare with memcpy; all other lines
read and write files. Needs 6 times the size in memory, as much on disk.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from tuneloop.core.threads import map_ahead
from tuneloop.weights import codec, delta
from tuneloop.weights.layout import Bytes, Checkpoint, build_blame
from tuneloop.weights.materialize import materialize_version
from tuneloop.weights.publish import publish_version

HIDDEN, INNER, VOCABULARY, KEYS = 896, 4864, 151_936, 128


def shapes(size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of about `size` bytes of bf16: a quarter is the embedding, the rest are layers."""
    yield "model.embed_tokens.weight", (min(VOCABULARY, max(1, size // 8 // HIDDEN)), HIDDEN)
    layer = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KEYS, HIDDEN),
        "self_attn.v_proj": (KEYS, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    for i in range(max(1, round(size * 3 / 4 / 2 / sum(int(np.prod(s)) for s in layer.values())))):
        yield from ((f"model.layers.{i}.{name}.weight", shape) for name, shape in layer.items())


def last_step(shape: tuple[int, ...], lr: float, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor in bf16 before and after the last of `steps` AdamW steps."""
    master = torch.nn.Parameter(torch.randn(shape) * 0.02)
    optimizer = torch.optim.AdamW([master], lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for _ in range(steps):
        before = master.detach().to(torch.bfloat16)
        master.grad = torch.randn(shape)
        optimizer.step()
    return before, master.detach().to(torch.bfloat16)


def exports(place: Path, size: int, lr: float, steps: int) -> tuple[Path, Path]:
    """Two model directories, one optimizer step apart."""
    made = {name: last_step(shape, lr, steps) for name, shape in shapes(size)}
    for which, name in enumerate(("old", "new")):
        (place / name).mkdir()
        save_file({n: both[which] for n, both in made.items()}, place / name / "model.safetensors")
    return place / "old", place / "new"


class Clock:
    """Seconds of the wall and of all CPUs, by name; bytes, where something was written or read."""

    def __init__(self) -> None:
        self.times: dict[str, list[tuple[float, float]]] = {}
        self.sizes: dict[str, int] = {}

    def __call__(self, name: str, work: Callable[[], object], size: int | None = None) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        self.times.setdefault(name, []).append(
            (time.perf_counter() - wall, time.process_time() - cpu)
        )
        if size is not None:
            self.sizes[name] = size

    def table(self, title: str, size: int) -> Table:
        table = Table("what", "bytes", "share", "seconds (slowest)", "GB/s", "cpu s", title=title)
        for name, taken in self.times.items():
            walls, cpus = zip(*taken)
            count = self.sizes.get(name)
            bytes_, share = (f"{count:,}", f"{count / size:.2%}") if count else ("", "")
            spread = f"{min(walls):.3f} ({max(walls):.3f})"
            table.add_row(
                name, bytes_, share, spread, f"{size / 1e9 / min(walls):.2f}", f"{min(cpus):.3f}"
            )
        return table

    def ratio(self, a: str, b: str) -> str:
        """Speed of `a` in that of `b`: the best turn of each, by the wall and by CPU time."""
        wall, cpu = (
            min(turn[i] for turn in self.times[b]) / min(turn[i] for turn in self.times[a])
            for i in (0, 1)
        )
        return f"{wall:.2f} (cpu {cpu:.2f})"


ENCODINGS: tuple[codec.Encoding, ...] = ("xor", "gap8-xor")


class Memory:
    """The codec alone, beside memcpy: arrays in, bytes out, and back, hashed and proved."""

    def __init__(self, clock: Clock, old: Checkpoint, new: Checkpoint) -> None:
        self.clock = clock
        self.old, self.new, self.held = (
            {n: side.view(n).copy() for n in side.tensors} for side in (old, new, old)
        )
        self.digests = [
            {n: self.digest(data) for n, data in side.items()} for side in (self.new, self.old)
        ]

    def every(self, work: Callable[[str], Any]) -> dict[str, Any]:
        return dict(zip(self.old, map_ahead(work, self.old, delta.count_threads()), strict=True))

    @staticmethod
    def digest(data: Bytes) -> str:
        return xxhash.xxh3_128_hexdigest(data.data)

    def turn(self) -> None:
        self.clock(
            "RAM: memcpy", lambda: self.every(lambda n: np.copyto(self.held[n], self.old[n]))
        )
        self.clock("RAM: xxh3-128 of both", lambda: self.every(self.parts))
        self.clock(
            "RAM: that, and finding what changed",
            lambda: self.every(lambda n: self.parts(n, find=True)),
        )
        for encoding in ENCODINGS:
            self.there_and_back(encoding)

    def parts(self, name: str, find: bool = False) -> None:
        """What no encoding is spared, in blocks of `codec.encode_delta`: the rest of it is gaps, planes and zstd."""
        before, after, size = xxhash.xxh3_128(), xxhash.xxh3_128(), codec.BLOCK
        for start in range(0, len(self.old[name]), size):
            a, b = (side[name][start : start + size] for side in (self.old, self.new))
            before.update(a.data)
            after.update(b.data)
            if find:
                codec.find_changed_elements(a, b, 2)

    def there_and_back(self, encoding: codec.Encoding) -> None:
        made: dict[str, codec.Delta] = {}

        def encode(name: str) -> None:
            made[name] = codec.encode_delta(self.old[name], self.new[name], 2, encoding)

        self.clock(f"RAM: {encoding} encode", lambda: self.every(encode))
        payloads = {n: np.frombuffer(d.payload, np.uint8) for n, d in made.items() if d.payload}

        def apply(name: str, state: dict[str, str]) -> None:
            held = self.held[name]
            found = (
                codec.apply_delta(held, held, payloads[name], 2, encoding)
                if name in payloads
                else self.digest(held)
            )
            assert found == state[name]

        for state in self.digests:  # XOR undoes itself
            label = f"RAM: {encoding} apply + verify"
            self.clock(label, lambda: self.every(lambda n: apply(n, state)))  # noqa: B023

    def zstd(self) -> None:
        """All of it, once: slow, and of interest for its bytes."""

        def compress(name: str) -> None:
            sizes.append(len(zstandard.ZstdCompressor(level=1).compress(self.new[name].data)))

        sizes: list[int] = []
        self.clock("RAM: all under zstd-1", lambda: self.every(compress))
        self.clock.sizes["RAM: all under zstd-1"] = sum(sizes)


class Files:
    """From files to files, and the whole way through a store."""

    def __init__(self, clock: Clock, place: Path) -> None:
        self.clock, self.place = clock, place
        self.old, self.new = Checkpoint(place / "old"), Checkpoint(place / "new")
        self.loaded = load_file(place / "new" / "model.safetensors")

    def turn(self) -> float:
        """Returns the share of elements that changed."""
        self.clock("safetensors save + fsync", self.save, self.new.size)
        self.clock("safetensors load", self.load, self.new.size)
        density = [self.there(encoding) for encoding in ENCODINGS]
        self.through_a_store()
        return density[0]

    def save(self) -> None:
        save_file(self.loaded, self.place / "saved")
        with (self.place / "saved").open("rb") as file:
            os.fsync(file.fileno())

    def load(self) -> None:
        for tensor in load_file(self.place / "saved").values():
            tensor.clone()

    def there(self, encoding: codec.Encoding) -> float:
        path, written = self.place / "delta.safetensors", list[delta.Written]()

        def encode() -> None:
            written.append(delta.write_delta(self.old, self.new, path, encoding, 1 << 62))

        self.clock(f"{encoding} encode", encode)
        (done,) = written
        shutil.copytree(self.old.directory, self.place / "copy")
        opened, model = (
            delta.DeltaFile(path, encoding, done.names, done.new, build_blame(path)),
            Checkpoint(self.place / "copy"),
        )
        self.clock(
            f"{encoding} apply + verify", lambda: delta.patch_checkpoint(model, [opened], done.new)
        )
        self.clock.sizes |= {
            f"{encoding} encode": done.size,
            f"{encoding} apply + verify": done.size,
        }
        shutil.rmtree(self.place / "copy")
        return done.changed / done.elements

    def through_a_store(self) -> None:
        root, replica, old, new = (
            f"file://{self.place}/root",
            self.place / "replica",
            self.place / "old",
            self.place / "new",
        )
        publish_version(root, 0, old)
        materialize_version(root, 0, replica)
        self.clock(
            "publish (encode, write, fsync, pointer)",
            lambda: publish_version(root, 1, new, base=old),
        )
        self.clock("materialize in place", lambda: materialize_version(root, 1, replica))
        shutil.rmtree(replica)
        self.clock("materialize from nothing", lambda: materialize_version(root, 1, replica))
        assert filecmp.cmp(replica / "model.safetensors", new / "model.safetensors", shallow=False)
        shutil.rmtree(replica)
        shutil.rmtree(self.place / "root")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", help="where to write; the temporary directory otherwise")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        place, clock = Path(scratch), Clock()
        old, new = map(
            Checkpoint, exports(place, options.megabytes << 20, options.lr, options.steps)
        )
        memory = Memory(clock, old, new)
        for _ in range(options.repeats):
            memory.turn()
        memory.zstd()
        del memory
        files = Files(clock, place)
        for _ in range(options.repeats):
            density = files.turn()
    steps = f"AdamW at {options.lr:g}, step {options.steps}: {density:.2%} changed; load {os.getloadavg()[0]:.0f}"
    out = Console(width=120)
    out.print(
        clock.table(
            f"{new.size / 1e6:.0f} MB of bf16, {steps}; {delta.count_threads()} threads", new.size
        )
    )
    ours, theirs = clock.sizes["gap8-xor encode"], clock.sizes["xor encode"]
    zstd = clock.sizes["RAM: all under zstd-1"]
    out.print(
        f"bytes: 1/{new.size / ours:.0f} of full, 1/{zstd / ours:.0f} of zstd-1, {ours / theirs:.2f} of xor"
    )
    for what in ("xxh3-128 of both", "that, and finding what changed"):
        out.print(f"{what}: {clock.ratio(f'RAM: {what}', 'RAM: memcpy')} of memcpy's speed")
    for what in ("encode", "apply + verify"):
        mine, xor = f"RAM: gap8-xor {what}", f"RAM: xor {what}"
        out.print(
            f"{what} in memory: {clock.ratio(mine, 'RAM: memcpy')} of memcpy's speed, {clock.ratio(mine, xor)} of xor's"
        )
    published = clock.ratio("publish (encode, write, fsync, pointer)", "safetensors save + fsync")
    pulled = clock.ratio("materialize in place", "safetensors load")
    out.print(
        f"publish: {published} of the speed of save + fsync; materialize in place: {pulled} of load's"
    )


if __name__ == "__main__":
    main()
