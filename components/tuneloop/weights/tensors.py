"""Read chosen tensors of a published version, without the others.

`weights/inspect.py` compares versions by it, and readers that need a part of a model use it as a
library. It restores a tensor as `weights/delta.py: patch_checkpoint` does, in memory: what changes
there about the order of deltas or their proof changes here, too. The tests are in
`tests/unit/weights/test_protocol.py`.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from tuneloop.core.store import Store
from tuneloop.weights import codec, delta
from tuneloop.weights.layout import Bytes, Tensor, build_blame, parse_header
from tuneloop.weights.restoration import Plan, open_base, plan_restoration
from tuneloop.weights.versions import Chain


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor, or the payload of one, in a file that is open."""

    file: BinaryIO
    tensor: Tensor

    def read(self) -> Bytes:
        """Read its bytes, flat uint8."""
        self.file.seek(self.tensor.start)
        data = self.file.read(self.tensor.end - self.tensor.start)
        return np.frombuffer(data, np.uint8)


def read_tensors(
    chain: Chain,
    version: int,
    names: Iterable[str],
    *,
    base: Path | None = None,
) -> Iterator[tuple[Tensor, Bytes]]:
    """Yield the tensors `names` of a version, verified, one at a time, and read no others.

    Args:
        chain: the versions of a root.
        version: one of them.
        names: tensors of the model.
        base: the model that the chain starts on, where it stores none.

    Raises:
        UserError: the version is not published, or `base` is not the model.
        Corrupt: the published files are damaged, or lack a tensor.
    """
    plan = plan_restoration(chain, version)
    checksums = plan.target.index.tuneloop.checksums
    with ExitStack() as files:
        weights, weights_url = _open_weights(chain.store, plan, base, files)
        deltas = _open_deltas(chain.store, plan, files)
        for name in names:
            if name not in weights:
                raise build_blame(weights_url, delta.MEND)(f"holds no {name}")
            tensor = weights[name].tensor
            data = weights[name].read()
            for encoding, payloads in deltas:
                # A tensor that a step did not change has no payload.
                if name not in payloads:
                    continue
                patched = np.empty_like(data)
                codec.apply_delta(
                    data,
                    patched,
                    payloads[name].read(),
                    tensor.width,
                    encoding,
                )
                data = patched
            # Whichever file is at fault, the tensor is proved as a whole.
            digest = xxhash.xxh3_128_hexdigest(data.data)
            blame = build_blame(chain.store.url, delta.MEND)
            delta.check_checksums([(name, digest)], checksums, blame)
            yield tensor, data


def _open_weights(
    store: Store,
    plan: Plan,
    base: Path | None,
    files: ExitStack,
) -> tuple[dict[str, _StoredTensor], str]:
    """Open the files of the full version; return tensor name → where it lies, and their URL."""
    full = plan.full
    # Without a directory to start from, a plan has a full version.
    assert full is not None
    extra = full.index.tuneloop
    # Files without a header are no safetensors.
    keys: list[str] = []
    if extra.readers_digest:
        store = open_base(full, base)
        keys.extend(full.index.headers)
    else:
        for name in full.index.headers:
            keys.append(f"{full.folder}/{extra.files[name].stored}")
    weights: dict[str, _StoredTensor] = {}
    for key in keys:
        weights |= _open_file(store, key, files)
    return weights, f"{store.url}/{full.folder}"


def _open_deltas(
    store: Store,
    plan: Plan,
    files: ExitStack,
) -> list[tuple[codec.Encoding, dict[str, _StoredTensor]]]:
    """Open the files of the deltas; return the encoding and the payloads of each, in order."""
    deltas: list[tuple[codec.Encoding, dict[str, _StoredTensor]]] = []
    for step in plan.steps:
        encoding = step.index.encoding
        assert encoding is not None
        for name in set(step.index.weight_map.values()):
            payloads = _open_file(store, f"{step.folder}/{name}", files)
            deltas.append((encoding, payloads))
    return deltas


def _open_file(store: Store, key: str, files: ExitStack) -> dict[str, _StoredTensor]:
    """Open a safetensors file until `files` closes. Raises Corrupt: it is missing, or none."""
    blame = build_blame(f"{store.url}/{key}", delta.MEND)
    try:
        file = files.enter_context(store.open(key))
    except FileNotFoundError:
        raise blame("is missing although its index is there") from None
    header = parse_header(file, "", blame)
    return {name: _StoredTensor(file, tensor) for name, tensor in header.tensors.items()}
