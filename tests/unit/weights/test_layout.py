"""The published bytes, read and written by others: the safetensors library, a reader that follows docs/weights.md to
the letter and shares no code with the package, an object store, ranks that fill in one file together."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from multiprocessing import Process
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import xxhash
import zstandard
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.unit.weights.exports import content, model, save, update
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import Store
from tuneloop.weights import layout
from tuneloop.weights.inspect import delete_unused_versions, list_versions, verify_version
from tuneloop.weights.materialize import materialize_version
from tuneloop.weights.publish import publish_version


def foreign_read(root: Path, version: int) -> dict[str, bytes]:
    """Tensors of a version, by the document's section "Reading" alone."""
    index = json.loads(
        (root / f"weight_v{version:06d}" / "model.safetensors.index.json").read_bytes()
    )
    about, where = index["metadata"], root / f"weight_v{version:06d}"
    assert about["version"] == f"{version:06d}"

    def tensors(file: str) -> tuple[dict[str, bytes], dict[str, str]]:
        data = (where / file).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        body = data[8 + length :]
        return {n: body[slice(*e["data_offsets"])] for n, e in header.items()}, metadata

    files = {file: tensors(file) for file in sorted(set(index["weight_map"].values()))}
    stored = {name: files[file][0][name] for name, file in index["weight_map"].items()}
    if "delta_encoding" not in about:
        return stored
    state = foreign_read(root, int(about["base_version"]))
    assert about["compression_format"] == "zstd" and about["checksum_format"] == "xxh3-128"
    unzip = zstandard.ZstdDecompressor()
    for name, payload in stored.items():
        old = bytearray(state[name])
        if about["delta_encoding"] == "xor":
            new = bytes(a ^ b for a, b in zip(old, unzip.decompress(payload), strict=True))
        elif about["delta_encoding"] == "overwrite":
            raw = unzip.decompress(payload)
            (count,) = struct.unpack_from("<I", raw)
            positions = struct.unpack_from(f"<{count}I", raw, 4)
            for position, value in zip(positions, raw[4 + 4 * count :], strict=True):
                old[position] = value
            new = bytes(old)
        else:
            new = foreign_gap8_xor(old, payload)
        checksum = files[index["weight_map"][name]][1][name]
        assert xxhash.xxh3_128(new).hexdigest() == checksum
        state[name] = new
    return state


def foreign_gap8_xor(tensor: bytearray, payload: bytes) -> bytes:
    width, chunk = struct.unpack_from("<II", payload)
    at, first = 8, 0
    while first * width < len(tensor):
        (count,) = struct.unpack_from("<I", payload, at)
        at += 4
        if count:
            sizes = struct.unpack_from(f"<{1 + width}I", payload, at)
            at += 4 * len(sizes)
            frames = []
            for size in sizes:
                frames.append(zstandard.ZstdDecompressor().decompress(payload[at : at + size]))
                at += size
            position, found = 0, []
            for gap in frames[0]:
                position += gap
                if gap != 255:
                    found.append(position)
            assert len(found) == count
            for i, element in enumerate(found):
                for plane in range(width):
                    tensor[(first + element) * width + plane] ^= frames[1 + plane][i]
        first += chunk
    assert at == len(payload)
    return bytes(tensor)


