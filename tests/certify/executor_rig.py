"""Faults at the calls of the local executor and of its pods: a run of the toy pipeline as the commands make it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.certify import interpose, pod
from tests.certify.attempts import BY_HAND, LIMIT_S, Ends, Violation, read_met, run_apart
from tests.certify.check import Standing, compare, inspect_apart, list_temporary
from tests.certify.interpose import Act, Call, Interposer
from tests.certify.kinds import Injection, Place
from tests.waiting import until
from tuneloop.cli import run_cli
from tuneloop.local import executor, graph, processes, warm
from tuneloop.local.execution import Execution
from tuneloop.local.processes import WARM
from tuneloop.local.spawn import _list_descendants

ROOT = Path(__file__).parents[2]
RUN = "toy"
LOCAL = ("logs/", "nodes/")
"""Of the executor, below the run: another directory for each attempt."""


@contextmanager
def serve_forks(path: Path) -> Iterator[None]:
    """Have pods forked from a process that has all imported that this one has."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setsid()
            warm.LIBRARIES, sys.argv = (
                {"server": ()},
                ["warm", "server", str(path), "tests.certify.pod"],
            )  # type: ignore[assignment]
            warm.main()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:  # never the parent's exit functions, which would end the bucket: each fork of a pod comes here, too
            os._exit(code)
    try:
        until(path.exists)
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@dataclass
class ExecutorRig:
    """A place for one run at a time, executed by `tuneloop run` and `tuneloop resume`.

    Attributes:
        home: emptied before each injection.
        warm: socket of the process that pods are forked from.
        pods: number of a call of pods → output of the stage, and its number there.
        known: processes that stay: those that serve the bucket and the forks.
    """

    home: Path
    warm: Path
    calm: Standing | None = None
    pods: list[tuple[str, int]] = field(default_factory=list)
    known: set[int] = field(default_factory=set)

    def record(self) -> dict[Place, list[str]]:
        """Run undisturbed, and return the calls of the executor and of its pods."""
        self._clear()
        self.known = _list_processes()
        kept = self.home / "calls"

        def work() -> int:
            between = Interposer(self._root)
            between.install()
            code = self._execute("run")
            between.paused = True
            kept.write_text(json.dumps(between.calls))
            return code

        (self.home / "pods").mkdir()
        os.environ[pod.VARIABLE] = json.dumps(
            {"root": self._root, "record": str(self.home / "pods")}
        )
        ended = run_apart(work, self.home)
        del os.environ[pod.VARIABLE]
        if ended.code:
            raise Violation(f"the undisturbed run ended with {ended.code}: {ended.output}")
        self.calm = self._inspect()
        texts = []
        for path in sorted((self.home / "pods").iterdir()):
            key, calls = json.loads(path.read_text())
            self.pods += [(key, number) for number in range(len(calls))]
            texts += calls
        return {"executor": json.loads(kept.read_text()), "pods": texts}

    def run(self, injection: Injection) -> tuple[Ends, Standing]:
        """Make an injection, resume the run until it has ended, and look at what stands. Raises `Violation`."""
        assert self.calm
        self._clear()
        ends, ended = Ends(), run_apart(lambda: self._execute_disturbed(injection), self.home)
        ends.add(ended)
        while ended.code:
            if ends.by_hand == BY_HAND:
                raise Violation(f"did not end: {ended.output[-3000:]}")
            ended = run_apart(lambda: self._execute(self._verb()), self.home)
            ends.add(ended)
            ends.by_hand += 1
        ends.met = read_met(self.home)
        self._wait_for_processes()
        standing = self._inspect()
        problems, ends.temporary = compare(standing, self.calm), list_temporary(self.home / "tmp")
        if (waited := self.home / "waited").exists():
            ends.waited_s = sum(map(float, waited.read_text().split()))
        if problems:
            raise Violation("\n".join(problems))
        return ends, standing

    def _verb(self) -> str:
        return "resume" if Path(self._root, "run.json").exists() else "run"

    def _execute_disturbed(self, injection: Injection) -> int:
        chance = random.Random(injection.chance)
        between = Interposer(self._root, injection.at)
        acts: dict[str, Act] = {
            "executor's disk full": interpose.fail(errno.ENOSPC),
            "executor preempted (SIGTERM)": interpose.terminate,
            "two executors": interpose.run_meanwhile(lambda: self._execute(self._verb())),
        }
        between.before = acts.get(injection.kind)
        after: dict[str, Act] = {
            "executor killed": interpose.kill,
            "journal line torn": _tear_line(chance.random()),
            "journal line damaged": _damage_line(chance),
        }
        between.after = after.get(injection.kind)
        if injection.place == "pods":
            key, at = self.pods[injection.at]
            act = "kill" if injection.kind == "pod killed" else "terminate"
            once = str(self.home / "once")
            told = {"root": self._root, "key": key, "at": at, "act": act, "once": once}
            os.environ[pod.VARIABLE] = json.dumps(told)
        else:
            between.install()
        return self._execute("run")

    def _execute(self, verb: str) -> int:
        """Do what the command does, with pods forked from a process that has all imported."""
        processes.is_stage = executor.is_stage = lambda argv: True  # type: ignore[assignment]
        os.environ[WARM] = str(self.warm)
        start = processes.ProcessServer.start

        def start_pod(
            server: processes.ProcessServer, argv: list[str], *more: object
        ) -> processes.Process:
            words = ["tests.certify.pod" if word == "tests.unit.toy" else word for word in argv]
            return start(server, words, *more)  # type: ignore[arg-type]

        processes.ProcessServer.start = start_pod  # type: ignore[method-assign,assignment]
        Execution.pause = self._pause  # type: ignore[method-assign,assignment]
        # `continue` is skipped while `evaluate-after` starts: with a thread each, whose calls come first is chance.
        graph._thread = lambda work, *args: work(*args)
        words = [str(ROOT / "tests/unit/toy_pipeline.py"), "--run", RUN] if verb == "run" else [RUN]
        return run_cli([verb, *words, "--store", f"{self.home}/store", "--no-track"])

    @property
    def _pause(self) -> Callable[[Execution, float, str], bool]:
        """A pause by the virtual clock."""
        waited = self.home / "waited"

        def pause(execution: Execution, seconds: float, name: str) -> bool:
            with waited.open("a") as file:
                file.write(f"{seconds}\n")
            return execution.stopping.is_set() or execution.find_end_reason(name) is not None

        return pause

    def _inspect(self) -> Standing:
        store = f"{self.home}/store"
        found = inspect_apart(
            RUN, store, self.home, lambda: run_cli(["status", RUN, "--store", store])
        )
        return replace(found, keys=tuple(key for key in found.keys if not key.startswith(LOCAL)))

    def _wait_for_processes(self) -> None:
        """See that all processes of this run end."""
        deadline = time.monotonic() + LIMIT_S
        while left := _list_processes() - self.known:
            if time.monotonic() > deadline:
                raise Violation(f"processes are left: {left}")
            time.sleep(0.005)

    def _clear(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
        for name in ("tmp", "store"):
            (self.home / name).mkdir(parents=True)

    @property
    def _root(self) -> str:
        return f"{self.home}/store/{RUN}"


def _list_processes() -> set[int]:
    """Processes that descend from this one; those that have ended are waited for, and do not count."""
    found = set()
    for pid in _list_descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                os.waitpid(pid, os.WNOHANG)
            else:
                found.add(pid)
    return found


def _tear_line(share: float) -> Act:
    """Leave the newest line of the journal with a share of its bytes, and end."""

    def act(call: Call) -> None:
        data = Path(call.path).read_bytes()
        begin = data.rfind(b"\n", 0, len(data) - 1) + 1
        os.truncate(call.path, begin + int(share * (len(data) - begin)))
        interpose.kill(call)

    return act


def _damage_line(chance: random.Random) -> Act:
    """Change one byte of the journal, and end."""

    def act(call: Call) -> None:
        with open(call.path, "r+b") as file:
            data = file.read()
            at = chance.randrange(len(data))
            file.seek(at)
            file.write(bytes([data[at] ^ (1 << chance.randrange(8))]))
        interpose.kill(call)

    return act
