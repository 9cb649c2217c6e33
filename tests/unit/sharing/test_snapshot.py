"""Processes that are suspended while their devices are another's.

There is no GPU here. `cuda-checkpoint` is a stand-in that follows the ``--help`` of NVIDIA's 570.86.10: its actions,
which state each leads to, and a timeout for ``lock`` alone; what the driver does with memory is left out. The refusals
of a node without a driver are those of this one."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S, until
from tuneloop.core.errors import UserError
from tuneloop.inference.engine_loop import EngineLoop
from tuneloop.inference.engines.vllm import Vllm, check_engine_args, open_engine
from tuneloop.inference.refusals import Refused
from tuneloop.sharing import snapshot
from tuneloop.sharing.snapshot import (
    SnapshotFailed,
    check_snapshots,
    resume_processes,
    suspend_process,
)

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Mar  5 22:23:56 UTC 2024\nGCC version:  gcc 12.3.0\n"
STAND_IN = """\
import argparse, pathlib, sys

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--pid", required=True)
parser.add_argument("--timeout", type=int)
what = parser.add_mutually_exclusive_group(required=True)
what.add_argument("--get-state", action="store_true")
what.add_argument("--action", choices=["lock", "checkpoint", "restore", "unlock"])
asked = parser.parse_args()
here = pathlib.Path(__file__).parent
state = here / asked.pid  # of a process that uses CUDA
if asked.get_state:
    if not state.exists():
        sys.exit(f'Could not get state of process ID {asked.pid}: "initialization error"')
    print(state.read_text())
    sys.exit()
with (here / "calls").open("a") as calls:
    calls.write(f"{asked.action} {asked.pid}\\n")
before, after = {
    "lock": ("running", "locked"),
    "checkpoint": ("locked", "checkpointed"),
    "restore": ("checkpointed", "locked"),
    "unlock": ("locked", "running"),
}[asked.action]
trouble = here / f"{asked.action}-fails"
if (asked.timeout is not None) != (asked.action == "lock"):
    sys.exit("--timeout is of lock")
if trouble.exists() or not state.exists() or state.read_text() != before:
    why = trouble.read_text() if trouble.exists() else "invalid argument"
    sys.exit(f'Could not {asked.action} on process ID {asked.pid}: "{why}"')
state.write_text(after)
"""


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the stand-in, as `install_stand_in` leaves it."""
    install_stand_in(tmp_path, monkeypatch)
    have_driver(tmp_path, monkeypatch, "570.86.10")
    return tmp_path


