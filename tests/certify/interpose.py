"""Calls of this process that touch a run's files, numbered, with something done to one of them.

Installed in a process that was forked for one attempt, and never taken back. A call is one of those by which the store,
the artifacts and the executor change files (`CALLS`), on a path below the run, one by which the store is read
(`READS`), or one of the library for object stores (`OBJECTS`). Numbers do not depend on time, so that a call is met
again in the next process that does the same.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import obstore

from tuneloop.core.store import Store

CALLS = (
    "open",
    "mkdir",
    "link",
    "replace",
    "rename",
    "unlink",
    "rmdir",
    "fsync",
    "truncate",
    "write",
)
READS = ("get", "keys", "parts", "find_marks")
OBJECTS = ("put", "get", "get_range", "head", "list", "list_with_delimiter", "delete")
FIRED = "CERTIFY_FIRED"
"""Variable that names the file which says at what call something was done."""
Act = Callable[["Call"], None]
_others: list[int] = []
_STAGED = re.compile(r"data-[0-9a-f]{12,16}|(?<=\.)\d+-[0-9a-f]{8}")


@dataclass(frozen=True)
class Call:
    """A call that is about to happen, or has happened.

    Attributes:
        name: one of `CALLS`, `READS` or `OBJECTS`.
        path: what it is about.
        where: the path below the run, without what is drawn by chance.
    """

    name: str
    path: str
    where: str

    def __str__(self) -> str:
        return f"{self.name} {self.where}"


@dataclass
class Interposer:
    """Numbers the calls of this process below `root`, and acts at one of them.

    Attributes:
        at: the number of the call to act at; None only numbers.
        before, after: what to do then; `before` may raise, which takes the call's place.
        of: which calls are numbered.
        durable: where to note what fsync has made durable, and old files that a name no longer means (a directory).
        calls: those so far, as text, while nothing is `at`.
    """

    root: str
    at: int | None = None
    before: Act | None = None
    after: Act | None = None
    of: Literal["files", "reads", "objects"] = "files"
    durable: Path | None = None
    calls: list[str] = field(default_factory=list)
    paused: bool = False
    _count: int = 0

    def install(self) -> None:
        """Put this between the process and its files."""
        {
            "files": self._install_files,
            "reads": self._install_reads,
            "objects": self._install_objects,
        }[self.of]()

    def _install_files(self) -> None:
        for name in (
            "mkdir",
            "link",
            "replace",
            "rename",
            "unlink",
            "remove",
            "rmdir",
            "fsync",
            "truncate",
            "write",
        ):
            setattr(os, name, self._wrap(name, getattr(os, name)))
        opened = os.open
        os.open = lambda path, flags, *more, **options: (  # type: ignore[assignment]
            self._around(
                "open", path, lambda: opened(path, flags, *more, **options), options.get("dir_fd")
            )
            if flags & (os.O_CREAT | os.O_TRUNC)
            else opened(path, flags, *more, **options)
        )
        made = io.open

        def open_file(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
            if isinstance(file, int) or not set(mode) & set("wxa+"):
                return made(file, mode, *more, **options)
            return self._around("open", file, lambda: made(file, mode, *more, **options))

        io.open = builtins.open = open_file  # type: ignore[assignment]

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        known = "unlink" if name == "remove" else name

        def call(*given: Any, **options: Any) -> Any:
            about = given[1] if name in ("link", "replace", "rename") else given[0]
            return self._around(
                known, about, lambda: real(*given, **options), options.get("dir_fd")
            )

        return call

    def _around(
        self, name: str, about: Any, call: Callable[[], Any], dir_fd: int | None = None
    ) -> Any:
        path = "" if self.paused else self._find_path(about, dir_fd)
        if not path.startswith(f"{self.root}/"):
            return call()
        if name in ("write", "fsync") and not isinstance(about, int):
            return call()
        met = self._meet(name, path)
        if self.durable and name in ("replace", "rename", "unlink"):
            self._keep_old(path)
        if met and self.before:
            self._act(self.before, met)
        try:
            return call()
        finally:  # also where it was refused, as a directory that is there already
            if self.durable and name == "fsync":
                self._note_durable(path)
            if met and self.after:
                self._act(self.after, met)

    def _find_path(self, about: Any, dir_fd: int | None) -> str:
        try:
            if isinstance(about, int):
                return os.readlink(f"/proc/self/fd/{about}")
            path = os.fsdecode(about)
            if dir_fd is not None and not path.startswith("/"):
                path = f"{os.readlink(f'/proc/self/fd/{dir_fd}')}/{path}"
            return path
        except (OSError, TypeError):
            return ""

    def _meet(self, name: str, path: str) -> Call | None:
        call = Call(name, path, _STAGED.sub("*", path.removeprefix(f"{self.root}/")))
        number, self._count = self._count, self._count + 1
        if self.at is None:
            self.calls.append(str(call))
        return call if number == self.at else None

    def _act(self, act: Act, call: Call) -> None:
        self.paused = True
        _note_met(call)
        try:
            act(call)
        finally:
            self.paused = False

    # What a loss of power takes

    def _keep_old(self, path: str) -> None:
        """Keep the file that a name means now, as the name may mean it again after the loss of power."""
        assert self.durable
        if os.path.isfile(path) and not os.path.islink(path):
            self.paused = True
            kept = self.durable / f"{self._count:06d}"
            os.link(path, kept)
            self._note(f"old\t{kept}\t{path}")
            self.paused = False

    def _note_durable(self, path: str) -> None:
        self.paused = True
        if os.path.isdir(path):
            for entry in os.scandir(path):
                self._note(f"name\t{entry.inode()}\t{entry.path}")
            self._note(f"settled\t-\t{path}")
        elif os.path.exists(path):
            self._note(f"bytes\t{os.stat(path).st_ino}\t{path}")
        self.paused = False

    def _note(self, line: str) -> None:
        assert self.durable
        with open(self.durable / "notes", "a") as file:
            file.write(f"{line}\n")

    # Reads that lag behind

    def _install_reads(self) -> None:
        """Number the reads of the store, and answer one as if the newest write had not happened yet."""
        written: list[tuple[str, str, bytes | None]] = []
        get, create, put = Store.get, Store.create, Store.put
        lists: dict[str, Callable[..., Any]] = {
            name: getattr(Store, name) for name in ("keys", "parts", "find_marks")
        }

        def read(store: Store, key: str) -> bytes | None:
            before = [old for url, name, old in written if (url, name) == (store.url, key)]
            if self._met_read("get", store, key) and before:
                return before[-1]
            return get(store, key)

        def remember(real: Callable[..., None]) -> Callable[..., None]:
            def write(store: Store, key: str, data: bytes) -> None:
                old = get(store, key)
                real(store, key, data)
                written.append((store.url, key, old))

            return write

        def listing(name: str) -> Callable[..., Any]:
            def read_list(store: Store, *given: Any) -> Any:
                found = lists[name](store, *given)
                if not self._met_read(name, store, str(given[0]) if given else ""):
                    return found
                newest = {
                    part
                    for url, key, _ in written[-1:]
                    for part in (key, *f"{url}/{key}".split("/"))
                }
                keep = [
                    each
                    for each in found
                    if each not in newest and each.rpartition("/")[2] not in newest
                ]
                return {each: found[each] for each in keep} if isinstance(found, dict) else keep

            return read_list

        Store.get, Store.create, Store.put = read, remember(create), remember(put)  # type: ignore[method-assign]
        for name in lists:
            setattr(Store, name, listing(name))

    def _install_objects(self) -> None:
        for name in OBJECTS:
            setattr(obstore, name, self._wrap_request(name, getattr(obstore, name)))

    def _wrap_request(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(objects: Any, key: Any = None, *more: Any, **options: Any) -> Any:
            about = key if isinstance(key, str) else f"{len(key or ())} keys"
            met = None if self.paused else self._meet(name, f"{self.root}/{about}")
            if met and self.before:
                self._act(self.before, met)
            try:
                return real(objects, key, *more, **options)
            finally:
                if met and self.after:
                    self._act(self.after, met)

        return call

    def _met_read(self, name: str, store: Store, key: str) -> bool:
        path = f"{store.url.removeprefix('file://')}/{key}"
        met = self._meet(name, path) if path.startswith(self.root) else None
        if met:
            _note_met(met)
        return met is not None


def _note_met(call: Call) -> None:
    if fired := os.environ.get(FIRED):
        Path(fired).write_text(str(call))


# What to do at a call


def kill(call: Call) -> None:
    """End this process as the kernel ends it."""
    os.kill(os.getpid(), signal.SIGKILL)


def tear(share: float) -> Act:
    """Leave a file with a share of its bytes, and end."""

    def act(call: Call) -> None:
        if os.path.isfile(call.path):
            os.truncate(call.path, int(os.path.getsize(call.path) * share))
        kill(call)

    return act


def terminate(call: Call) -> None:
    """Send SIGTERM, as the kubelet does to a pod that is preempted."""
    os.kill(os.getpid(), signal.SIGTERM)


def fail(number: int) -> Act:
    """Let the call fail with this errno."""

    def act(call: Call) -> None:
        raise OSError(number, os.strerror(number), call.path)

    return act


def fill_disk(interposer: Interposer) -> Act:
    """Let the call and all later ones that need room fail, until this process ends."""

    def act(call: Call) -> None:
        interposer.at = None
        around = interposer._around

        def full(name: str, about: Any, real: Callable[[], Any], dir_fd: int | None = None) -> Any:
            takes_room = (
                name in ("open", "mkdir", "link", "write", "fsync") and not interposer.paused
            )
            if takes_room and interposer._find_path(about, dir_fd).startswith(
                f"{interposer.root}/"
            ):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(about))
            return around(name, about, real, dir_fd)

        interposer._around = full  # type: ignore[method-assign]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), call.path)

    return act


def jump_clock(seconds: float) -> Act:
    """Move this machine's clock of the day by so many seconds."""

    def act(call: Call) -> None:
        real = time.time
        time.time = lambda: real() + seconds  # type: ignore[assignment]

    return act


