"""Where a pod ends that is told no number of iterations: by how long the loop was without a pod before it."""

import json
import sys
import time

from tuneloop.core.artifacts import MANIFEST
from tuneloop.core.store import Store
from tuneloop.workflow.pod_loop import count_iterations

RECORDS = "pods.json"
"""Below a run: what each such pod measured and decided, in turn."""
LINE = (
    "pod {pod} runs {iterations} iterations: {between_s:.3g} s between pods, {start_s:.3g} s start, {each_s:.3g} s each"
)


class PodLength:
    """Decides how many iterations a pod runs (`count_iterations`), by its first two that have something to do.

    A new pod costs the time between pods, from the last commit before it to its first stage, and what its first
    iteration takes longer than the second: libraries are imported, updates replayed. Of the former the least that a pod
    of this run has measured counts: to wait for quota, a server, or who resumes the run makes no pod longer, or runs
    that wait for one another would lengthen theirs in turn. Nothing that a stage computes depends on this.

    Args:
        first: number of the iteration that the pod begins with.
    """

    def __init__(self, run: str, first: int) -> None:
        self._store = Store(run)
        places = (f"iterations/{first - 1}", f"iterations/{first}") if first > 1 else ("",)
        stats = [Store(f"{run}/{place}").stat().items() for place in places]
        ends = [written for each in stats for key, (_, written) in each if key.rpartition("/")[2] == MANIFEST]
        self._gap_s = max(0.0, time.time() - max(ends)) if ends else 0.0  # 0 where the store's clock is ahead: unknown
        self._begun, self._first_s = 0, 0.0

    def has_work(self, number: int, stage: str) -> bool:
        """Say whether an iteration, which `stage` ends, is not committed yet."""
        return self._store.get(f"iterations/{number}/{stage}/{MANIFEST}") is None

    def choose_last(self, number: int, seconds: float, last: int) -> int | None:
        """Choose the pod's last iteration, at most `last`, once `number` is done, which took `seconds`; record and say
        it; None: not yet."""
        if not self._begun:
            self._begun, self._first_s = number, seconds
            if number < last:
                return None
        records = json.loads(self._store.get(RECORDS) or b"[]")
        between_s = min(filter(None, [self._gap_s, *(each["gap_s"] for each in records)]), default=0.0)
        start_s = max(0.0, self._first_s - seconds)
        count = count_iterations(between_s + start_s, seconds)
        last = min(last, max(number, self._begun + count - 1))
        told = {"pod": len(records) + 1, "first": self._begun, "iterations": last - self._begun + 1}
        measured = {"gap_s": self._gap_s, "between_s": between_s, "start_s": start_s, "each_s": seconds}
        self._store.put(RECORDS, json.dumps([*records, told | measured], indent=1).encode())
        print(LINE.format(**told, **measured), file=sys.stderr, flush=True)
        return last
