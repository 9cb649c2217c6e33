"""Stages one after another in this very process, which keeps what the next one would load again.

The executor's threads ask for a stage by `Resident.start`, the main thread runs it in `Resident.serve`. A stage is the
same program with the same arguments as in a process of its own, and commits the same bytes: a stage seeds every stream
that it draws from, and what it changes of torch's determinism and random state is put back after it. A stage that
kills the process kills the pod: what was committed stands, and the next pod goes on behind it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuneloop.core.errors import EXIT_RETRY
from tuneloop.local.processes import Launcher, Process, base_environment
from tuneloop.local.warm import compatible, warmable

DEFAULT_SEED = 67280421310721
"""Of torch's generators in a fresh process (c10/core/GeneratorImpl.h)."""


@dataclass
class _Request:
    process: Process
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    stdout: Path | None


class Resident:
    """A launcher of the local executor; what is no stage of one process is started afresh.

    Attributes:
        stopped: set by `stop`; no further stage begins.
    """

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._env = base_environment({})
        self._fresh = Launcher(self._env, warm=())
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._names = itertools.count()
        self._current: Process | None = None
        self._apart: list[Process] = []

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, stdout: Path, stderr: Path, patient: bool
    ) -> Process:
        """Have `argv` run when its turn comes. A stage's output is this process's own."""
        if not (warmable(argv) and compatible(self._env, env)):
            apart = self._fresh.start(argv, env, cwd, stdout, stderr, patient)
            self._apart.append(apart)
            if self.stopped.is_set():
                apart.signal(signal.SIGTERM)
            return apart
        name = next(self._names)
        process = Process(lambda message: self._signal(process, message["number"]), name)
        self._requests.put(_Request(process, argv, env, cwd, stdout if stdout != stderr else None))
        return process

    def serve(self) -> None:
        """Run stages until `close`; to be called by the main thread, where signals arrive."""
        while (request := self._requests.get()) is not None:
            self._current = request.process
            code = EXIT_RETRY if self.stopped.is_set() else _run(request)
            self._current = None
            request.process.end(code)

    def stop(self) -> None:
        """Begin no further stage, each ends with the exit code of an interruption; tell those in other processes."""
        self.stopped.set()
        for process in self._apart:
            process.signal(signal.SIGTERM)

    def close(self) -> None:
        """End `serve`, once it has run what was asked for."""
        self._fresh.close()
        self._requests.put(None)

    def _signal(self, process: Process, number: int) -> None:
        """The stage hears the signal if it runs; SIGKILL is the end of us all."""
        if number != signal.SIGKILL:
            self.stop()
        if self._current is process:
            os.kill(os.getpid(), number)


def _run(request: _Request) -> int:
    module = request.argv[2]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_surroundings(request.env, request.cwd))
        if request.stdout:
            file = stack.enter_context(request.stdout.open("a"))
            stack.enter_context(contextlib.redirect_stdout(file))
        try:
            stage = getattr(importlib.import_module(module), module.rpartition(".")[2])
            return int(stage.run(request.argv[3:]))
        except Exception:  # a module that is no stage here, or can not be imported: as in a process of its own
            traceback.print_exc()
            return 1


@contextlib.contextmanager
def _surroundings(env: Mapping[str, str], cwd: Path) -> Iterator[None]:
    """A fresh process's environment, directory and random state; torch as it is at its start, afterwards."""
    before, place = dict(os.environ), Path.cwd()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    try:
        yield
    finally:
        os.chdir(place)
        os.environ.clear()
        os.environ.update(before)
        if torch := sys.modules.get("torch"):
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = True
            torch.manual_seed(DEFAULT_SEED)
