"""Decide how many replicas a fleet of rollout servers needs, by its requests and its idle time.

It reads no clock. By requests it is the algorithm of Kubernetes' HorizontalPodAutoscaler for an
average value (kubernetes.io, "Horizontal Pod Autoscaling"), with its tolerance and stabilization
window. Between 0 and 1 it is KEDA's activation (keda.sh, "Scaling Deployments"). The upper bound is
the n that minimizes the device time of an iteration, ``(weight + n) × (W / n + U)``:
``sqrt(weight × W / U)``. The trainer idles for the W / n seconds of sampling, and the n replicas
for the other U seconds. Neither W nor U depends on n, so the bound is stable.

`extensions/fleets/autoscaler.py: scale_fleet` asks it and scales. A run and its fleet are simulated
in `tests/extensions/fleets/fleet_simulation.py`.
"""

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Iteration:
    """One iteration of a run.

    Attributes:
        began: when it began (Unix seconds).
        sampling, idle: for how many seconds samplers worked in it, and idled.
    """

    began: float
    sampling: float
    idle: float


@dataclass
class AutoscalingRule:
    """The rule, for `minimum` to `maximum` replicas, and its state.

    Attributes:
        target: requests for each replica.
        window_s: stabilization window; it has to be longer than a replica's start, and than
            samplers idle in an iteration.
        weight: devices of the trainer for each device of a replica.
        tolerance: relative deviation from the target, and from a whole replica, that is ignored.

    `extensions/fleets/fleet_commands.py: autoscale_fleet` gives the first five by position, from
    options that have defaults of their own: a field that is added comes after these, and does not
    change what the command does until it is an option there.
    """

    minimum: int
    maximum: int
    target: float
    window_s: float = 300.0
    weight: float = 1.0
    tolerance: float = 0.1
    _recommendations: list[tuple[float, int]] = field(default_factory=list)
    _bound: int | None = None
    _changed_at: float = 0.0

    def decide(
        self,
        timestamp: float,
        replicas: int,
        ready: int,
        requests: float,
        clients: int,
        last: Iteration | None = None,
    ) -> int:
        """Decide on the number of replicas.

        Args:
            timestamp: the time of the other figures (Unix seconds).
            replicas, ready: the number of desired replicas, and of those that answer.
            requests: completions that run or wait at the replicas.
            clients: pods that may send requests; without a replica, their waiting requests are not
                counted.
            last: the newest iteration of the run that they sample for.
        """
        # An iteration that began later was sampled by these replicas alone.
        if last and last.sampling and last.idle and last.began >= self._changed_at:
            self._update_bound(replicas, last)
        recommendation = self._recommend(replicas, requests, clients)
        if not self._recommendations:
            # A rule that was started again removes nothing at once.
            self._recommendations = [(timestamp, replicas)]
        recent = [
            (time, number)
            for time, number in self._recommendations
            if timestamp - time < self.window_s
        ]
        recent.append((timestamp, recommendation))
        self._recommendations = recent
        highest = max(number for _, number in recent)
        # Replicas are added at once, and removed when the whole window asked for fewer.
        remaining = min(replicas, self.maximum, highest)
        decision = max(recommendation, remaining)
        if decision != replicas or ready != replicas:
            self._changed_at = timestamp
        return decision

    def _update_bound(self, replicas: int, last: Iteration) -> None:
        """Set the upper bound by the seconds that samplers worked and idled with `replicas`."""
        # W is the seconds of one replica: with n of them, sampling takes W / n.
        work = replicas * last.sampling
        optimum = math.sqrt(self.weight * work / last.idle)
        optimum = min(optimum, self.maximum)
        if self._bound is not None:
            # Within the tolerance the bound stays, so that it does not swing.
            deviation = abs(optimum - self._bound)
            if deviation <= 0.5 + self.tolerance:
                return
        self._bound = max(1, round(optimum))

    def _recommend(self, replicas: int, requests: float, clients: int) -> int:
        """Return the number of replicas for these requests, within the bounds."""
        number = math.ceil(requests / self.target)
        # Requests that wait for a first replica are not counted anywhere, and a mean of next to no
        # requests may become zero by the division.
        if clients or requests:
            number = max(number, 1)
        if replicas:
            load = requests / (self.target * replicas)
            if abs(load - 1) <= self.tolerance:
                number = replicas
        number = min(number, self._bound or self.maximum, self.maximum)
        return max(self.minimum, number)