def run_meanwhile(work: Callable[[], int]) -> Act:
    """Let another process do `work` while this one stands still, to its end, or until it wants a lock that this one
    holds; then this one goes on, and `wait_for_others` waits for it."""

    def act(call: Call) -> None:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                _close_locks()
                code = work()
            except BaseException:
                traceback.print_exc()
            finally:  # never the exit functions of the one that stands still
                sys.stderr.flush()
                os._exit(code)
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if _is_locked_out(pid):
                _others.append(pid)
                return
            time.sleep(0.005)

    return act


def wait_for_others() -> None:
    """Wait for the processes that this one has gone on beside."""
    while _others:
        os.waitpid(_others.pop(), 0)


def _close_locks() -> None:
    """Close the files by which this process shares locks with the one that it is a fork of."""
    for name in os.listdir("/proc/self/fdinfo"):
        about = Path("/proc/self/fdinfo", name)
        if about.exists() and "lock:" in about.read_text():
            os.close(int(name))


def _is_locked_out(pid: int) -> bool:
    """Say whether a process waits for a lock: ``1: -> FLOCK ADVISORY WRITE PID …``."""
    lines = map(str.split, Path("/proc/locks").read_text().splitlines())
    return any(line[1] == "->" and line[5] == str(pid) for line in lines)


