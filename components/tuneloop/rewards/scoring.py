"""Score completions with named rewards, each call isolated from the stage and from every other call.

A reward is a module of the family ``rewards`` (or ``package.module:function``)::

    RANGE = (0.0, 1.0)  # the default

    def score(completion: str, answer: str, metadata: dict) -> float | None | tuple[float, dict[str, float]]: ...

None says that it cannot judge (the gold answer does not parse, metadata is missing); a pair adds what the breakdown is
to say besides; `Escape` is for a completion whose program tried to leave its sandbox. An episode in which the policy
tried to leave its environment is an escape whatever its rewards say.

Rewards run in a forked process that reports after every call; the parent watches the clock. The stage itself calls only
those whose module says ``TRUSTED = True``: no completion can make them hang, crash or take memory. Whatever a call does
(raise, exit, crash the interpreter, hang in C with signals blocked, return NaN or something outside `RANGE`), the
process is replaced where it must be and the next call is judged afresh: one bad call costs its own row only. Modules
are imported before the fork, so that a replacement starts in milliseconds.

A policy must gain nothing by how its text is judged. A call that spends all its time computing, or twice runs out of
memory or kills its process, was ended by the completion, and that is a score: the least that the reward can give. A
call that waits, or whose process got no processor, was hindered by its host: it has no score, but may get one later.

A reward whose judge is away (`tuneloop.rewards.outages`) is called again later, as long as it
takes: a judge that has no room must cost no score."""

import contextlib
import ctypes
import functools
import inspect
import json
import math
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from numbers import Real
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import xxhash

from tuneloop.core import plugins
from tuneloop.core.errors import UserError
from tuneloop.rewards.outages import (
    TRIES,
    Outage,
    OutageReport,
    compute_delay,
    find_outage,
    read_status,
)
from tuneloop.rewards.sandbox import find_sandbox
from tuneloop.rewards.score_record import ScoreRecord
from tuneloop.workflow.settings import PROCESS

Kind = Literal["score", "timeout", "infra_error", "unverifiable", "escape"]
Row = Mapping[str, Any]
REPORTED = 1000
"""Calls in the stage's own process between two reports of progress, at which the stage may also stop."""
OUT_OF_RANGE, GARBAGE = "outside its RANGE", "is no JSON"
"""In the reason of an ``infra_error``: what a reward returned, and what its judge answered."""
POLL_S = 1.0
"""The longest wait, in seconds, without a look at whether the stage is to stop."""
RAISED, RETURNED = "raised", "returned"
"""The start of the reason of an ``infra_error`` that the reward itself caused: the same text would cause it again."""
AWAY = "away"
"""In place of a verdict's kind, between a process that judges and the stage: it waits."""
KINDS: tuple[Kind, ...] = ("score", "timeout", "infra_error", "unverifiable", "escape")


class Escape(Exception):
    """Raised by a reward: the program in a completion tried to leave its sandbox, and was stopped."""


class Unverifiable(Exception):
    """Raised by a reward that cannot judge a row, whatever its completion: says what is missing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of judging one completion.

    Attributes:
        outcome: ``score``, or what kept it from one: ``escape``, else the first failure among its rewards.
        score: the weighted sum of its rewards; None unless `outcome` is ``score``.
        breakdown: reward → its value before weighting, or what went wrong; ``reward.part`` → what it says besides.
    """

    outcome: Kind
    score: float | None
    breakdown: dict[str, float | str]


class Reward(NamedTuple):
    """A reward function, the closed interval it promises to stay in, whether it judges an episode with an environment
    only (``NEEDS_EPISODE``), so that it cannot check a gold answer by itself, and whether it is ``TRUSTED``."""

    function: Callable[[str, str, dict[str, Any]], float | tuple[float, dict[str, float]] | None]
    low: float
    high: float
    needs_episode: bool = False
    trusted: bool = False
    write_answers: Callable[[str, dict[str, Any]], list[str]] | None = None
    """Writes completions that state a gold answer, and earn full marks: see `proof`."""
    source: str = ""
    """The xxh3-64 of the file that has the function, so that what other code said is not taken for its verdict."""


class _Verdict(NamedTuple):
    kind: Kind
    value: float | str
    parts: Mapping[str, float] = {}
    ended_by: str = ""
    """What the completion did to its judge: ``timeout`` or ``crash``."""


class _Away(Exception):
    """A call found its judge away."""

    def __init__(self, outage: Outage) -> None:
        self.outage = outage
        super().__init__(outage.reason)


