"""The cache of remote files: what is fetched, by whom, what stays, and what a kill leaves."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from benchmarks import checkpoint_readers
from benchmarks.store_bytes import CountingS3, serve_s3
from tuneloop.core import cache
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import RANGE

BIG = 3 * RANGE + 5
USE = "import sys; from tuneloop.core.artifacts import Artifact; a = Artifact(sys.argv[1]); a.part('big')"


class Held(CountingS3):
    """Answers requests for ``big`` only once the `gate` is open: all but the first two, a HEAD and a range."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gate, self.waits, self.asked = threading.Event(), threading.Event(), 0

    def path(self, key: str) -> Path:
        if key.endswith("/big"):
            self.asked += 1
            if self.asked > 2 and not self.gate.is_set():
                self.waits.set()
                self.gate.wait()
        return super().path(key)


def commit(name: str, **files: bytes) -> str:
    """Commit an artifact; what the store is asked for from here on counts."""
    draft = Draft(f"s3://bucket/{name}")
    for file, data in files.items():
        (draft.path / file).write_bytes(data)
    draft.commit(stage="test")
    return Artifact(draft.url).ref


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TUNELOOP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def store(tmp_path: Path, root: Path) -> Iterator[CountingS3]:
    with serve_s3(tmp_path / "objects") as server:
        yield server


@pytest.fixture
def held(tmp_path: Path, root: Path) -> Iterator[Held]:
    with serve_s3(tmp_path / "objects", Held) as server:
        assert isinstance(server, Held)
        server.gate.set()
        yield server
        server.gate.set()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def start(code: str, ref: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, ref], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def read_line(pipe: IO[str] | None) -> str:
    assert pipe
    return pipe.readline().strip()


def begin_fetch(held: Held, ref: str) -> subprocess.Popen[str]:
    """Start a process that has fetched some of ``big`` and waits for the rest."""
    held.log.clear()
    held.asked = 0
    held.waits.clear()
    held.gate.clear()
    process = start(USE, ref)
    held.waits.wait()
    return process


def test_a_part_costs_its_own_bytes_once(store: CountingS3) -> None:
    ref = commit("a", big=os.urandom(BIG), small=b"12345", other=b"678", empty=b"")
    store.log.clear()
    artifact = Artifact(ref)
    assert (
        artifact.part("small").read_bytes() == b"12345"
        and artifact.part("empty").read_bytes() == b""
    )
    assert [size for _, key, size in store.log if not key.endswith("manifest.json")] == [5, 0]
    assert store.read("/other") == store.read("/big") == 0
    artifact.part("big"), Artifact(ref).part("big")
    sizes = sorted(
        size for method, key, size in store.log if method == "GET" and key.endswith("/big")
    )
    assert sizes == [5, RANGE, RANGE, RANGE]
    assert artifact.path == artifact.part("big").parent and store.read("/data-") == BIG + 5 + 3


def test_two_processes_fetch_once_and_see_no_half_file(held: Held, root: Path) -> None:
    ref = commit("a", big=os.urandom(BIG))
    one = begin_fetch(held, ref)
    two = start(f"{USE}; print(a.part('big').stat().st_size)", ref)
    assert [path.parent.suffix for path in root.rglob("big")] == [".partial"]
    held.gate.set()
    assert read_line(two.stdout) == str(BIG) and (one.wait(), two.wait()) == (0, 0)
    assert held.read("/big") == BIG


def test_eight_readers_of_a_node_cost_the_store_an_eighth_of_eight_apart(
    store: CountingS3, tmp_path: Path
) -> None:
    """As servers of a fleet do that are told to bring in a checkpoint; the benchmark has the seconds, too."""
    ref, read = checkpoint_readers.commit_checkpoint("s3://bucket/checkpoint", BIG), {}
    for name, caches in checkpoint_readers.list_caches(tmp_path, 8).items():
        store.log.clear()
        checkpoint_readers.read_at_once(ref, caches)
        read[name] = store.read("/model/")
    assert read == {"each its own": 8 * BIG, "their node's": BIG}


def test_a_fetch_that_was_killed_is_taken_over(held: Held, root: Path) -> None:
    data = os.urandom(BIG)
    ref = commit("a", big=data)
    one = begin_fetch(held, ref)
    two = start(USE, ref)
    one.send_signal(signal.SIGKILL)
    one.wait()
    held.gate.set()
    assert two.wait() == 0 and names(root) == ["big"]
    assert Artifact(ref).part("big").read_bytes() == data


