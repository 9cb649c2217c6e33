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
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

# Threads of before a fork would be missing in it: OpenBLAS and Arrow's allocator start theirs when they are imported.
os.environ.update(OPENBLAS_NUM_THREADS="1", JE_ARROW_MALLOC_CONF="background_thread:false", OMP_NUM_THREADS="1")
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
from tuneloop.local.spawn import adopt_orphans, die_with, end_all

PRELOADED = (hera.workflows, pyarrow.parquet, tuneloop.ui.report)
"""Imported here, once, and not by each attempt."""
Rig = StagesRig | ExecutorRig | WeekRig


@dataclass(frozen=True)
class Begun:
    """What a worker says first: the calls of the undisturbed runs, and their roots."""

    calls: dict[Place, list[str]]
    roots: dict[str, str]


def make_certificate(
    seed: int, injections: int, *, only: int | None = None, kind: str = "", jobs: int = 2
) -> Certificate:
    """Carry out a plan, and return what it came to.

    Args:
        only: the index of the injection that is made alone.
        kind: only those whose kind contains this.
        jobs: processes at a time.
    """
    began = time.monotonic()
    home = Path(tempfile.mkdtemp(prefix="certify-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    begun, outcomes, processor_s = list[Begun](), list[Outcome](), 0.0
    adopt_orphans()
    try:
        workers = [
            _Worker(home / str(number), seed, injections, (number, jobs), only, kind)
            for number in range(1 if only is not None else jobs)
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
                    print(f"\nviolation {told.injection}\n{told.problem}", file=sys.stderr, flush=True)
    finally:
        end_all()  # where one process has failed, the others
        shutil.rmtree(home, ignore_errors=True)
    for other in begun[1:]:
        _check_same(begun[0], other)
    outcomes.sort(key=lambda each: each.injection.index)
    counts = {place: len(calls) for place, calls in begun[0].calls.items()}
    return Certificate(seed, begun[0].roots, counts, outcomes, time.monotonic() - began, processor_s)


def _check_same(one: Begun, other: Begun) -> None:
    """See that two undisturbed runs have the same calls: else a number would not say where."""
    assert one.roots == other.roots, (one.roots, other.roots)
    for place, calls in one.calls.items():
        pairs = enumerate(zip_longest(calls, other.calls[place]))
        different = [(number, *pair) for number, pair in pairs if pair[0] != pair[1]]
        assert not different, f"two undisturbed runs differ at {place} call {different[:5]}"


class _Worker:
    """A process that carries out its share of a plan."""

    def __init__(
        self, home: Path, seed: int, injections: int, share: tuple[int, int], only: int | None, kind: str
    ) -> None:
        self.told = home.with_suffix(".told")
        self.told.touch()
        parent, self.pid = os.getpid(), os.fork()
        if self.pid:
            return
        code = 1
        try:
            die_with(parent)
            with self.told.open("ab", buffering=0) as out:
                _carry_out(home, seed, injections, share, only, kind, out)
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


def _carry_out(
    home: Path, seed: int, injections: int, share: tuple[int, int], only: int | None, kind: str, out: BinaryIO
) -> None:
    home.mkdir()
    adopt_orphans()
    os.environ["TUNELOOP_CACHE"] = str(home / "stages" / "cache")
    _warm_up(home)
    with ExitStack() as stack:
        stages = StagesRig(home / "stages", stack.enter_context(bucket.serve()))
        stack.enter_context(serve_forks(home / "warm"))
        pods, week = ExecutorRig(home / "pods", home / "warm"), WeekRig(home / "week")
        rigs: Sequence[Rig] = (stages, pods, week)
        calls: dict[Place, list[str]] = {}
        for rig in rigs:
            calls |= rig.record()
        roots = {name: rig.calm.root for name, rig in zip(("stages", "pipeline", "week"), rigs) if rig.calm}
        out.write(pickle.dumps(Begun(calls, roots)))
        of: dict[Place, Rig] = {"executor": pods, "pods": pods, "clock": week}
        plan = make_plan(calls, injections, seed)
        for injection in plan if only is not None else plan[share[0] :: share[1]]:
            if only in (None, injection.index) and kind in injection.kind:
                out.write(pickle.dumps(_make(of.get(injection.place, stages), injection)))
    out.write(pickle.dumps(float(sum(os.times()[:4]))))


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
