"""Call rewards, and turn whatever they do into a verdict.

It runs in a forked process (`rewards/workers.py`), or for trusted rewards in the stage's own
(`rewards/scoring.py`). The first words of a reason decide what happens next: those that begin with
`RAISED` or `RETURNED` are not judged again (`rewards/outcomes.py: may_pass`), and
`rewards/error_budget.py: REMEDIES` looks for `OUT_OF_RANGE` and `GARBAGE`.
"""

import json
import traceback
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path

from tuneloop.rewards.outages import TRIES, Outage, compute_delay, find_outage, read_status
from tuneloop.rewards.outcomes import (
    GARBAGE,
    OUT_OF_RANGE,
    RAISED,
    RETURNED,
    Escape,
    Unverifiable,
    Verdict,
)
from tuneloop.rewards.registry import Call

LONGEST_REASON = 300
"""Characters of a reason, which is written to the breakdown of its row; the rest is cut off."""
Pause = Callable[[Call, Outage, float], None]
"""Waits a number of seconds for the judge of a call."""


class _Away(Exception):
    """A call got no answer of its judge, and is to be made again
    (`rewards/outages.py: find_outage`)."""

    def __init__(self, outage: Outage) -> None:
        self.outage = outage
        super().__init__(outage.reason)


class PatientJudge:
    """Calls rewards again that find their judges away.

    Args:
        pause: waits for a number of seconds, and says why.
    """

    def __init__(self, pause: Pause) -> None:
        self._pause = pause
        self._failing: set[str] = set()

    def judge(self, call: Call) -> Verdict:
        """Judge a row, however long its judge is away; give up after `TRIES` failures that the
        completion may have caused (`Outage.is_away` is false)."""
        name = call.reward.name
        failures = 0
        tries = 1 if name in self._failing else TRIES
        while True:
            try:
                verdict = judge_row(call)
                self._failing.discard(name)
                return verdict
            except _Away as away:
                outage = away.outage
            # This stands outside of the handler because its error keeps what the call held.
            failures += 1
            if not outage.is_away and failures >= tries:
                self._failing.add(name)
                return Verdict("infra_error", outage.reason)
            self._pause(call, outage, compute_delay(failures - 1, outage.retry_after_s))


def judge_row(call: Call) -> Verdict:
    """Call a reward once.

    Raises:
        _Away: its judge is to be asked again.
        MemoryError: there is no memory. Earlier calls may hold some, so the process ends, and
            `rewards/workers.py: Worker` makes the call once more in a new one.
    """
    row = call.row
    parts: Mapping[str, float] = {}
    try:
        metadata = json.loads(row["metadata"] or "{}")
        episode = metadata.get("environment")
        if isinstance(episode, dict) and episode.get("escape"):
            raise Escape(episode["escape"])
        value = call.reward.function(row["completion"], row["answer"], metadata)
        if value is None:
            return Verdict("unverifiable", "could not judge it")
        if isinstance(value, tuple):
            value, parts = value
        if not isinstance(value, Real):
            return Verdict("infra_error", f"{RETURNED} {type(value).__name__}, not a number")
        number = float(value)
        parts = {str(part): float(share) for part, share in parts.items()}
    except Escape as error:
        return Verdict("escape", str(error)[:LONGEST_REASON])
    except Unverifiable as error:
        return Verdict("unverifiable", str(error)[:LONGEST_REASON])
    except MemoryError:
        raise
    except BaseException as error:
        # SystemExit and KeyboardInterrupt are the reward's doing, too.
        return Verdict("infra_error", _explain_error(call, error)[:LONGEST_REASON])
    # NaN is in no interval.
    if not call.reward.low <= number <= call.reward.high:
        interval = f"[{call.reward.low:g}, {call.reward.high:g}]"
        return Verdict("infra_error", f"{RETURNED} {number}, {OUT_OF_RANGE} {interval}")
    return Verdict("score", number, parts)


def _explain_error(call: Call, error: BaseException) -> str:
    """Explain what an error of a reward means.

    Raises:
        _Away: its judge is to be asked again.
        BaseException: `error` itself, where it is meant for the stage, which calls the reward.
    """
    outage = find_outage(error)
    if outage:
        raise _Away(outage) from None
    kind = type(error).__name__
    if isinstance(error, OSError) and read_status(error) is None:
        # A file that the reward reads may be there at the next attempt.
        return f"{kind}: {error}"
    if call.reward.trusted and not isinstance(error, Exception):
        # A trusted reward runs in the stage's process, which was interrupted.
        raise error
    reason = str(error)
    if isinstance(error, json.JSONDecodeError):
        reason = f"{GARBAGE}: {error.doc[:80]!r}"
    # The innermost line tells where in the reward it happened; the first one is ours.
    frames = traceback.extract_tb(error.__traceback__)
    if len(frames) > 1:
        reason += f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    return f"{RAISED} {kind}: {reason}"