def test_what_a_killed_fetch_left_makes_room_for_others(
    held: Held, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, other = commit("a", big=os.urandom(BIG)), commit("b", small=b"1" * 100)
    one = begin_fetch(held, ref)
    one.send_signal(signal.SIGKILL)
    one.wait()
    held.gate.set()
    assert names(root) == ["big"]
    monkeypatch.setenv("TUNELOOP_CACHE_BYTES", "1000")
    Artifact(other).part("small")
    assert names(root) == ["small"] and len(list(root.iterdir())) == 1, "empty directories go, too"


CHANGES = {
    "open",
    "fcntl.flock",
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.truncate",
    "os.utime",
}


def die_at(moment: int) -> None:
    """Kill this process right before it opens, locks or changes a file for the time number `moment`."""
    left = [moment]

    def hook(event: str, _: tuple[object, ...]) -> None:
        if event in CHANGES:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def test_a_kill_at_any_moment_leaves_nothing_that_is_wrong_or_stays(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process that evicts a file, finds a damaged one, and fetches it anew in two writes."""
    monkeypatch.setenv("TUNELOOP_CACHE_BYTES", "25")
    one, two = (root / f"sha256-{name}" for name in "12")

    def fetch(path: Path) -> None:
        for part in (b"1234", b"567890"):
            with path.open("r+b") as file:
                file.seek(4 * (part != b"1234"))
                file.write(part)

    def take(directory: Path) -> None:
        held = cache.take_file(
            directory, "model/x", 10, lambda path: path.read_bytes() == b"1234567890", fetch
        )
        assert held and held.read() == b"1234567890"
        held.close()

    moment, killed = 0, True
    while killed:
        moment += 1
        take(one)
        for directory, data in ((one, b"1234567890"), (two, b"damaged")):
            (directory / "model").mkdir(parents=True, exist_ok=True)
            (directory / "model/x").write_bytes(data)
        os.utime(one / "model/x", (1, 1))
        (root / "sha256-3").mkdir(exist_ok=True)
        (root / "sha256-3/y").write_bytes(b"1" * 10)
        if not (child := os.fork()):
            try:
                die_at(moment)
                take(two)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        killed = os.WIFSIGNALED(status)
        assert killed or os.WEXITSTATUS(status) == 0
        take(two)
        take(one)
        sizes = [path.stat().st_size for path in root.rglob("*") if path.is_file()]
        assert sum(sizes) <= 25 and set(sizes) == {10}
    assert moment > 20


def test_the_least_recently_used_goes_first_and_nothing_in_use(
    store: CountingS3, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELOOP_CACHE_BYTES", "2500")
    refs = {name: commit(name, **{name: name.encode() * 1000}) for name in "abcd"}
    used = Artifact(refs["a"])
    (path,) = (used.part("a"),)
    Artifact(refs["b"]).part("b")
    Artifact(refs["c"]).part("c")
    assert names(root) == ["a", "c"], "a is older than b, and in use"
    del used
    os.utime(path, (1, 1))
    os.utime(Artifact(refs["c"]).part("c"), (2, 2))
    Artifact(refs["a"]).part("a")
    Artifact(refs["d"]).part("d")
    assert names(root) == ["a", "d"]
    store.log.clear()
    assert Artifact(refs["b"]).part("b").read_bytes() == b"b" * 1000 and store.read("/b$") == 1000


def test_what_another_process_uses_stays_until_it_ends(
    store: CountingS3, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, other = commit("a", big=b"1" * 1000), commit("b", small=b"2" * 1000)
    process = start(f"{USE}; print('here', flush=True); sys.stdin.read()", ref)
    assert read_line(process.stdout) == "here"
    monkeypatch.setenv("TUNELOOP_CACHE_BYTES", "1500")
    Artifact(other).part("small")
    assert names(root) == ["big", "small"], "a stage takes what it needs"
    process.kill()
    process.wait()
    Artifact(commit("c", third=b"3" * 1000)).part("third")
    assert names(root) == ["third"]


def test_damage_is_found_here_and_there(store: CountingS3, root: Path) -> None:
    # A zero at the end would come back: the copy has its whole size before it is filled.
    ref = commit("a", big=os.urandom(BIG - 1) + b"1", small=b"12345")
    for name in ("big", "small"):
        path = Artifact(ref).part(name)
        good = path.read_bytes()
        for bad in (good[:-1], bytes([good[0] ^ 1]) + good[1:]):
            path.write_bytes(bad)
            assert Artifact(ref).part(name).read_bytes() == good, (
                "of the copy here: it is fetched again"
            )
        (key,) = (key for key in store.keys("bucket/a/") if key.endswith(f"/{name}"))
        for bad in (good[:-1], good + b"1", bytes([good[0] ^ 1]) + good[1:]):
            path.unlink()
            store.path(key).write_bytes(bad)
            with pytest.raises(
                Corrupt, match=f"s3://{key}': differs from its manifest .*; restore it"
            ):
                Artifact(ref).part(name)


def test_nothing_else_in_the_directory_is_deleted(
    store: CountingS3, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir()
    (root / "mine").write_bytes(b"1" * 5000)
    monkeypatch.setenv("TUNELOOP_CACHE_BYTES", "10")
    Artifact(commit("a", x=b"1" * 1000)).part("x")
    Artifact(commit("b", y=b"2" * 1000)).part("y")
    assert names(root) == ["mine", "y"]


def test_the_limit_is_a_number(
    store: CountingS3, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNELOOP_CACHE_BYTES", "50Gi")
    with pytest.raises(
        UserError, match="TUNELOOP_CACHE_BYTES: '50Gi': is not a number of bytes; write one"
    ):
        Artifact(commit("a", x=b"1")).part("x")


def test_the_limit_is_half_of_what_would_be_free(root: Path) -> None:
    root.mkdir()
    room = os.statvfs(root)
    free = room.f_bavail * room.f_frsize
    assert cache._read_limit(root, 10 * free) == pytest.approx(5.5 * free, rel=0.05)


@pytest.mark.parametrize("of", ["sha256-1.partial", "sha256-1"])
@pytest.mark.parametrize("there", [False, True])
def test_a_directory_that_another_process_tidies_away_is_made_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, of: str, there: bool
) -> None:
    """Two processes of a pod begin with the same artifact: one removes the empty directory that the other enters."""
    make, removed = os.mkdir, []

    def make_and_lose(path: Path, mode: int) -> None:
        if path.name != of or removed:
            return make(path, mode)
        removed.append(path)
        if there:
            raise FileExistsError  # it was there, and is gone before anybody looks again
        make(path, mode)
        os.rmdir(path)

    monkeypatch.setattr(os, "mkdir", make_and_lose)
    held = cache.take_file(
        cache.open_directory("sha256:1"), "a/b", 1, lambda path: True, lambda path: None
    )
    assert held and removed
    held.close()
    assert names(root) == ["b"]
