"""What a certificate of runs on a cluster says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.certify.cluster_plan import ClusterInjection


@dataclass
class ClusterOutcome:
    """What one injection came to.

    Attributes:
        met: the stage has stood still at its moment, and the fault was made.
        problem: what must not be, by the fault itself.
        by_hand: how often the run was submitted again for it.
        seconds: that making it took.
        ends: classes of the attempts of its stage that did not end well; `lost_s`: their seconds.
    """

    injection: ClusterInjection
    met: bool = False
    problem: str = ""
    by_hand: int = 0
    seconds: float = 0.0
    ends: list[str] = field(default_factory=list)
    lost_s: float = 0.0


@dataclass(frozen=True)
class RunOutcome:
    """What a run came to.

    Attributes:
        problems: what must not be, a line each.
        lost_pods: how many of its pods did not end well; `lost_s`: their seconds.
        unasked: how often it was submitted again because it had failed, for no fault that is to end a run.
        leftovers: places of dead attempts in its store that `gc` named and deleted.
    """

    run: str
    root: str
    outcomes: Sequence[ClusterOutcome]
    problems: Sequence[str] = ()
    workflows: int = 1
    pods: int = 0
    lost_pods: int = 0
    lost_s: float = 0.0
    unasked: int = 0
    leftovers: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class ClusterCertificate:
    """The outcomes of a plan.

    Attributes:
        roots: of the run made in one process here, and of the undisturbed one on the cluster, `calm`.
        left: objects of the namespace that were not there before.
    """

    seed: int
    roots: Mapping[str, str]
    calm: RunOutcome
    runs: Sequence[RunOutcome]
    left: Sequence[str] = ()
    seconds: float = 0.0

    @property
    def outcomes(self) -> list[ClusterOutcome]:
        return [outcome for run in self.runs for outcome in run.outcomes]

    @property
    def violations(self) -> list[str]:
        """List what must not be, a line each."""
        found = [
            f"run {run.run}: {problem}"
            for run in (self.calm, *self.runs)
            for problem in run.problems
        ]
        found += [
            f"injection {each.injection}: {each.problem}" for each in self.outcomes if each.problem
        ]
        found += [
            f"injection {each.injection}: was not met" for each in self.outcomes if not each.met
        ]
        found += [f"left on the cluster: {name}" for name in self.left]
        if len({*self.roots.values()}) != 1:
            found.append(
                f"the undisturbed run has other roots here and on the cluster: {dict(self.roots)}"
            )
        return found

    def summarize(self) -> dict[str, Any]:
        """Return what the certificate states, as JSON."""
        return {
            "seed": self.seed,
            "injections": len(self.outcomes),
            "kinds": [
                self._describe_kind(kind)
                for kind in sorted({each.injection.kind for each in self.outcomes})
            ],
            "roots": dict(self.roots),
            "runs": [asdict(run) for run in (self.calm, *self.runs)],
            "equal": sum(run.root == self.roots["undisturbed"] for run in self.runs),
            "met": sum(each.met for each in self.outcomes),
            "by_hand": sum(each.by_hand for each in self.outcomes),
            "unasked": sum(run.unasked for run in self.runs),
            "lost_pods": sum(run.lost_pods for run in self.runs),
            "lost_s": sum(run.lost_s for run in self.runs),
            "left": list(self.left),
            "seconds": round(self.seconds, 1),
            "violations": self.violations,
        }

    def _describe_kind(self, kind: str) -> dict[str, Any]:
        own = [each for each in self.outcomes if each.injection.kind == kind]
        return {
            "kind": kind,
            "injections": len(own),
            "met": sum(each.met for each in own),
            "moments": sorted(
                {f"{e.injection.stage.rpartition('/')[2]} {e.injection.moment}" for e in own}
            ),
            "by_hand": sum(each.by_hand for each in own),
            "ends": dict(Counter(end for each in own for end in each.ends)),
            "lost_s": sum(each.lost_s for each in own),
        }

    def print(self) -> None:
        """Print it for people."""
        told = self.summarize()
        heads = ("injected", "met", "pods", "by hand", "lost s")
        print(
            f"\n{'kind':34}"
            + "{:>9}{:>5}{:>6}{:>9}{:>8}".format(*heads)
            + "  how pods of the stage ended"
        )
        for kind in told["kinds"]:
            ends = ", ".join(f"{name} {count}" for name, count in kind["ends"].items())
            figures = (
                kind["injections"],
                kind["met"],
                sum(kind["ends"].values()),
                kind["by_hand"],
                kind["lost_s"],
            )
            print(
                f"{kind['kind']:34}"
                + "{:>9}{:>5}{:>6}{:>9}{:>8.0f}".format(*figures)
                + f"  {ends or '-'}"
            )
        names = ("faults", "workflows", "pods", "lost", "lost s", "seconds")
        print(f"\n{'run':12}" + "{:>8}{:>11}{:>6}{:>6}{:>8}{:>9}".format(*names) + "  root")
        for run in (self.calm, *self.runs):
            figures = (
                len(run.outcomes),
                run.workflows,
                run.pods,
                run.lost_pods,
                run.lost_s,
                run.seconds,
            )
            line = "{:>8}{:>11}{:>6}{:>6}{:>8.0f}{:>9.0f}".format(*figures)
            print(f"{run.run:12}{line}  {run.root[:20]}")
        print(
            "\npods, lost: those that did not end well; lost s: their seconds, those of standing still included;"
        )
        print(
            "a pod that Argo makes anew within one attempt, because it had only just begun, is not counted;"
        )
        print("by hand: submitted again, because the fault ends a run\n")
        print(
            f"root here          {self.roots['here']}\nroot undisturbed   {self.roots['undisturbed']}"
        )
        print(
            f"equal roots, of runs with faults: {told['equal']} of {len(self.runs)} (seed {self.seed})"
        )
        print(f"injections: {told['met']} of {told['injections']}, of {len(told['kinds'])} kinds")
        print(
            f"left on the cluster: {len(self.left)}; submitted again for no fault that ends a run: {told['unasked']}"
        )
        print(
            f"work lost: {told['lost_pods']} pods, {told['lost_s']:.0f} s; took {told['seconds']} s"
        )

    def dump(self) -> str:
        """Return it as JSON."""
        return json.dumps(self.summarize(), indent=1) + "\n"
