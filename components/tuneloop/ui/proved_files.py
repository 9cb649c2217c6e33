"""Files of artifacts that a page shows: proved when they are read, and again once they have
changed.

`ui/samples.py` keeps two of these in the process of the page, `COMPLETIONS` and `TOKEN_TEXTS`. Its
tests are in `tests/unit/ui/test_open_page.py`.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from tuneloop.core.artifacts import Artifact, is_whole
from tuneloop.core.errors import Corrupt, Retryable, Unavailable, UserError, find_disk_error

Content = TypeVar("Content")
Result = TypeVar("Result")
TRIES = 3
"""How often a file that changes meanwhile is read. Other processes that use a file of the cache set its
times (`core/cache.py`), which looks like a change."""


@dataclass(frozen=True)
class FileMark:
    """What changes whenever a file is written, also where its size and its times are put back."""

    size: int
    modified_ns: int
    changed_ns: int
    inode: int

    @classmethod
    def read(cls, path: Path) -> "FileMark | None":
        """Read the mark of a file; None where there is none any more."""
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return None
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@dataclass(frozen=True)
class ProvedFile(Generic[Content]):
    """What was read of a file of `artifact`, and its mark from before it was proved."""

    artifact: Artifact
    url: str
    path: Path
    mark: FileMark | None
    content: Content

    def is_unchanged(self) -> bool:
        """Return whether the file is still the one that was proved."""
        return self.mark is not None and self.mark == FileMark.read(self.path)


class ProvedFiles(Generic[Content]):
    """The files that were shown last, at most `capacity`, each read by `read` once it is proved."""

    def __init__(self, read: Callable[[Path], Content], capacity: int) -> None:
        self._read = read
        self._capacity = capacity
        self._files: OrderedDict[tuple[str, str], ProvedFile[Content]] = OrderedDict()

    def open(self, ref: str, name: str) -> ProvedFile[Content]:
        """Open the file `name` of the artifact `ref`; an open one is taken unless it has changed.

        Raises:
            Corrupt: it differs from its manifest, or cannot be read.
            UserError: the artifact has no such file.
        """
        # It is taken out, so that it is the last one when it is put back.
        key = (ref, name)
        proved = self._files.pop(key, None)
        if proved is None or not proved.is_unchanged():
            proved = self._prove(ref, name)
        # The file that was not shown for longest is closed first.
        self._files[key] = proved
        while len(self._files) > self._capacity:
            self._files.popitem(last=False)
        return proved

    def use(self, ref: str, name: str, work: Callable[[Content], Result]) -> Result:
        """Call `work` with a file's content, parts of which it may read late, and return the
        result.

        Raises:
            Unavailable: the file was changed meanwhile, each time, so that the result is not
                proved.
            Corrupt, UserError: as `open`.
        """
        for _ in range(TRIES):
            proved = self.open(ref, name)
            # Only a result that was read from unchanged bytes is proved.
            try:
                with explain_unreadable(proved.url):
                    result = work(proved.content)
            except Corrupt:
                if proved.is_unchanged():
                    raise
                continue
            if proved.is_unchanged():
                return result
        raise Unavailable(f"{proved.url}: changed while it was read; load the page again")

    def clear(self) -> None:
        """Forget all files, and close them."""
        self._files.clear()

    def _prove(self, ref: str, name: str) -> ProvedFile[Content]:
        artifact = Artifact(ref)
        url = f"{artifact.url}/{artifact.manifest.root}/{name}"
        path = artifact.part(name)
        mark = FileMark.read(path)
        # It is proved after its mark was read, so that a later change of any byte changes the mark.
        if mark is None or not is_whole(path, artifact.manifest.files[name]):
            raise Unavailable(f"{url}: changed while it was read; load the page again")
        with explain_unreadable(url):
            return ProvedFile(artifact, url, path, mark, self._read(path))


@contextmanager
def explain_unreadable(url: str) -> Iterator[None]:
    """Raise Corrupt for what a library raises in the block because it cannot read a file."""
    try:
        yield
    except (UserError, Retryable):
        raise
    except Exception as error:
        disk = find_disk_error(error)
        if disk:
            raise disk from error
        remedy = f"cannot be read ({type(error).__name__}: {error}); restore it from a copy"
        raise Corrupt("artifact", url, remedy) from error
