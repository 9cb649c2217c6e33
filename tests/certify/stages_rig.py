"""Faults at the calls of stages: those on files, the store's reads, and those on an object store."""

from __future__ import annotations

import functools
import json
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore

from tests.certify import interpose
from tests.certify.attempts import Ends, Violation, read_met, run_until_ended
from tests.certify.bucket import NAME, Plan, Served
from tests.certify.check import Standing, compare, inspect_apart, list_temporary
from tests.certify.interpose import Act, Interposer
from tests.certify.kinds import ERRNOS, SERVER_FAULTS, Injection, Place
from tests.certify.sequence import RUN, Steps, list_steps, run_sequence
from tuneloop.core.errors import EXIT_USER

DAY = 86_400.0


@dataclass
class StagesRig:
    """A place for one run at a time, which stages of one process make, one after another.

    Attributes:
        home: emptied before each injection.
        lengths: place → how many calls the first attempt of the undisturbed run has; the second's are numbered on.
    """

    home: Path
    bucket: Served
    steps: Steps = list_steps
    calm: Standing | None = None
    lengths: dict[str, int] = field(default_factory=dict)

    def record(self) -> dict[Place, list[str]]:
        """Run undisturbed at each place, and return the calls there."""
        calls: dict[Place, list[str]] = {}
        for place in ("files", "reads", "objects"):
            self._clear()
            calls[place] = self._record(place)
            standing = self._inspect(place)
            self.calm = self.calm or standing
            if problems := compare(standing, self.calm):
                raise Violation(f"the undisturbed run on {place}: {problems}")
        self._clear()
        asked: list[list[str]] = []
        self.bucket.begin(Plan())
        run_until_ended(
            lambda n: asked.append(self.bucket.end_plan()["asked"]) or self._work("objects"),
            self.home,
        )
        asked.append(self.bucket.end_plan()["asked"])
        self.lengths["requests"], calls["requests"] = 0, asked[-1]
        return calls

    def _record(self, place: Place) -> list[str]:
        kept = self.home / "calls"

        def work(number: int) -> Callable[[], int]:
            def attempt() -> int:
                between = Interposer(self._root(place), of=place)  # type: ignore[arg-type]
                code = self._run(place, between)
                kept.with_name(f"calls{number}").write_text(json.dumps(between.calls))
                return code

            return attempt

        self.bucket.begin(Plan())
        ends = run_until_ended(work, self.home)
        calls = [json.loads(kept.with_name(f"calls{n}").read_text()) for n in range(ends.attempts)]
        self.lengths[place] = len(calls[0])
        return [call for each in calls for call in each]

    def run(self, injection: Injection) -> tuple[Ends, Standing]:
        """Make an injection, resume the run until it has ended, and look at what stands.

        Raises:
            Violation: something is not as in the undisturbed run.
        """
        assert self.calm
        self._clear()
        chance = random.Random(injection.chance)
        self.bucket.begin(self._plan_requests(injection, chance))
        first = self.lengths[injection.place]
        attempt, at = (0, injection.at) if injection.at < first else (1, injection.at - first)
        lost: list[str] = []

        def work(number: int) -> Callable[[], int]:
            if number == attempt + 1 and injection.kind.startswith("power lost"):
                what = (
                    "names"
                    if "names" in injection.kind.partition(":")[2].split(",")[0]
                    else "bytes"
                )
                lost.extend(interpose.lose_power(self.home / "store", self.home / "durable", what))
            if number != attempt or injection.place == "requests":
                return self._work(injection.place)
            self._note_begun()
            return lambda: self._run(injection.place, self._disturb(injection, at, chance))

        ends = run_until_ended(work, self.home)
        ends.met = self.bucket.end_plan()["met"] or read_met(self.home)
        standing = self._inspect(injection.place)
        problems, ends.temporary = compare(standing, self.calm), list_temporary(self.home / "tmp")
        if not {128 + signal.SIGKILL, 128 + signal.SIGTERM} & {*ends.codes}:
            problems += [f"leaked: temporary {name}" for name in ends.temporary]
        if "disk full" in injection.kind and EXIT_USER in ends.codes:
            problems.append(f"a full disk is no mistake, but attempts ended with {ends.codes}")
        if problems:
            raise Violation("\n".join([*problems, *(f"lost: {each}" for each in lost)]))
        return ends, standing

    def _plan_requests(self, injection: Injection, chance: random.Random) -> Plan:
        if injection.place != "requests":
            return Plan()
        long = {
            "server dead": (5, 60),
            "stale read of an object": (1, 1),
            "stale list of objects": (1, 1),
        }
        return Plan(
            SERVER_FAULTS[injection.kind],
            injection.at,
            chance.randint(*long.get(injection.kind, (1, 12))),
        )

    def _disturb(self, injection: Injection, at: int, chance: random.Random) -> Interposer:
        """Return what is between an attempt's process and its files."""
        between = Interposer(self._root(injection.place), at, of=injection.place)  # type: ignore[arg-type]
        jump = chance.uniform(60, 30 * DAY)
        acts: dict[str, Act] = {
            "killed before a call": interpose.kill,
            "killed before a request": interpose.kill,
            "torn write": interpose.tear(chance.random()),
            "disk full for a moment": interpose.fail(chance.choice(ERRNOS)),
            "disk full until it is freed": interpose.fill_disk(between),
            "duplicate pod": interpose.run_meanwhile(lambda: self._run_twice(injection.place)),
            "preempted (SIGTERM)": interpose.terminate,
            "clock jumps forward": interpose.jump_clock(jump),
            "clock jumps backward": interpose.jump_clock(-jump),
        }
        between.before = acts.get(injection.kind)
        if injection.kind.startswith(("killed after", "power lost")):
            between.after = interpose.kill
        if injection.kind.startswith("power lost"):
            between.durable = self.home / "durable"
        return between

    def _run(self, place: Place, between: Interposer) -> int:
        between.install()
        return self._work(place)()

    def _run_twice(self, place: Place) -> int:
        """Run to the end, as a duplicate does: one of the stages asks for a second attempt."""
        return self._work(place)() and self._work(place)()

    def _work(self, place: Place) -> Callable[[], int]:
        url = f"{self._store(place)}/{RUN}"

        def work() -> int:
            _shorten_pauses()
            return run_sequence(url, self.steps)

        return work

    def _inspect(self, place: Place) -> Standing:
        return inspect_apart(RUN, self._store(place), self.home, _shorten_pauses)

    def _store(self, place: Place) -> str:
        return f"s3://{NAME}" if place in ("objects", "requests") else f"file://{self.home}/store"

    def _root(self, place: Place) -> str:
        return f"s3://{NAME}" if place == "objects" else f"{self.home}/store"

    def _clear(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
        for name in ("tmp", "store", "durable", "cache"):
            (self.home / name).mkdir(parents=True)

    def _note_begun(self) -> None:
        inodes = [path.lstat().st_ino for path in (self.home / "store").rglob("*")]
        (self.home / "durable" / "begun").write_text("\n".join(map(str, inodes)))


@functools.cache
def _shorten_pauses() -> None:
    """Let obstore ask again at once, and three times: its pauses grow to a quarter of a minute. A process makes one
    client for a URL: each takes 10 ms to read the machine's certificates."""
    soon = timedelta(milliseconds=1)
    retry = {
        "max_retries": 3,
        "backoff": {"init_backoff": soon, "max_backoff": 2 * soon, "base": 2},
    }
    real: Any = obstore.store.from_url
    made: dict[str, Any] = {}

    def open_store(url: str, **options: Any) -> Any:
        if url not in made:
            made[url] = real(url, **options | {"retry_config": retry})
        return made[url]

    obstore.store.from_url = open_store
