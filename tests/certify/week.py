"""A week by a virtual clock: a stage of an hour a step whose pod is preempted all the time, by Argo's retry rules."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.certify.attempts import Ended, Ends, Violation, name_end, run_until_ended
from tests.certify.check import Standing, compare, inspect_apart
from tests.certify.kinds import Injection, Place
from tuneloop.core.component import Results, Stage, component
from tuneloop.local.results import Result

HOURS = 24 * 7
RUN = "week"
VARIABLE = "CERTIFY_PREEMPTED"
"""After how many steps of an attempt its pod is preempted, and by which signal."""
ENDS = {"SIGTERM": signal.SIGTERM, "deleted": signal.SIGKILL, "evicted": signal.SIGKILL}


@component("checkpoint", results={"step": int})
def train(stage: Stage, *, hours: int = HOURS) -> Results:
    """Count the hours, with a resume point after each."""
    left, _, number = os.environ.get(VARIABLE, "-1 0").partition(" ")
    point = stage.latest_resume()
    told = json.loads(point.part("step.json").read_text()) if point else {"step": 0, "sum": 0}
    for made in range(hours - told["step"]):
        if made == int(left):
            os.kill(os.getpid(), int(number))
        stage.check_stop()
        told = {"step": told["step"] + 1, "sum": told["sum"] * 31 % 65521 + told["step"]}
        text = json.dumps(told)
        stage.save_resume(
            told["step"], lambda path, text=text: (path / "step.json").write_text(text)
        )  # type: ignore[misc]
    (stage.out / "step.json").write_text(json.dumps(told))
    return {"step": told["step"]}


@dataclass
class WeekRig:
    """A place for one such run at a time."""

    home: Path
    calm: Standing | None = None

    def record(self) -> dict[Place, list[str]]:
        """Run undisturbed; a call is an hour at which the week may begin to go wrong."""
        self._clear()
        run_until_ended(lambda number: self._work, self.home)
        self.calm = self._inspect()
        return {"clock": [f"hour {hour}" for hour in range(HOURS)]}

    def run(self, injection: Injection) -> tuple[Ends, Standing]:
        """Preempt the pod about once an hour from the injection's hour on; raise `Violation` where that shows."""
        assert self.calm
        self._clear()
        chance = random.Random(injection.chance)
        how = ["SIGTERM"]

        def work(number: int) -> Callable[[], int]:
            steps, how[0] = (
                chance.choice((0, 1, 1, 2)) if number else injection.at,
                chance.choice([*ENDS]),
            )
            return lambda: self._preempt(steps, ENDS[how[0]])

        def name(ended: Ended) -> Result:
            if ended.code != 128 + signal.SIGKILL:
                return name_end(ended)
            return Result("Error", "pod deleted") if how[0] == "deleted" else _evict()

        ends = run_until_ended(work, self.home, name)
        standing = self._inspect()
        if problems := compare(standing, self.calm):
            raise Violation("\n".join(problems))
        ends.met = injection.call
        if ends.by_hand:
            raise Violation(f"Argo's rules gave up after {ends.attempts} attempts")
        return ends, standing

    def _preempt(self, steps: int, number: int) -> int:
        os.environ[VARIABLE] = f"{steps} {number}"
        return self._work()

    def _work(self) -> int:
        return train.run(["--checkpoint", f"file://{self.home}/store/{RUN}/train"])

    def _inspect(self) -> Standing:
        return inspect_apart(RUN, f"{self.home}/store", self.home)

    def _clear(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
        for name in ("tmp", "store"):
            (self.home / name).mkdir(parents=True)


def _evict() -> Result:
    """What Argo says of a pod that the kubelet evicted: the node's reason in place of the container's."""
    return Result("Failed", "The node was low on resource: memory", exit_code=128 + signal.SIGKILL)