def lose_power(root: Path, durable: Path, what: str) -> list[str]:
    """Take from the files below `root` what nothing has made durable since the attempt began; return what went.

    POSIX promises no more: bytes are durable by an fsync of the file, a name by one of its directory.

    Args:
        durable: with ``begun``, the inodes of before, and what `Interposer` noted.
        what: ``names`` are lost, and what was renamed over is back; or the ``bytes`` of files whose names stay.
    """
    begun = {int(line) for line in (durable / "begun").read_text().split()}
    notes = [line.split("\t") for line in _read_lines(durable / "notes")]
    names = {(path, int(inode)) for kind, inode, path in notes if kind == "name"}
    contents = {int(inode) for kind, inode, _ in notes if kind == "bytes"}
    lost = []
    for path in sorted(root.rglob("*"), reverse=True):
        inode = path.lstat().st_ino
        if inode in begun or not path.exists() or not path.is_file():
            continue
        if what == "bytes" and inode not in contents and path.stat().st_size:
            os.truncate(path, 0)
            lost.append(str(path.relative_to(root)))
        if what == "names" and (str(path), inode) not in names:
            path.unlink()
            lost.append(str(path.relative_to(root)))
    if what == "names":
        lost += _bring_back(root, notes)
    return lost


def _bring_back(root: Path, notes: list[list[str]]) -> list[str]:
    """Let names mean what they meant before they were replaced or removed, unless their directory is durable since."""
    back = []
    for number, (kind, kept, path) in enumerate(notes):
        after = notes[number + 1 :]
        gone = any(each[0] == "settled" and each[2] == os.path.dirname(path) for each in after)
        if (
            kind == "old"
            and not gone
            and not os.path.exists(path)
            and os.path.isdir(os.path.dirname(path))
        ):
            os.link(kept, path)
            back.append(path.removeprefix(f"{root}/"))
    return back


def _read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