class _Limits(NamedTuple):
    seconds: float
    memory: int | None
    punish: bool


class _Job(NamedTuple):
    row: int
    name: str


@functools.lru_cache(maxsize=256)
def find_reward(name: str) -> Reward:
    """Find the reward called `name`. Raises UserError where it is unknown, not importable, or not a reward."""
    try:
        plugin = plugins.load_variant("rewards", name)
    except ImportError as error:
        raise UserError(
            "rewards", name, f"needs {error.name or error}; pip install 'tuneloop[rewards]'"
        ) from error
    function = plugin if callable(plugin) else getattr(plugin, "score", None)
    if not callable(function):
        raise UserError("rewards", name, "has no function score(completion, answer, metadata)")
    home = sys.modules.get(getattr(function, "__module__", ""))
    low, high = getattr(function, "RANGE", getattr(home, "RANGE", (0.0, 1.0)))
    episode = getattr(function, "NEEDS_EPISODE", getattr(home, "NEEDS_EPISODE", False))
    # Only the plugin's own TRUSTED counts: a wrapper of it, or another function of its module, need not be trusted.
    return Reward(
        function,
        float(low),
        float(high),
        needs_episode=bool(episode),
        trusted=bool(getattr(plugin, "TRUSTED", False)),
        write_answers=getattr(home, "write_answers", None),
        source=_hash_source(function),
    )


def _hash_source(function: Callable[..., Any]) -> str:
    """Hash the file that has a function; empty where there is none."""
    with contextlib.suppress(TypeError, OSError):
        return xxhash.xxh3_64_hexdigest(Path(inspect.getfile(function)).read_bytes())
    return ""


@functools.lru_cache(maxsize=1024)
def parse_spec(text: str) -> Mapping[str, float]:
    """Parse a ``reward_spec`` (JSON object name → finite weight). Raises UserError: it is none, or names no reward."""
    try:
        spec = json.loads(text)
    except (TypeError, ValueError):
        spec = None
    if not isinstance(spec, dict) or not spec:
        raise UserError("rewards", text, 'must name at least one reward: {"exact": 1.0}')
    for name, weight in spec.items():
        if (
            isinstance(weight, bool)
            or not isinstance(weight, int | float)
            or not math.isfinite(weight)
        ):
            raise UserError(f"rewards.{name}", weight, "must be a finite number")
    return {name: float(weight) for name, weight in spec.items()}


def may_pass(outcome: Outcome) -> bool:
    """Return whether judging again may give a score: no reward failed by itself, as it would again on the same text."""
    reasons = [value for value in outcome.breakdown.values() if isinstance(value, str)]
    return outcome.outcome in ("timeout", "infra_error") and not any(
        r.startswith((RAISED, RETURNED)) for r in reasons
    )


def compute_full_marks(spec: Mapping[str, float]) -> float:
    """Compute the most that can be earned under `spec`: each reward at the end of its range that its weight favours."""
    rewards = {name: find_reward(name) for name in spec}
    return math.fsum(w * (rewards[n].high if w > 0 else rewards[n].low) for n, w in spec.items())


