"""Replicas of a node that pull from an object store fetch a delta once, through the cache that they share."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest

from benchmarks.store_bytes import serve_s3
from tests.unit.weights.exports import content, model, save, update
from tuneloop.core.errors import Corrupt
from tuneloop.weights.materialize import materialize_version
from tuneloop.weights.publish import publish_version

ROOT, DELTA = "s3://bucket/weights", r"000001.*\.safetensors$"


def test_replicas_of_a_node_fetch_a_delta_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELOOP_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    first = model(rng)
    exports = [save(tmp_path / "0", first), save(tmp_path / "1", update(rng, first, 0.01))]
    replicas = [tmp_path / f"replica-{i}" for i in range(4)]

    read = list[int]()

    def pull_one(replica: Path) -> None:
        read.append(materialize_version(ROOT, None, replica, shared=True).read_bytes)

    def pull() -> None:
        threads = [threading.Thread(target=pull_one, args=(each,)) for each in replicas]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with serve_s3(tmp_path / "objects") as store:
        publish_version(ROOT, 0, exports[0])
        pull()
        publish_version(ROOT, 1, exports[1], base=exports[0])
        (stored,) = (
            size for method, key, size in store.log if method == "PUT" and re.search(DELTA, key)
        )
        store.log.clear()
        read.clear()
        pull()
        assert sorted(read) == [0, 0, 0, stored], (
            "those that found it in the cache read nothing of the store"
        )
        assert [content(each) for each in replicas] == [content(exports[1])] * 4
        assert store.read(DELTA) == stored
        # What is damaged on this machine alone goes, and is fetched anew.
        (cached,) = (tmp_path / "cache").rglob("*.safetensors")
        data = bytearray(cached.read_bytes())
        data[-1] ^= 1
        cached.write_bytes(data)
        materialize_version(ROOT, None, tmp_path / "late", shared=True)
        assert content(tmp_path / "late") == content(exports[1])
        assert not [*(tmp_path / "cache").rglob("*.safetensors")]
        # What is damaged in the store is refused, as without a cache.
        (published,) = (
            each for each in (tmp_path / "objects").iterdir() if re.search(DELTA, each.name)
        )
        published.write_bytes(bytes(data))
        with pytest.raises(Corrupt):
            materialize_version(ROOT, None, tmp_path / "later", shared=True)
