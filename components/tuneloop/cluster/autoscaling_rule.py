"""How many replicas a fleet of rollout servers is to have, by what is asked of it and by what idles. Pure: no clock.

By requests it is the algorithm of Kubernetes' HorizontalPodAutoscaler for an average value (kubernetes.io, "Horizontal
Pod Autoscaling"), with its tolerance and stabilization window; between 0 and 1 KEDA's activation (keda.sh, "Scaling
Deployments"). The bound is the n for which the device time of an iteration, ``(weight + n) × (W / n + U)``, is least,
``sqrt(weight × W / U)``: the trainer idles for the W / n seconds of sampling, and n replicas for the other U. Neither W
nor U depends on n, so the bound is stable."""

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
    """The rule, for `minimum` to `maximum` replicas, and what it remembers.

    Attributes:
        target: requests a replica.
        window_s: seconds of stabilization; longer than a replica takes to start, and than samplers idle an iteration.
        weight: devices of the trainer for one of a replica.
        tolerance: part of the target, and of a replica, that changes nothing.
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
        self, now: float, replicas: int, ready: int, requests: float, clients: int, last: Iteration | None = None
    ) -> int:
        """Decide on replicas at `now` (Unix seconds).

        Args:
            replicas, ready: replicas that are asked for; of these, those that answer.
            requests: completions that run or wait at them.
            clients: pods that may send requests; without a replica, nothing counts the requests that they wait for.
            last: the newest iteration of the run that they sample for.
        """
        if last and last.sampling and last.idle and last.began >= self._changed:  # these replicas sampled all of it
            best = min(math.sqrt(self.weight * replicas * last.sampling / last.idle), self.maximum)
            if self._bound is None or abs(best - self._bound) > 0.5 + self.tolerance:
                self._bound = max(1, round(best))
        wanted = max(math.ceil(requests / self.target), min(clients, 1))
        if replicas and abs(requests / (self.target * replicas) - 1) <= self.tolerance:
            wanted = replicas
        wanted = max(self.minimum, min(wanted, self._bound or self.maximum, self.maximum))
        recent = [each for each in self._recommended or [(now, replicas)] if now - each[0] < self.window_s]
        self._recommended = [*recent, (now, wanted)]
        decided = max(wanted, min(replicas, self.maximum, max(number for _, number in self._recommended)))
        if decided != replicas or ready != replicas:
            self._changed = now
        return decided
