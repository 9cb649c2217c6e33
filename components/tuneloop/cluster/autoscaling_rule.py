"""Decide how many replicas a fleet of rollout servers needs, by its requests and its idle time; it reads no clock.

By requests it is the algorithm of Kubernetes' HorizontalPodAutoscaler for an average value (kubernetes.io, "Horizontal
Pod Autoscaling"), with its tolerance and stabilization window; between 0 and 1 KEDA's activation (keda.sh, "Scaling
Deployments"). The upper bound is the n that minimizes the device time of an iteration, ``(weight + n) × (W / n + U)``:
``sqrt(weight × W / U)``. The trainer idles for the W / n seconds of sampling, and the n replicas for the other U
seconds. Neither W nor U depends on n, so the bound is stable."""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Iteration:
    """An iteration: when it `began` (Unix seconds), and for how many seconds samplers worked in it, and idled."""

    began: float
    sampling: float
    idle: float


@dataclass
class AutoscalingRule:
    """The rule, for `minimum` to `maximum` replicas, and its state.

    Attributes:
        target: requests for each replica.
        window_s: stabilization window; longer than a replica's start, and than samplers idle in an iteration.
        weight: devices of the trainer for each device of a replica.
        tolerance: relative deviation from the target, and from a whole replica, that is ignored.
    """

    minimum: int
    maximum: int
    target: float
    window_s: float = 300.0
    weight: float = 1.0
    tolerance: float = 0.1
    _recommended: list[tuple[float, int]] = field(default_factory=list)
    _bound: int | None = None
    _changed: float = 0.0

    def decide(
        self,
        now: float,
        replicas: int,
        ready: int,
        requests: float,
        clients: int,
        last: Iteration | None = None,
    ) -> int:
        """Decide on replicas at `now` (Unix seconds).

        Args:
            replicas, ready: the number of desired replicas, and of those that answer.
            requests: completions that run or wait at the replicas.
            clients: pods that may send requests; without a replica, their waiting requests are not counted.
            last: the newest iteration of the run that they sample for.
        """
        if (
            last and last.sampling and last.idle and last.began >= self._changed
        ):  # all sampled by these replicas
            best = min(math.sqrt(self.weight * replicas * last.sampling / last.idle), self.maximum)
            if self._bound is None or abs(best - self._bound) > 0.5 + self.tolerance:
                self._bound = max(1, round(best))
        wanted = max(math.ceil(requests / self.target), min(clients, 1))
        if replicas and abs(requests / (self.target * replicas) - 1) <= self.tolerance:
            wanted = replicas
        wanted = max(self.minimum, min(wanted, self._bound or self.maximum, self.maximum))
        recent = [
            each for each in self._recommended or [(now, replicas)] if now - each[0] < self.window_s
        ]
        self._recommended = [*recent, (now, wanted)]
        decided = max(
            wanted, min(replicas, self.maximum, max(number for _, number in self._recommended))
        )
        if decided != replicas or ready != replicas:
            self._changed = now
        return decided
