"""Put a directory into a store: resumable by digest, and never over other content.

Before the first file, ``.SHA256SUMS.partial`` is created there. It lists the files that will be
there by their SHA-256, and so it claims the place: an interrupted upload of the same directory goes
on, and another directory is refused. The last file is ``SHA256SUMS``, and the claim is deleted.

`tuneloop store put` (`cli/store.py`) is its one user; `formats/stored_models.py` reads what it
leaves. Tests: `tests/unit/cli/test_store_put.py`.
"""

import hashlib
import math
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tuneloop.core.artifacts import BLOCK, File, hash_file
from tuneloop.core.errors import Unavailable, UserError
from tuneloop.core.progress import Progress
from tuneloop.core.store import Conflict, Store
from tuneloop.formats.checksums import CLAIM, SUMS, format_sums, parse_sums

MEGABYTE = 10**6
"""Bytes of the unit in which the progress is shown."""
SENT_TOGETHER = 4
"""Files that are sent at a time; large ones travel in parts."""


@dataclass
class Upload:
    """A directory on its way into a store.

    Attributes:
        store: its URL is where the directory will be.
        directory: on this machine.
        files: name → size and digests of each file.
        missing: the files that are not there yet.
        sent: the files that this process has sent.
    """

    store: Store
    directory: Path
    files: dict[str, File]
    missing: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        sizes = [file.size for file in self.files.values()]
        return sum(sizes)

    @property
    def digests(self) -> dict[str, str]:
        """File → SHA-256 in hexadecimal."""
        return {name: file.sha256 for name, file in self.files.items()}

    def run(self) -> None:
        """Send the files that are not there yet.

        Raises:
            UserError: other content is there.
            Unavailable: something else writes there.
        """
        sums = format_sums(self.digests)
        if self._begin(sums):
            return
        self._send()
        sizes = self._list_sizes()
        for name, file in self.files.items():
            if sizes.get(name) != file.size:
                problem = f"{self.store.url}/{name} was changed meanwhile; put it again"
                raise Unavailable(f"store: {problem}")
        self.store.put(SUMS, sums)
        self.store.delete(CLAIM)

    def _begin(self, sums: bytes) -> bool:
        """Claim the place with the file of `sums`, and find out which files are missing there.

        Returns whether the whole directory is there. Raises as `run`.
        """
        sizes = self._list_sizes()
        final = self.store.get(SUMS)
        claim = self.store.get(CLAIM)
        stated: dict[str, str] | None = None
        # The claim of an upload that was killed at its end may lie beside the sums.
        data = claim if final is None else final
        if data is not None:
            stated = parse_sums(data, self.store.url)
        self._check_content(sizes, stated)
        if data is None:
            try:
                self.store.create(CLAIM, sums)
            except Conflict as error:
                problem = f"{self.store.url} is being written by another process; put it again"
                raise Unavailable(f"store: {problem}") from error
        self.missing = [name for name in self.files if name not in sizes]
        is_complete = final is not None and claim is None
        return is_complete and not self.missing

    def _check_content(
        self,
        sizes: Mapping[str, int],
        stated: Mapping[str, str] | None,
    ) -> None:
        """Refuse a place with a file that the directory does not have, or has with other bytes.

        Args:
            sizes: name → bytes of the files that are there.
            stated: name → SHA-256 of the files that an upload has brought or will bring; None: no
                upload did.
        """
        digests = self.digests
        if stated is not None and stated != digests:
            names = stated.keys() | digests.keys()
            for name in sorted(names):
                if stated.get(name) != digests.get(name):
                    self._refuse(name)
        for name, size in sizes.items():
            file = self.files.get(name)
            if file is None or file.size != size:
                self._refuse(name)
            # No half of a file is ever there, so that size and statement are enough.
            if stated is None and self._hash_stored(name) != digests[name]:
                self._refuse(name)

    def _refuse(self, name: str) -> None:
        remedy = f"holds another directory ({name} differs); choose another URL, or delete it there"
        raise UserError("URL", self.store.url, remedy)

    def _hash_stored(self, name: str) -> str:
        """Compute the SHA-256 of a file that is there, in hexadecimal."""
        digest = hashlib.sha256()
        with self.store.open(name) as file:
            block = file.read(BLOCK)
            while block:
                digest.update(block)
                block = file.read(BLOCK)
        return digest.hexdigest()

    def _list_sizes(self) -> dict[str, int]:
        """Return name → bytes of what is there, without the files of uploads and hidden ones."""
        sizes: dict[str, int] = {}
        files = self.store.stat()
        for name, (size, _) in files.items():
            if name != SUMS and not is_hidden(name):
                sizes[name] = size
        return sizes

    def _send(self) -> None:
        """Send the missing files, several at a time, and show the progress."""
        finished = self.size
        for name in self.missing:
            finished -= self.files[name].size
        progress = Progress(
            "store put",
            total=count_megabytes(self.size),
            unit="MB",
            earlier=count_megabytes(finished),
        )
        lock = threading.Lock()

        def send(name: str) -> None:
            nonlocal finished
            path = self.directory / name
            self.store.upload(name, path)
            # Several threads count into one number.
            with lock:
                self.sent.append(name)
                finished += self.files[name].size
                progress.update(count_megabytes(finished))

        with ThreadPoolExecutor(SENT_TOGETHER) as pool:
            # The list raises what a thread has raised.
            list(pool.map(send, self.missing))


def open_upload(directory: Path, url: str) -> Upload:
    """Prepare the upload of a directory: its files are hashed, and nothing is written.

    Hidden files stay here, and so does a file with sums, which is written anew.

    Raises:
        UserError: it is no directory, or has no files; the URL is none.
    """
    if not directory.is_dir():
        raise UserError("DIRECTORY", str(directory), "is not a directory here")
    store = Store(url)
    paths: dict[str, Path] = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if name == SUMS or is_hidden(name):
            continue
        # A link in the hub's cache is a file, too.
        if path.is_file():
            paths[name] = path
    if not paths:
        raise UserError("DIRECTORY", str(directory), "has no files")
    with ThreadPoolExecutor() as pool:
        files = pool.map(hash_file, paths.values())
        files_by_name = dict(zip(paths, files))
    return Upload(store, directory, files_by_name)


def count_megabytes(size: int) -> int:
    """Return bytes as megabytes, rounded up, so that a small file counts, too."""
    return math.ceil(size / MEGABYTE)


def is_hidden(name: str) -> bool:
    """Return whether a file, or a directory that it lies in, has a name that begins with a dot."""
    parts = name.split("/")
    return any(part.startswith(".") for part in parts)