def install_stand_in(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-in on PATH. Beside it is a file for each process that uses CUDA, with its state."""
    program = directory / "cuda-checkpoint"
    program.write_text(f"#!{sys.executable}\n{STAND_IN}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


def have_driver(directory: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    (directory / "version").write_text(DRIVER.format(version))
    monkeypatch.setattr(snapshot, "VERSION", directory / "version")


@pytest.fixture
def family() -> Iterator[list[int]]:
    """A process, its child and its grandchild."""
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; sys.stdin.read()'])"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {nested!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE) as first:
        try:
            yield until(lambda: found if len(found := descend(first.pid)) == 3 else [], child=first)
        finally:
            assert first.stdin
            first.stdin.close()  # the grandchild reads its end, and all end


def descend(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()  # each has one thread
    return [pid, *(each for child in children for each in descend(int(child)))]


def calls(cuda: Path) -> list[str]:
    return (cuda / "calls").read_text().split("\n")[:-1]


def test_a_process_is_suspended_with_all_that_it_started(cuda: Path, family: list[int]) -> None:
    """Those that use CUDA, that is; all are locked before the first is moved, as one may wait for another's work."""
    first, middle, last = family
    for pid in (first, last):
        (cuda / str(pid)).write_text("running")
    assert suspend_process(first) == [first, last]
    assert calls(cuda) == [
        f"{action} {pid}" for action in ("lock", "checkpoint") for pid in (first, last)
    ]
    assert {(cuda / str(pid)).read_text() for pid in (first, last)} == {"checkpointed"}
    resume_processes([first, last])
    assert calls(cuda)[4:] == [
        f"{action} {pid}" for action in ("restore", "unlock") for pid in (first, last)
    ]
    assert {(cuda / str(pid)).read_text() for pid in (first, last)} == {"running"}
    assert not (cuda / str(middle)).exists() and descend(first) == family, "the same processes"


@pytest.mark.parametrize("action", ["lock", "checkpoint", "restore", "unlock"])
def test_what_the_driver_does_not_do_is_an_error_with_its_words(cuda: Path, action: str) -> None:
    pid = os.getpid()
    (cuda / str(pid)).write_text("running" if action in ("lock", "checkpoint") else "checkpointed")
    (cuda / f"{action}-fails").write_text("out of memory")
    with pytest.raises(
        SnapshotFailed, match=f'Could not {action} on process ID {pid}: "out of memory"'
    ):
        suspend_process(pid) if action in ("lock", "checkpoint") else resume_processes([pid])


def test_a_process_without_cuda_is_not_taken_as_suspended(cuda: Path) -> None:
    with pytest.raises(
        SnapshotFailed,
        match=r'has nothing to suspend: Could not get state .*"initialization error"',
    ):
        suspend_process(os.getpid())
    (cuda / str(os.getpid())).write_text("checkpointed")
    with pytest.raises(SnapshotFailed, match="has nothing to suspend: checkpointed"):
        suspend_process(os.getpid())
    (cuda / "cuda-checkpoint").unlink()
    with pytest.raises(SnapshotFailed, match="cuda-checkpoint"):
        resume_processes([os.getpid()])


def test_a_node_that_can_not_is_refused_with_what_it_lacks(
    cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_snapshots("engine.snapshot", several=False)
    with pytest.raises(
        UserError, match=r"engine\.snapshot: True: needs NVIDIA's driver 610, not 570"
    ):
        check_snapshots("engine.snapshot", several=True)
    have_driver(tmp_path, monkeypatch, "610.57.04")
    check_snapshots("engine.snapshot", several=True)
    have_driver(tmp_path, monkeypatch, "550.54.15")
    with pytest.raises(UserError, match="needs NVIDIA's driver 570, not 550"):
        check_snapshots("engine.snapshot", several=False)
    have_driver(tmp_path, monkeypatch, "580.65.06")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        UserError, match="needs NVIDIA's cuda-checkpoint on PATH: add it to the image"
    ):
        check_snapshots("engine.snapshot", several=False)


@pytest.mark.skipif(snapshot.VERSION.exists(), reason="this machine has NVIDIA's driver")
def test_a_server_on_a_node_without_a_driver_is_one_line_and_exit_code_2() -> None:
    command = [sys.executable, "-m", "tuneloop.inference.server", "--port", "0"]
    asked = [*command, "--engine-args", '{"snapshot": true, "kv_cache_memory_bytes": 1073741824}']
    done = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT_S)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and re.match(
        "error: --engine-args snapshot: True: needs NVIDIA's driver, ", line
    )


@pytest.fixture
def loop(cuda: Path) -> Iterator[EngineLoop]:
    """The thread of a server's engine, whose process is this one. It has no vLLM: without sleep mode none is asked."""
    (cuda / str(os.getpid())).write_text("running")
    loop = EngineLoop(Vllm({"snapshot": True}))
    loop.start()
    yield loop
    loop.stop()
    loop.join(LIMIT_S)


def test_a_server_is_suspended_while_it_sleeps(
    cuda: Path, loop: EngineLoop, tmp_path: Path
) -> None:
    state = cuda / str(os.getpid())
    for _ in range(2):  # the second time as where the first answer was lost
        loop.call(loop.sleep, 2).result(LIMIT_S)
        assert state.read_text() == "checkpointed" and loop.asleep
    with pytest.raises(
        Refused, match="the engine sleeps"
    ) as refused:  # a call of CUDA would wait for ever
        loop.call(loop.change, tmp_path, 1, "digest").result(LIMIT_S)
    assert refused.value.status == 503
    for _ in range(2):
        loop.call(loop.wake_up).result(LIMIT_S)
        assert state.read_text() == "running" and not loop.asleep and not loop.engine.is_suspended
    assert [call.split()[0] for call in calls(cuda)] == ["lock", "checkpoint", "restore", "unlock"]


@pytest.mark.parametrize("action", ["checkpoint", "restore"])
def test_a_server_that_is_not_suspended_or_resumed_ends(
    cuda: Path, loop: EngineLoop, action: str
) -> None:
    ended: list[bool] = []
    loop.failed = lambda: ended.append(True)
    (cuda / f"{action}-fails").write_text("out of memory")
    asleep = loop.call(loop.sleep, 2)
    with pytest.raises(SnapshotFailed, match="out of memory"):
        (asleep if action == "checkpoint" else loop.call(loop.wake_up)).result(LIMIT_S)
    assert ended == [True] and "the engine failed (cuda-checkpoint: " in loop.trouble


def test_the_client_of_a_server_with_snapshots_has_its_device_by_turns() -> None:
    """It asks nobody for a driver: that is where the server is."""
    args = {"snapshot": True, "kv_cache_memory_bytes": 1 << 30}
    assert open_engine("http://a:1", args, 1.0).sleeps is True  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="--engine-args snapshot: 'yes': must be true or false"):
        check_engine_args({"snapshot": "yes"})