def score_all(
    rows: Sequence[Row],
    *,
    timeout_s: float,
    workers: int = 1,
    memory: int | None = None,
    punish: bool = True,
    progress: Callable[[int], None] | None = None,
    record: ScoreRecord | None = None,
) -> list[Outcome]:
    """Score every row by its own rewards; return one outcome a row, in order. Raises UserError: a reward that does not
    exist or a malformed spec; before anything is scored.

    Args:
        rows: each with ``completion``, ``answer``, ``reward_spec`` (`parse_spec`) and ``metadata`` (JSON, or empty).
        timeout_s: seconds that one call of a reward that is not trusted may take.
        workers: processes; each takes every `workers`-th call.
        memory: bytes that judging may take in each, beyond what the stage itself has; None: no limit.
        punish: whether a completion that ends a reward's call gets the least that this can give, and ``NAME.timeout``
            or ``NAME.crash`` in its breakdown; else, and where that is infinite, it has no score.
        progress: called with the number of finished calls (a row has one for each of its rewards); may raise to stop.
            Where calls wait, it is called each second.
        record: what was said before, which is not asked again; new verdicts are added.
    """
    specs = [parse_spec(row["reward_spec"]) for row in rows]
    rewards = {name: find_reward(name) for name in {name for spec in specs for name in spec}}
    jobs = [_Job(index, name) for index, spec in enumerate(specs) for name in spec]
    verdicts = _take_recorded(jobs, rows, rewards, record)
    report = OutageReport()
    trusted = [job for job in jobs if rewards[job.name].trusted and job not in verdicts]
    _judge_trusted(trusted, rows, rewards, verdicts, report, progress)
    jobs = [job for job in jobs if job not in verdicts]
    limits = _Limits(timeout_s, memory, punish)
    pool = [
        _Worker(share, rows, rewards, limits, report)
        for i in range(workers)
        if (share := jobs[i::workers])
    ]

    def take(arrived: Iterable[tuple[_Job, _Verdict]]) -> None:
        for job, verdict in arrived:
            verdicts[job] = verdict
            if record is not None:
                source = rewards[job.name].source
                record.add(job.row, rows[job.row], f"{job.name} {source}", verdict)

    try:
        while active := [worker for worker in pool if worker.left]:
            patience = min(worker.due for worker in active) - time.monotonic()
            ready = wait([worker.pipe for worker in active], min(max(patience, 0.0), POLL_S))
            for worker in active:
                if worker.pipe in ready:
                    take(worker.receive())
                elif time.monotonic() >= worker.due:
                    take(worker.replace_late())
            if progress:
                progress(len(verdicts))
    finally:
        for worker in pool:
            worker.stop()
    return [
        _combine(
            spec,
            {
                n: _settle(verdicts[_Job(index, n)], rewards[n], weight)
                for n, weight in spec.items()
            },
        )
        for index, spec in enumerate(specs)
    ]


def _judge_trusted(
    jobs: Sequence[_Job],
    rows: Sequence[Row],
    rewards: Mapping[str, Reward],
    verdicts: dict[_Job, _Verdict],
    report: OutageReport,
    progress: Callable[[int], None] | None,
) -> None:
    """Judge in the stage's own process, and add to `verdicts`."""
    current = ""

    def pause(outage: Outage, delay_s: float) -> None:
        report.add_wait(current, outage.reason, delay_s)
        _sleep(delay_s, lambda: progress(len(verdicts)) if progress else None)

    judge = _PatientJudge(pause)
    for count, job in enumerate(jobs, start=1):
        current = job.name
        verdicts[job] = judge.judge(job.name, rewards[job.name], rows[job.row])
        report.end_wait(job.name)
        if progress and (count % REPORTED == 0 or count == len(jobs)):
            progress(len(verdicts))


def _take_recorded(
    jobs: Iterable[_Job],
    rows: Sequence[Row],
    rewards: Mapping[str, Reward],
    record: ScoreRecord | None,
) -> dict[_Job, _Verdict]:
    """Take the verdicts that rewards of this very code gave on these very texts in an earlier attempt."""
    verdicts: dict[_Job, _Verdict] = {}
    for job in jobs if record else ():
        source = rewards[job.name].source
        verdict = record.find(job.row, rows[job.row], f"{job.name} {source}") if record else None
        if verdict is not None:
            verdicts[job] = _Verdict(*verdict)
    return verdicts


def _sleep(seconds: float, check: Callable[[], None]) -> None:
    """Sleep, and call `check` each `POLL_S` seconds; what it raises ends the sleep."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        check()
        time.sleep(min(left, POLL_S))


def _settle(verdict: _Verdict, reward: Reward, weight: float) -> _Verdict:
    """Make a score of a call that the completion ended: the end of the reward's range that its weight disfavours."""
    least = reward.low if weight > 0 else reward.high
    if not verdict.ended_by or not math.isfinite(least):
        return verdict
    return _Verdict("score", least, {verdict.ended_by: 1.0})


def _combine(spec: Mapping[str, float], verdicts: Mapping[str, _Verdict]) -> Outcome:
    breakdown = {name: verdict.value for name, verdict in verdicts.items()}
    breakdown |= {
        f"{name}.{part}": value for name, v in verdicts.items() for part, value in v.parts.items()
    }
    for verdict in sorted(verdicts.values(), key=lambda v: v.kind != "escape"):
        if verdict.kind != "score":
            return Outcome(verdict.kind, None, breakdown)
    return Outcome(
        "score", math.fsum(spec[n] * float(v.value) for n, v in verdicts.items()), breakdown
    )


