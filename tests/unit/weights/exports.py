"""Model directories for the tests: every dtype and shape that is awkward, and updates of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tuneloop.core.store import Store

Model = dict[str, tuple[str, tuple[int, ...], bytearray]]
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "I8": 1, "BOOL": 1}


class Crash(Exception):
    """Stands for a SIGKILL: nothing catches it."""


class Crashing(Store):
    """A real store that dies before its n-th operation, or in the middle of it where that can leave something."""

    def __init__(self, url: str, at: int) -> None:
        super().__init__(url)
        self.left = at

    def _step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Crash

    def put(self, key: str, data: bytes) -> None:
        self._step()
        super().put(key, data)

    def create(self, key: str, data: bytes) -> None:
        self._step()
        super().create(key, data)

    def swap(self, key: str, expected: bytes | None, data: bytes) -> None:
        self._step()
        super().swap(key, expected, data)

    def upload(self, key: str, path: Path) -> None:
        try:
            self._step()
        except Crash:
            super().put(f"{key}.part", path.read_bytes()[: path.stat().st_size // 2])
            raise
        super().upload(key, path)

    def download(self, key: str, path: Path) -> None:
        self._step()
        super().download(key, path)

    def delete(self, prefix: str) -> None:
        self._step()
        super().delete(prefix)


def model(rng: np.random.Generator, *, tied: bool = True) -> Model:
    """Two-matrix model with scalars, empty tensors, odd sizes; NaN, infinities and both zeros in every float tensor."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "embed": ("BF16", (61, 33)),
        "layer.0.weight": ("BF16", (33, 33)),
        "layer.0.scale": ("F32", (33,)),
        "layer.0.half": ("F16", (7, 3)),
        "step": ("I64", ()),
        "mask": ("BOOL", (5,)),
        "quantized": ("I8", (19,)),
        "empty": ("F32", (0, 4)),
    }
    if not tied:
        shapes["lm_head"] = ("BF16", (61, 33))
    made: Model = {}
    for name, (dtype, shape) in shapes.items():
        count = int(np.prod(shape, dtype=int))
        data = bytearray(
            rng.integers(0, 2 if dtype == "BOOL" else 256, count * SIZES[dtype], np.uint8).tobytes()
        )
        special = {
            "BF16": ("<H", (0x8000, 0x0000, 0x7FC1, 0x7F80)),
            "F32": ("<I", (1 << 31, 0, 0x7FC00001, 0x7F800000)),
        }
        if dtype in special and count >= 4:
            kind, values = special[dtype]
            for i, value in enumerate(values):
                struct.pack_into(kind, data, i * SIZES[dtype], value)
        made[name] = (dtype, shape, data)
    return made


def update(rng: np.random.Generator, old: Model, density: float) -> Model:
    """A copy with about `density` of the elements of most tensors changed, the sign of a zero among them."""
    new = {name: (dtype, shape, bytearray(data)) for name, (dtype, shape, data) in old.items()}
    for dtype, _, data in new.values():
        if rng.random() < 0.3:
            continue
        width = SIZES[dtype]
        for element in np.flatnonzero(rng.random(len(data) // width) < density):
            data[int(element) * width] ^= 1 << int(rng.integers(0, 1 if dtype == "BOOL" else 8))
        if dtype == "BF16":
            data[1] ^= 0x80  # the first element goes from -0.0 to 0.0 or back
    return new


def save(directory: Path, what: Model, *, shards: int = 1, config: str = "{}") -> Path:
    """Write `what` as transformers would: shards with an index of its own where there are several."""
    directory.mkdir(parents=True)
    names = sorted(what)
    weight_map = {}
    for shard in range(shards):
        file = (
            "model.safetensors"
            if shards == 1
            else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        )
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        body = b""
        for name in names[shard::shards]:
            dtype, shape, data = what[name]
            header[name] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [len(body), len(body) + len(data)],
            }
            body += data
            weight_map[name] = file
        raw = json.dumps(header).encode()
        (directory / file).write_bytes(struct.pack("<Q", len(raw)) + raw + body)
    if shards > 1:
        (directory / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": weight_map})
        )
    (directory / "config.json").write_text(config)
    (directory / "tokenizer.json").write_text('{"model": {}}')
    return directory


def content(directory: Path) -> dict[str, bytes]:
    """All visible files, by name."""
    return dict(_files(directory))


def _files(directory: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and not any(part.startswith(".") for part in name.split("/")):
            yield name, path.read_bytes()
