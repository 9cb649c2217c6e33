"""Score completions with named rewards, each call isolated from the stage and from other calls.

A reward is a module of the family ``rewards`` (or ``package.module:function``)::

    RANGE = (0.0, 1.0)  # the default

    def score(
        completion: str, answer: str, metadata: dict
    ) -> float | None | tuple[float, dict[str, float]]: ...

None says that it cannot judge (the gold answer does not parse, metadata is missing); a pair adds
entries to the breakdown; `Escape` is for a completion whose program tried to leave its sandbox. An
episode in which the policy tried to leave its environment is an escape whatever its rewards return.

Rewards run in a forked process that reports after every call; the parent watches the clock. The
stage itself calls only those whose module declares ``TRUSTED = True``: no completion can make them
hang, crash or take memory. Whatever a call does (raise, exit, crash the interpreter, hang in C with
signals blocked, return NaN or something outside `RANGE`), the process is replaced where it must be
and the next call is judged afresh: one bad call costs its own row only. Modules are imported before
the fork, so that a replacement starts in milliseconds.

A policy must gain nothing by how its text is judged. A call that spends all its time computing, or
twice runs out of memory or kills its process, was ended by the completion, and that is a score: the
least that the reward can give. A call that waits, or whose process got no processor, was hindered
by its host: it has no score, but may get one later.

A reward whose judge is away (`tuneloop.rewards.outages`) is called again later, as long as it
takes: a judge that has no room must cost no score.

`score_all` is called for the stages (`rewards/stage_scoring.py`), for gold answers
(`rewards/proof.py`), for TRL (`training/backends/trl.py`) and for `tuneloop probe`
(`local/probe.py`), each with limits of its own. `extensions/provenance/questions.py: _rescore_rows`
judges stored rows again: an option that changes scores, and is a parameter of the stage `reward`,
has to be handed on there, too.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import wait

from tuneloop.rewards.judging import PatientJudge
from tuneloop.rewards.outages import Outage, OutageReport
from tuneloop.rewards.outcomes import KINDS, Escape, Outcome, Row, Unverifiable, Verdict, may_pass
from tuneloop.rewards.registry import Call, compute_full_marks, find_reward, parse_spec
from tuneloop.rewards.score_record import ScoreRecord
from tuneloop.rewards.workers import CallLimits, Worker

__all__ = [
    "KINDS",
    "Escape",
    "Outcome",
    "Row",
    "Unverifiable",
    "compute_full_marks",
    "find_reward",
    "may_pass",
    "parse_spec",
    "score_all",
]

REPORTED = 1000
"""Calls of trusted rewards between two reports of progress, at which the stage may also stop."""
POLL_S = 1.0
"""The longest wait, in seconds, without a call of `progress`, which may stop the stage."""


def score_all(
    rows: Sequence[Row],
    *,
    timeout_s: float,
    workers: int = 1,
    memory: int | None = None,
    punish: bool = True,
    escape_score: float | None = None,
    progress: Callable[[int], None] | None = None,
    record: ScoreRecord | None = None,
) -> list[Outcome]:
    """Score every row by its own rewards.

    Args:
        rows: each with ``completion``, ``answer``, ``reward_spec`` (`parse_spec`) and ``metadata``
            (JSON, or empty).
        timeout_s: seconds that one call of a reward that is not trusted may take.
        workers: processes; each takes every `workers`-th call.
        memory: bytes that judging may take in each, beyond what the stage itself has; None: no
            limit.
        punish: whether a completion that ends a reward's call gets the least that this can give,
            and ``NAME.timeout`` or ``NAME.crash`` in its breakdown; else, and where that is
            infinite, it has no score.
        escape_score: of attempts to leave the sandbox, which are then learned from as a wrong
            answer is; None: they have no score.
        progress: called with the number of finished calls (a row has one for each of its rewards);
            may raise to stop. Where calls wait, it is called each second.
        record: verdicts of earlier attempts, which are not asked for again; new ones are added.

    Returns:
        One outcome a row, in order.

    Raises:
        UserError: a reward does not exist, or a spec is malformed; before anything is scored.
    """
    calls_by_row = [
        [
            Call(
                row_number=number,
                row=row,
                reward=find_reward(name),
                weight=weight,
            )
            for name, weight in parse_spec(row["reward_spec"]).items()
        ]
        for number, row in enumerate(rows)
    ]
    calls = [call for row_calls in calls_by_row for call in row_calls]
    # Not `record or ScoreRecord()`: an empty record is false, and the caller's has to be filled.
    if record is None:
        record = ScoreRecord()
    batch = _Batch(record, progress or (lambda count: None))
    batch.take_recorded(calls)
    batch.judge_here(call for call in calls if call.reward.trusted)
    batch.judge_apart(calls, workers, CallLimits(timeout_s, memory, punish))
    return [_combine(row_calls, batch.verdicts, escape_score) for row_calls in calls_by_row]


class _Batch:
    """Calls that are judged together, in three steps: each leaves out what an earlier one has
    judged.

    Attributes:
        verdicts: of the calls that are finished.
    """

    def __init__(self, record: ScoreRecord, progress: Callable[[int], None]) -> None:
        self.verdicts: dict[Call, Verdict] = {}
        self._record = record
        self._progress = progress
        self._report = OutageReport()

    def take_recorded(self, calls: Iterable[Call]) -> None:
        """Take the verdicts of an earlier attempt."""
        if len(self._record):
            for call in calls:
                verdict = self._record.find(call)
                if verdict is not None:
                    self.verdicts[call] = verdict

    def judge_here(self, calls: Iterable[Call]) -> None:
        """Judge in the stage's own process."""
        remaining = self._list_remaining(calls)
        judge = PatientJudge(self._pause)
        for count, call in enumerate(remaining, start=1):
            # Not recorded: such a reward is quick, and judges again in the next attempt.
            self.verdicts[call] = judge.judge(call)
            self._report.end_wait(call.reward.name)
            if count % REPORTED == 0 or count == len(remaining):
                self._progress(len(self.verdicts))

    def judge_apart(self, calls: Iterable[Call], workers: int, limits: CallLimits) -> None:
        """Judge in processes that may be ended."""
        remaining = self._list_remaining(calls)
        # Neighbours are often of one prompt and take equally long, so they go to different workers.
        shares = [remaining[index::workers] for index in range(workers)]
        pool = [Worker(share, limits, self._report) for share in shares if share]
        try:
            while active := [worker for worker in pool if worker.calls]:
                # The worker whose call is due first decides how long there is nothing to do.
                patience_s = min(worker.due for worker in active) - time.monotonic()
                timeout_s = min(max(patience_s, 0.0), POLL_S)
                ready = wait([worker.pipe for worker in active], timeout_s)
                for worker in active:
                    if worker.pipe in ready:
                        self._add(worker.receive())
                    elif time.monotonic() >= worker.due:
                        self._add(worker.replace_late())
                self._progress(len(self.verdicts))
        finally:
            for worker in pool:
                worker.stop()

    def _list_remaining(self, calls: Iterable[Call]) -> list[Call]:
        return [call for call in calls if call not in self.verdicts]

    def _add(self, verdicts: Iterable[tuple[Call, Verdict]]) -> None:
        for call, verdict in verdicts:
            self.verdicts[call] = verdict
            self._record.add(call, verdict)

    def _pause(self, call: Call, outage: Outage, delay_s: float) -> None:
        """Wait for a judge, and let the stage stop meanwhile."""
        self._report.add_wait(call.reward.name, outage.reason, delay_s)
        end = time.monotonic() + delay_s
        while (remaining_s := end - time.monotonic()) > 0:
            self._progress(len(self.verdicts))
            time.sleep(min(remaining_s, POLL_S))