@pytest.mark.parametrize("encoding", ["gap8-xor", "xor", "overwrite"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_foreign_reader_reads_every_encoding(tmp_path: Path, encoding: str, tied: bool) -> None:
    rng, root = np.random.default_rng(0), tmp_path / "weights"
    state = model(rng, tied=tied)
    for version in range(4):
        publish_version(
            str(root), version, save(tmp_path / f"export{version}", state), encoding=encoding
        )  # type: ignore[arg-type]
        assert foreign_read(root, version) == {
            name: bytes(data) for name, (_, _, data) in state.items()
        }
        state = update(rng, state, 0.03)
    assert [entry.encoding for entry in list_versions(str(root))] == [None, *[encoding] * 3]


@pytest.fixture
def slime_reader() -> ModuleType:
    """The module by which slime has SGLang read weights: in slime's repository it is a file that a patch adds."""
    clone = os.environ.get("TUNELOOP_SLIME")
    if not clone:
        pytest.skip(
            "set TUNELOOP_SLIME to a clone of https://github.com/THUDM/slime: its own reader is not kept here"
        )
    patch = "docker/patch/latest/sglang-pull_weights.patch"
    text = subprocess.run(
        ["git", "-C", clone, "show", f"HEAD:{patch}"], check=True, capture_output=True, text=True
    )
    (added,) = (
        part
        for part in text.stdout.split("\ndiff --git ")
        if "weight_sync/local_checkpoint.py b/" in part
    )
    made = ModuleType("local_checkpoint")
    lines = [
        line[1:]
        for line in added.splitlines()
        if line.startswith("+") and not line.startswith("+++")
    ]
    exec("\n".join(lines), vars(made))
    return made


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("held", [False, True])
def test_slimes_own_reader_reads_them(
    tmp_path: Path, slime_reader: Any, encoding: Any, held: bool
) -> None:
    """Each version after the one before, and the last one from nothing; across an anchor, and on the model it has."""
    rng, root, base = np.random.default_rng(0), tmp_path / "weights", tmp_path / "export0"
    state = {
        name: tensor for name, tensor in model(rng).items() if tensor[2]
    }  # NumPy has no bytes of an empty one
    before, about = base, dict[str, Any](encoding=encoding, held_by_readers=held)
    for version in range(6):
        export = save(tmp_path / f"export{version}", state, shards=2)
        publish_version(str(root), version, export, restore_bound=0.45, **about)
        for place in (tmp_path / "local", tmp_path / f"fresh{version}"):
            slime_reader.pull(str(place), str(base), str(root), version)
            read = {
                name: layout.Checkpoint(place).view(name).tobytes()
                for name in layout.Checkpoint(place).tensors
            }
            assert read == {name: bytes(data) for name, (_, _, data) in state.items()}
        state, before = update(rng, state, 0.03), export
        about = {"base": before}
    assert {v.encoding for v in list_versions(str(root))[1:]} == {None, encoding}, (
        "deltas, and an anchor"
    )
    publish_version(str(root), 6, save(tmp_path / "export6", state, shards=2), base=before)
    index = json.loads((root / "weight_v000006" / "model.safetensors.index.json").read_bytes())
    damaged = layout.Checkpoint(tmp_path / "local", writable=True).view(min(index["weight_map"]))
    damaged[-1] ^= 1
    with pytest.raises(RuntimeError, match="checksum mismatch"):
        slime_reader.pull(str(tmp_path / "local"), str(base), str(root), 6)


def test_a_chain_keeps_the_encoding_that_it_began_with(tmp_path: Path) -> None:
    rng, root = np.random.default_rng(0), str(tmp_path / "weights")
    state = model(rng)
    for version in range(5):
        about: dict[str, Any] = {"restore_bound": 0.0 if version == 2 else 9.0}
        about |= {"encoding": "overwrite"} if version == 0 else {}
        publish_version(root, version, save(tmp_path / f"{version}", state), **about)
        state = update(rng, state, 0.01)
    assert [each.encoding for each in list_versions(root)] == [
        None,
        "overwrite",
        None,
        "overwrite",
        "overwrite",
    ]


def test_a_full_version_is_loadable_where_it_lies(tmp_path: Path) -> None:
    """Sharded, by the weight map alone, as transformers does it; and deltas open as safetensors."""
    rng, root = np.random.default_rng(1), tmp_path / "weights"
    state = model(rng)
    publish_version(str(root), 0, save(tmp_path / "a", state, shards=3))
    publish_version(str(root), 1, save(tmp_path / "b", update(rng, state, 0.1), shards=3))
    weight_map = json.loads((root / "weight_v000000/model.safetensors.index.json").read_bytes())[
        "weight_map"
    ]
    assert set(weight_map) == set(state) and len(set(weight_map.values())) == 3
    with safe_open(root / "weight_v000000" / weight_map["step"], "numpy") as file:
        assert file.get_tensor("step").tobytes() == bytes(state["step"][2])
    (delta,) = (root / "weight_v000001").glob("*.safetensors")
    with safe_open(delta, "numpy") as file:
        assert set(file.metadata()) == set(file.keys()) and all(
            len(c) == 32 for c in file.metadata().values()
        )


def _fill(directory: Path, rank: int, ranks: int, tensors: dict[str, np.ndarray]) -> None:
    shared = layout.Checkpoint(directory, writable=True)
    for name, whole in tensors.items():
        rows = -(
            -len(whole) // ranks
        )  # FSDP shards dimension 0 in equal parts, the last one shorter
        shard = whole[rank * rows : (rank + 1) * rows]
        at = rank * rows * whole[:1].nbytes
        shared.view(name)[at : at + shard.nbytes] = shard.reshape(-1).view(np.uint8)


def test_ranks_fill_one_file_that_equals_a_full_export(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    tensors = {
        "z": rng.standard_normal((7, 5)).astype(np.float32),
        "a": rng.standard_normal((8, 3)).astype(np.float16),
        "i": rng.integers(0, 9, (3, 2)),
        "u": rng.integers(0, 9, 4).astype(np.uint8),
        "e": np.zeros((0, 4), np.float32),
    }
    kinds = {"float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8"}
    entries = {name: (kinds[str(t.dtype)], t.shape, t.nbytes) for name, t in tensors.items()}
    layout.preallocate_safetensors(tmp_path / "model.safetensors", entries, {"format": "pt"})
    ranks = [Process(target=_fill, args=(tmp_path, rank, 3, tensors)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
        assert rank.exitcode == 0
    save_file(tensors, tmp_path / "full-export", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "full-export").read_bytes()


def test_an_object_store_takes_the_same_protocol(tmp_path: Path) -> None:
    """obstore's in-memory store: conditional puts, no directories, no local path; tests/cluster has S3."""
    rng, store = np.random.default_rng(3), Store("memory:///weights")
    state = model(rng)
    for version in range(5):
        export = save(tmp_path / f"export{version}", state, config=f"{version}")
        publish_version(store, version, export)
        materialize_version(store, None, tmp_path / "replica")
        assert content(tmp_path / "replica") == content(export)
        state = update(rng, state, 0.02)
    assert delete_unused_versions(store, keep=1) == []
    assert verify_version(store) == len(state)
    store.delete(
        "weight_v000002/"
        + next(k for k in store.keys("weight_v000002") if "model-" in k).split("/")[1]
    )
    with pytest.raises(Corrupt, match="is missing"):
        materialize_version(store, 3, tmp_path / "late")


def test_no_model_no_service(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no \.safetensors file"):
        publish_version(str(tmp_path / "weights"), 0, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(Corrupt, match="cut short"):
        publish_version(str(tmp_path / "weights"), 0, tmp_path)
    for version, said in ((None, "'latest'"), (7, "7")):
        with pytest.raises(
            UserError, match=rf"^weights version: {said}: is not in file://.*/weights; publish it"
        ):
            materialize_version(str(tmp_path / "weights"), version, tmp_path / "replica")
    assert not (tmp_path / "replica").exists()


def test_import_needs_no_torch() -> None:
    code = (
        "import sys; from tuneloop.weights import inspect, materialize, pointer, publish;"
        "sys.exit(bool({'torch', 'safetensors', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
