"""Carry out the plan of a certificate: several processes, each with places for runs of its own."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

# Threads of before a fork would be missing in it: OpenBLAS and Arrow's allocator start theirs when they are imported.
os.environ.update(
    OPENBLAS_NUM_THREADS="1", JE_ARROW_MALLOC_CONF="background_thread:false", OMP_NUM_THREADS="1"
)
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as the executor has it, or pods could not be forks

import hera.workflows
import pyarrow.parquet

import tuneloop.ui.report
from tests.certify import bucket
from tests.certify.attempts import Violation
from tests.certify.certificate import Certificate, Outcome
from tests.certify.executor_rig import ExecutorRig, serve_forks
from tests.certify.kinds import Injection, Place, make_plan
from tests.certify.sequence import run_sequence
from tests.certify.stages_rig import StagesRig
from tests.certify.week import WeekRig
from tuneloop.local.spawn import adopt_orphans, die_with_parent, end_all
from tuneloop.local.warm import STAGES

PRELOADED = (hera.workflows, pyarrow.parquet, tuneloop.ui.report)
"""Imported here, once, and not by each attempt."""
Rig = StagesRig | ExecutorRig | WeekRig
PLACES: Sequence[Sequence[Place]] = (
    ("files", "reads", "objects", "requests"),
    ("executor", "pods"),
    ("clock",),
)
"""Those of each rig."""


@dataclass(frozen=True)
class Task:
    """What a certificate is asked for.

    Attributes:
        only: the index of the injection that is made alone.
        kind: only those whose kind contains this.
        real: of stages that train and sample with torch, without an executor, and not of the toy's.
    """

    seed: int
    injections: int
    only: int | None = None
    kind: str = ""
    real: bool = False


@dataclass(frozen=True)
class Begun:
    """What a worker says first: the calls of the undisturbed runs, and their roots."""

    calls: dict[Place, list[str]]
    roots: dict[str, str]


def make_certificate(task: Task, jobs: int = 2) -> Certificate:
    """Carry out a plan by so many processes at a time, and return what it came to."""
    began = time.monotonic()
    home = Path(
        tempfile.mkdtemp(prefix="certify-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    )
    begun, outcomes, processor_s = list[Begun](), list[Outcome](), 0.0
    adopt_orphans()
    try:
        workers = [
            _Worker(home / str(number), task, (number, jobs))
            for number in range(1 if task.only is not None else jobs)
        ]
        for worker in workers:
            for told in worker.listen():
                if isinstance(told, Begun):
                    begun.append(told)
                    continue
                if isinstance(told, float):
                    processor_s += told
                    continue
                outcomes.append(told)
                if told.problem:
                    print(
                        f"\nviolation {told.injection}\n{told.problem}", file=sys.stderr, flush=True
                    )
    finally:
        end_all()  # where one process has failed, the others
        shutil.rmtree(home, ignore_errors=True)
    for other in begun[1:]:
        _check_same(begun[0], other)
    outcomes.sort(key=lambda each: each.injection.index)
    counts = {place: len(calls) for place, calls in begun[0].calls.items()}
    return Certificate(
        task.seed, begun[0].roots, counts, outcomes, time.monotonic() - began, processor_s
    )


def _check_same(one: Begun, other: Begun) -> None:
    """See that two undisturbed runs have the same calls: else a number would not say where."""
    assert one.roots == other.roots, (one.roots, other.roots)
    for place, calls in one.calls.items():
        pairs = enumerate(zip_longest(calls, other.calls[place]))
        different = [(number, *pair) for number, pair in pairs if pair[0] != pair[1]]
        assert not different, f"two undisturbed runs differ at {place} call {different[:5]}"


class _Worker:
    """A process that carries out its share of a plan."""

    def __init__(self, home: Path, task: Task, share: tuple[int, int]) -> None:
        self.told = home.with_suffix(".told")
        self.told.touch()
        parent, self.pid = os.getpid(), os.fork()
        if self.pid:
            return
        code = 1
        try:
            die_with_parent(parent)
            with self.told.open("ab", buffering=0) as out:
                _carry_out(home, task, share, out)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def listen(self) -> Iterator[Begun | Outcome | float]:
        """Yield what the process says, until it has ended; last the processor seconds that it took."""
        ended, status = 0, 0
        with self.told.open("rb") as heard:
            while not ended:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                yield from _read_all(heard)
                time.sleep(0.05)
        if status:
            raise RuntimeError("a process of the certificate has failed; see above")


def _read_all(heard: BinaryIO) -> Iterator[Begun | Outcome | float]:
    while True:
        at = heard.tell()
        try:
            yield pickle.load(heard)
        except (EOFError, pickle.UnpicklingError):  # not there yet, or not whole
            heard.seek(at)
            return


def _carry_out(home: Path, task: Task, share: tuple[int, int], out: BinaryIO) -> None:
    home.mkdir()
    adopt_orphans()
    os.environ["TUNELOOP_CACHE"] = str(home / "stages" / "cache")
    with ExitStack() as stack:
        rigs = _open_rigs(home, task.real, stack)
        calls: dict[Place, list[str]] = {}
        for rig in rigs:
            calls |= rig.record()
        roots = {
            name: rig.calm.root
            for name, rig in zip(("stages", "pipeline", "week"), rigs)
            if rig.calm
        }
        out.write(pickle.dumps(Begun(calls, roots)))
        of = {place: rig for rig, places in zip(rigs, PLACES) for place in places}
        plan = make_plan(calls, task.injections, task.seed)
        for injection in plan if task.only is not None else plan[share[0] :: share[1]]:
            if task.only in (None, injection.index) and task.kind in injection.kind:
                out.write(pickle.dumps(_make(of[injection.place], injection)))
    out.write(pickle.dumps(float(sum(os.times()[:4]))))


def _open_rigs(home: Path, real: bool, stack: ExitStack) -> Sequence[Rig]:
    """Open the places for runs: of the stages, and but for real ones also of the executor and of a simulated week."""
    if real:
        from tests.certify.real_sequence import list_real_steps

        for name in (
            STAGES
        ):  # nothing of torch may have computed here: its threads would be missing in the forks
            import_module(name)
        return [StagesRig(home / "stages", stack.enter_context(bucket.serve()), list_real_steps)]
    _warm_up(home)
    stages = StagesRig(home / "stages", stack.enter_context(bucket.serve()))
    stack.enter_context(serve_forks(home / "warm"))
    return [stages, ExecutorRig(home / "pods", home / "warm"), WeekRig(home / "week")]


def _make(rig: Rig, injection: Injection) -> Outcome:
    try:
        ends, standing = rig.run(injection)
    except Violation as violation:
        return Outcome(injection, problem=str(violation))
    except BaseException as error:
        error.add_note(f"at injection {injection}")
        raise
    return Outcome(injection, standing.root, standing.left, ends=ends)


def _warm_up(home: Path) -> None:
    """Run all stages once here, so that what they look up but once is known to every attempt."""
    said = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        for _ in range(2):  # one of them wants a second attempt
            run_sequence(f"file://{home}/warm-up/store/run")
    finally:
        os.dup2(said, 2)
        os.close(said)
        os.close(nothing)
    shutil.rmtree(home / "warm-up")
    gc.collect()
    gc.freeze()  # forks do not walk, and so do not copy, what is here