class _Worker:
    """A forked process that runs the jobs `left`, last first, and writes a line a verdict.

    Attributes:
        since: when it began its current job; `due` is when to check whether the job's time is over.
        used: seconds of processor time before that job, including those of its children.
        killer: the job that has killed a process once.
        ready: whether the process has begun.
    """

    pid: int
    partial: bytes

    def __init__(
        self,
        jobs: list[_Job],
        rows: Sequence[Row],
        rewards: Mapping[str, Reward],
        limits: _Limits,
        report: OutageReport,
    ) -> None:
        self.report = report
        self.left, self.rows, self.rewards, self.limits = jobs[::-1], rows, rewards, limits
        self.killer: _Job | None = None
        self._start()

    def receive(self) -> Iterable[tuple[_Job, _Verdict]]:
        """Return the verdicts that have arrived; replace the process if it died."""
        if not (data := os.read(self.pipe, 1 << 16)):
            return self.replace_dead()
        *lines, self.partial = (self.partial + data).split(b"\n")
        verdicts = []
        for line in lines:
            used, *verdict = json.loads(line)
            self._begin(used)
            if not verdict:
                self.ready = True
                continue
            if verdict[0] == AWAY:
                _, reason, delay_s = verdict
                self.due += delay_s
                self.report.add_wait(self.left[-1].name, reason, delay_s)
                continue
            self.report.end_wait(self.left[-1].name)
            verdicts.append((self.left.pop(), _Verdict(*verdict)))
        return verdicts

    def replace_dead(self) -> Iterable[tuple[_Job, _Verdict]]:
        """Try the current job once more in a new process; if it killed that one, too, continue with the rest."""
        died = _Verdict("infra_error", "the process that ran it died")
        if not self.ready:
            return self.replace(died)
        if self.killer == self.left[-1]:
            return self.replace(died._replace(ended_by="crash" if self.limits.punish else ""))
        self.killer = self.left[-1]
        self.stop()
        self._start()
        return []

    def replace_late(self) -> Iterable[tuple[_Job, _Verdict]]:
        """Give up on the current job, unless it or its child processes still compute (perhaps in a remote sandbox) and
        have used less processor time than allowed: then it may take up to ten times as long."""
        seconds, now = self.limits.seconds, time.monotonic()
        late = _Verdict("timeout", f"took more than {seconds:g} s")
        states, used = _read_stats(self.pid)
        if used - self.used >= seconds:
            return self.replace(late._replace(ended_by="timeout" if self.limits.punish else ""))
        if (
            not ({*"RD"} & {*states} or find_sandbox() != PROCESS)
            or now - self.since >= 10 * seconds
        ):
            return self.replace(late)
        self.due = now + seconds / 4
        return []

    def replace(self, verdict: _Verdict) -> Iterable[tuple[_Job, _Verdict]]:
        """Give up on the current job and continue with the rest in a new process."""
        self.stop()
        lost = self.left.pop()
        if self.left:
            self._start()
        return [(lost, verdict)]

    def stop(self) -> None:
        """Kill the process and whatever it started."""
        if self.pid:
            os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the group is there
            os.waitpid(self.pid, 0)
            os.close(self.pipe)
            self.pid = 0

    def _begin(self, used: float) -> None:
        self.since, self.used = time.monotonic(), used
        self.due = self.since + self.limits.seconds

    def _start(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.pipe, write = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            _serve(parent, write, self.left[::-1], self.rows, self.rewards, self.limits)
        _own_group(self.pid)
        os.close(write)
        self.partial, self.ready = b"", False
        self._begin(0.0)


def _read_stats(pid: int) -> tuple[str, float]:
    """Return the states (proc(5); ``R``: it runs, or would; ``D``: it waits for a page) of a process and all that it
    has started, and the seconds of processor time that these have had; elsewhere than on Linux nothing is known."""
    states, ticks, numbers = "", 0, [str(pid)]
    for number in numbers:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            states, ticks = states + fields[0], ticks + sum(map(int, fields[11:15]))
            numbers += (
                n
                for f in Path(f"/proc/{number}/task").glob("*/children")
                for n in f.read_text().split()
            )
    return states, ticks / os.sysconf("SC_CLK_TCK")


def _limit_memory(most: int | None) -> None:
    """Limit this process to `most` bytes more than it has now, but never beyond its hard limit."""
    if most is None:
        return
    own = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = own + most if hard == resource.RLIM_INFINITY else min(own + most, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _own_group(pid: int) -> None:
    """Give a process its own group; both sides of the fork call this, so that no kill can come too early."""
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)


def _serve(
    parent: int,
    pipe: int,
    jobs: Sequence[_Job],
    rows: Sequence[Row],
    rewards: Mapping[str, Reward],
    limits: _Limits,
) -> NoReturn:
    """Judge in the child, which never returns into the parent's code, and dies when the parent does."""
    try:
        _own_group(os.getpid())
        if sys.platform == "linux":
            # PR_SET_PDEATHSIG: a hanging reward must not outlive the stage, which may have ended by now.
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(0)
            _limit_memory(limits.memory)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(2, 1)  # what a reward prints is for people
        os.write(pipe, json.dumps([sum(os.times()[:4])]).encode() + b"\n")

        def pause(outage: Outage, delay_s: float) -> None:
            # An alarm that the reward left behind would end the wait.
            signal.setitimer(signal.ITIMER_REAL, 0)
            line = json.dumps([sum(os.times()[:4]), AWAY, outage.reason, delay_s])
            os.write(pipe, line.encode() + b"\n")
            time.sleep(delay_s)

        judge = _PatientJudge(pause)
        for job in jobs:
            verdict = judge.judge(job.name, rewards[job.name], rows[job.row])
            signal.setitimer(
                signal.ITIMER_REAL, 0
            )  # an alarm that it left behind would hit the next
            os.write(pipe, json.dumps([sum(os.times()[:4]), *verdict]).encode() + b"\n")
    finally:
        os._exit(0)


class _PatientJudge:
    """Calls rewards again that find their judges away.

    Args:
        pause: waits for a number of seconds, and says why.
    """

    def __init__(self, pause: Callable[[Outage, float], None]) -> None:
        self._pause = pause
        self._failing: set[str] = set()

    def judge(self, name: str, reward: Reward, row: Row) -> _Verdict:
        """Judge a row, however long its judge is away; give up on what the completion may cause."""
        failures = 0
        tries = 1 if name in self._failing else TRIES
        while True:
            try:
                verdict = _judge(reward, row)
                self._failing.discard(name)
                return verdict
            except _Away as away:
                outage = away.outage
            # Outside of the handler: its error keeps what the call held.
            failures += 1
            if not outage.is_away and failures >= tries:
                self._failing.add(name)
                return _Verdict("infra_error", outage.reason)
            self._pause(outage, compute_delay(failures - 1, outage.retry_after_s))


def _judge(reward: Reward, row: Row) -> _Verdict:
    try:
        metadata = json.loads(row["metadata"] or "{}")
        if isinstance(episode := metadata.get("environment"), dict) and episode.get("escape"):
            raise Escape(episode["escape"])
        if (value := reward.function(row["completion"], row["answer"], metadata)) is None:
            return _Verdict("unverifiable", "could not judge it")
        value, parts = value if isinstance(value, tuple) else (value, {})
        if not isinstance(value, Real):
            return _Verdict("infra_error", f"{RETURNED} {type(value).__name__}, not a number")
        number = float(value)
        parts = {str(part): float(share) for part, share in parts.items()}
    except Escape as error:
        return _Verdict("escape", str(error)[:300])
    except Unverifiable as error:
        return _Verdict("unverifiable", str(error)[:300])
    except MemoryError:  # earlier calls may hold memory, too: a new process will tell
        raise
    except BaseException as error:  # SystemExit and KeyboardInterrupt are the reward's doing, too
        return _judge_error(reward, error)
    if not reward.low <= number <= reward.high:  # NaN fails this, too
        return _Verdict(
            "infra_error",
            f"{RETURNED} {number}, {OUT_OF_RANGE} [{reward.low:g}, {reward.high:g}]",
        )
    return _Verdict("score", number, parts)


def _judge_error(reward: Reward, error: BaseException) -> _Verdict:
    """Return what an error of a reward means. Raises _Away: its judge is to be asked again; what is the caller's."""
    outage = find_outage(error)
    if outage:
        raise _Away(outage) from None
    if isinstance(error, OSError) and read_status(error) is None:
        # A file that it reads.
        return _Verdict("infra_error", f"{type(error).__name__}: {error}"[:300])
    if reward.trusted and not isinstance(error, Exception):  # this is the caller's process
        raise error
    # The innermost line of the reward's own says where.
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if len(frames) > 1 else ""
    reason = str(error)
    if isinstance(error, json.JSONDecodeError):
        reason = f"what its judge answered {GARBAGE}: {error.doc[:80]!r}"
    return _Verdict("infra_error", f"{RAISED} {type(error).__name__}: {reason}{at}"[:300])
