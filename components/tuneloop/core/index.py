"""One file that holds the small files of a run: the manifest of every artifact, and the rows of its metrics.

``<url>/index.zst`` is written by readers that had to open many files one by one, and is known to no stage. It is a
cache: each file is held with the mark under which it was read, and is read again where the mark has changed. So an
index that is lost, behind, or written by two at once costs time and changes nothing, and one that is damaged is made
again. It starts with the xxh3-128 of the rest, which zstandard compressed: a line of JSON, ``[key, mark, size]`` for
each file, and the files' bytes."""

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xxhash
import zstandard

from tuneloop.core.errors import Retryable, UserError, print_diagnostic
from tuneloop.core.store import Store

KEY = "index.zst"
FEW = 100
"""The index is written once more files than this, plus a fiftieth of those indexed, were read one by one."""
REQUESTS = 32
"""Requests to an object store at a time."""
DIGEST = "xxh3-128:"


class Index:
    """The small files below a store's URL; `held`: key → mark and bytes, of those for which `prove` did not raise."""

    def __init__(
        self, store: Store, prove: Callable[[str, bytes], object] = lambda key, data: None
    ) -> None:
        self.store = store
        self._prove = prove
        self.held = self._load()
        self._unsaved = 0

    def read(
        self, wanted: Mapping[str, str], gone: Collection[str] = (), *, save: bool = False
    ) -> dict[str, bytes]:
        """Return the bytes of files; one that is not there, or has another digest, is left out. `wanted`: key → mark,
        which changes when the file is written again, or is ``xxh3-128:…`` of its bytes. `gone`: keys known to be no
        longer there. `save`: write the index if a file that it held has changed, however few have."""
        missing = [key for key, mark in wanted.items() if self.held.get(key, ("",))[0] != mark]
        changed = [self.held.pop(key) for key in (*missing, *gone) if key in self.held]
        for key, data in zip(missing, map_requests(self.store, self.store.get, missing)):
            mark = wanted[key]
            if data is not None and (
                mark == DIGEST + xxhash.xxh3_128_hexdigest(data) or not mark.startswith(DIGEST)
            ):
                self._prove(key, data)
                self.held[key] = mark, data
        self._unsaved += len(missing)
        if gone or (save and changed) or self._unsaved > FEW + len(self.held) // 50:
            self._save()
        return {key: self.held[key][1] for key in wanted if key in self.held}

    def _load(self) -> dict[str, tuple[str, bytes]]:
        if (written := self.store.get(KEY)) is None:
            return {}
        if xxhash.xxh3_128_digest(written[16:]) != written[:16]:
            print_diagnostic(
                f"{self.store.url}/{KEY}: is damaged; it is made again from the manifests", 0
            )
            return {}
        plain = zstandard.ZstdDecompressor().decompress(written[16:])
        at = plain.index(b"\n") + 1
        held = {}
        for key, mark, size in json.loads(plain[:at]):
            held[key] = mark, plain[at : at + size]
            at += size
        return held

    def _save(self) -> None:
        listed = json.dumps([(key, mark, len(data)) for key, (mark, data) in self.held.items()])
        plain = b"".join((listed.encode(), b"\n", *(data for _, data in self.held.values())))
        packed = zstandard.ZstdCompressor(level=1).compress(plain)
        with contextlib.suppress(
            UserError, Retryable, OSError
        ):  # who may not write here reads file by file
            self.store.put(KEY, xxhash.xxh3_128_digest(packed) + packed)
        self._unsaved = 0


def map_requests(store: Store, ask: Callable[[Any], Any], of: Iterable[Any]) -> list[Any]:
    """Call `ask` on each item and return the results in order; requests to an object store run concurrently."""
    if store.root is not None:
        return [ask(each) for each in of]
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(ask, of))