def _settle(call: Call, verdict: Verdict) -> Verdict:
    """Make a score of a call that the completion ended.

    It is the least that the reward can add: with a weight above 0 the low end of its range, else
    the high one.
    """
    lowest = call.reward.low if call.weight > 0 else call.reward.high
    if not verdict.ended_by or not math.isfinite(lowest):
        return verdict
    return Verdict("score", lowest, {verdict.ended_by: 1.0})


def _combine(
    calls: Sequence[Call], verdicts: dict[Call, Verdict], escape_score: float | None
) -> Outcome:
    """Combine the verdicts of all rewards of a row: ``escape`` if one is, else the first that is no
    score, else the weighted sum."""
    settled = [_settle(call, verdicts[call]) for call in calls]
    breakdown = {call.reward.name: verdict.value for call, verdict in zip(calls, settled)}
    for call, verdict in zip(calls, settled):
        for part, share in verdict.parts.items():
            breakdown[f"{call.reward.name}.{part}"] = share
    # An escape is told even where another reward failed before it.
    failures = [verdict.kind for verdict in settled if verdict.kind != "score"]
    if "escape" in failures:
        return Outcome("escape", escape_score, breakdown)
    if failures:
        return Outcome(failures[0], None, breakdown)
    terms = [call.weight * float(verdict.value) for call, verdict in zip(calls, settled)]
    return Outcome("score", math.fsum(terms), breakdown)
