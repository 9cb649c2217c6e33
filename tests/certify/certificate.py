"""What a certificate says: of each injection what it came to, and all of them as a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.certify.attempts import Ends
from tests.certify.kinds import Injection, Place


@dataclass(frozen=True)
class Outcome:
    """What one injection came to.

    Attributes:
        root: of the audit, when the run had ended.
        problem: what must not be; empty where all is as in the undisturbed run.
        leftovers: places of dead attempts that `gc` named and deleted.
    """

    injection: Injection
    root: str = ""
    leftovers: int = 0
    problem: str = ""
    ends: Ends = field(default_factory=Ends)


@dataclass(frozen=True)
class Certificate:
    """The outcomes of a plan.

    Attributes:
        roots: place → root of the undisturbed run.
        boundaries: place → how many calls it has.
        seconds: that all of it took; `processor_s`: of processors.
    """

    seed: int
    roots: Mapping[str, str]
    boundaries: Mapping[Place, int]
    outcomes: Sequence[Outcome]
    seconds: float
    processor_s: float = 0.0

    @property
    def violations(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.problem]

    def summarize(self) -> dict[str, Any]:
        """Return what the certificate states, as JSON."""
        return {
            "seed": self.seed,
            "injections": len(self.outcomes),
            "kinds": [
                self._describe_kind(kind)
                for kind in sorted({each.injection.kind for each in self.outcomes})
            ],
            "boundaries": {
                place: {"calls": calls, "injected": len({e.injection.at for e in self._at(place)})}
                for place, calls in self.boundaries.items()
            },
            "roots": dict(self.roots),
            "met": sum(bool(each.ends.met) for each in self.outcomes),
            "equal": len(self.outcomes) - len(self.violations),
            "leaks": sum(
                "leaked" in each.problem or "left" in each.problem for each in self.violations
            ),
            "deleted_by_gc": sum(each.leftovers for each in self.outcomes),
            "temporary_of_killed": sum(len(each.ends.temporary) for each in self.outcomes),
            "attempts": sum(each.ends.attempts for each in self.outcomes),
            "resumed_by_hand": sum(each.ends.by_hand for each in self.outcomes),
            "stages_lost": sum(each.ends.lost for each in self.outcomes),
            "seconds_lost": round(sum(each.ends.lost_s for each in self.outcomes), 3),
            "virtual_seconds_waited": sum(each.ends.waited_s for each in self.outcomes),
            "seconds": round(self.seconds, 1),
            "processor_seconds": round(self.processor_s, 1),
            "violations": [
                {**asdict(each.injection), "problem": each.problem} for each in self.violations
            ],
        }

    def _at(self, place: Place) -> list[Outcome]:
        return [each for each in self.outcomes if each.injection.place == place]

    def _describe_kind(self, kind: str) -> dict[str, Any]:
        own = [each for each in self.outcomes if each.injection.kind == kind]
        return {
            "kind": kind,
            "place": own[0].injection.place,
            "injections": len(own),
            "boundaries": len({each.injection.at for each in own}),
            "attempts": sum(each.ends.attempts for each in own),
            "resumed_by_hand": sum(each.ends.by_hand for each in own),
            "stages_lost": sum(each.ends.lost for each in own),
            "exit_codes": dict(
                Counter(str(code) for each in own for code in each.ends.codes if code)
            ),
            "met": sum(bool(each.ends.met) for each in own),
            "violations": sum(bool(each.problem) for each in own),
        }

    def print(self) -> None:
        """Print it for people."""
        told = self.summarize()
        names = ("at calls of", "injected", "met", "calls", "attempts", "by hand", "lost")
        print(f"\n{'kind':34}" + "{:>12}{:>9}{:>6}{:>6}{:>9}{:>8}{:>6}".format(*names))
        for kind in told["kinds"]:
            figures = (
                kind["injections"],
                kind["met"],
                kind["boundaries"],
                kind["attempts"],
                kind["resumed_by_hand"],
            )
            line = "{:>9}{:>6}{:>6}{:>9}{:>8}".format(*figures)
            print(f"{kind['kind']:34}{kind['place']:>12}{line}{kind['stages_lost']:>6}")
        print(
            "\nmet: at a call that happened; threads of the executor may have fewer than in the undisturbed run;"
        )
        print(
            "calls: how many boundaries; by hand: resumed because Argo's rules let no attempt follow;"
        )
        print("lost: stages that were begun and did not commit\n")
        for place, about in told["boundaries"].items():
            print(f"{place:12}{about['injected']} of {about['calls']} calls of an undisturbed run")
        for place, root in told["roots"].items():
            print(f"root of {place:9}{root}")
        print(
            f"equal roots and audits that pass: {told['equal']} of {told['injections']} (seed {told['seed']})"
        )
        print(f"leaks: {told['leaks']}; gc deleted {told['deleted_by_gc']} places of dead attempts")
        print(
            f"temporary directories that killed processes left, which a pod takes along: {told['temporary_of_killed']}"
        )
        work = f"{told['stages_lost']} stages, {told['seconds_lost']} s"
        print(
            f"work lost: {work}; waited by the virtual clock: {told['virtual_seconds_waited']:.0f} s"
        )
        print(f"took {told['seconds']} s, {told['processor_seconds']} s of processors")

    def dump(self) -> str:
        """Return it as JSON."""
        return json.dumps(self.summarize(), indent=1) + "\n"
