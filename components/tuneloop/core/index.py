"""One file that holds the small files of a run: the manifest of every artifact, and the rows of its
metrics.

``<url>/index.zst`` is written by readers that had to open many files one by one, and is known to no
stage. It is a cache: each file is held with the mark under which it was read, and is read again
where the mark has changed. So an index that is lost, behind, or written by two at once costs time
and changes nothing, and a damaged one is made again. It starts with the xxh3-128 of the remaining
bytes, which zstandard compressed: a line of JSON, ``[key, mark, size]`` for each file, and the
files' bytes.

`runs/committed.py` alone uses it: it says which files a run has (`_find_marks`), and proves them.
Two versions of tuneloop may read one file, so a change of its form needs another `KEY`. The class
of this name in `weights/versions.py` is another: the index of a checkpoint's tensors.
"""

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import xxhash
import zstandard

from tuneloop.core.errors import Retryable, UserError, print_diagnostic
from tuneloop.core.store import Store

Item = TypeVar("Item")
Result = TypeVar("Result")
KEY = "index.zst"
FEW = 100
"""The index is written once more files than this, plus a fiftieth of those indexed, were read one
by one: for fewer, reading them again costs less than writing the index."""
REQUESTS = 32
"""Requests to an object store at a time."""
# How a mark begins that is the digest of the file's bytes; `runs/committed.py` makes such marks.
DIGEST = "xxh3-128:"
DIGEST_BYTES = 16
"""Bytes of the digest with which a packed index begins."""


class Index:
    """The small files below a store's URL.

    Attributes:
        files: key → mark and bytes, of the files for which `prove` did not raise.
    """

    def __init__(
        self,
        store: Store,
        prove: Callable[[str, bytes], object] = lambda key, data: None,
    ) -> None:
        """Open the index of `store`; `prove` gets the key and the bytes of each file that is read,
        and raises if they are not what they should be.
        """
        self.store = store
        self._prove = prove
        self.files = self._load()
        self._unsaved = 0

    def read(
        self,
        marks: Mapping[str, str],
        deleted: Collection[str] = (),
        *,
        save: bool = False,
    ) -> dict[str, bytes]:
        """Return the bytes of files; one that does not exist, or has another digest, is left out.

        Args:
            marks: key → mark, which changes when the file is written again, or is ``xxh3-128:…`` of
                its bytes.
            deleted: keys that are known to exist no longer.
            save: write the index if a file of it has changed, however few have.
        """
        unread = [key for key, mark in marks.items() if self.files.get(key, ("",))[0] != mark]
        has_changed = False
        for key in unread + list(deleted):
            has_changed |= self.files.pop(key, None) is not None
        for key, data in zip(unread, map_requests(self.store, self.store.get, unread)):
            mark = marks[key]
            if data is None:
                continue
            if mark.startswith(DIGEST) and mark != DIGEST + xxhash.xxh3_128_hexdigest(data):
                continue
            self._prove(key, data)
            self.files[key] = (mark, data)
        # A request that found nothing costs as much as one that did.
        self._unsaved += len(unread)
        if deleted or (save and has_changed) or self._unsaved > FEW + len(self.files) // 50:
            self._save()
        return {key: self.files[key][1] for key in marks if key in self.files}

    def _load(self) -> dict[str, tuple[str, bytes]]:
        packed = self.store.get(KEY)
        if packed is None:
            return {}
        body = packed[DIGEST_BYTES:]
        if xxhash.xxh3_128_digest(body) != packed[:DIGEST_BYTES]:
            line = f"{self.store.url}/{KEY}: is damaged; it is made again from the manifests"
            print_diagnostic(line, 0)
            return {}
        plain = zstandard.ZstdDecompressor().decompress(body)
        offset = plain.index(b"\n") + 1
        files: dict[str, tuple[str, bytes]] = {}
        for key, mark, size in json.loads(plain[:offset]):
            files[key] = (mark, plain[offset : offset + size])
            offset += size
        return files

    def _save(self) -> None:
        listing = json.dumps([(key, mark, len(data)) for key, (mark, data) in self.files.items()])
        contents = b"".join(data for _, data in self.files.values())
        plain = f"{listing}\n".encode() + contents
        packed = zstandard.ZstdCompressor(level=1).compress(plain)
        # A reader that may not write to the store goes on file by file.
        with contextlib.suppress(UserError, Retryable, OSError):
            self.store.put(KEY, xxhash.xxh3_128_digest(packed) + packed)
        self._unsaved = 0


def map_requests(
    store: Store,
    ask: Callable[[Item], Result],
    items: Iterable[Item],
) -> list[Result]:
    """Call `ask` on each item and return the answers in order; requests to an object store run
    concurrently.
    """
    # A folder answers sooner than a thread starts.
    if store.root is not None:
        return [ask(item) for item in items]
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(ask, items))
