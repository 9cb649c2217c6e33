"""How many rollout replicas: the autoscaler's rule beside fixed numbers, in a simulation.

    python benchmarks/autoscaling.py

One run of 24 iterations, each 1024 completions of 40 s in the mean (160 s at most) and 240 s of training on
two devices; a replica has one, works on 32 completions at a time, and takes 60 s to start. Device-seconds are counted
until 30 minutes after the run. Nothing is measured: the rule's own code decides.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.extensions.fleets.fleet_simulation import tabulate


def main() -> None:
    print(
        f"{'':28}{'seconds':>9}{'devices':>9}{'trainer idle':>14}{'replicas idle':>15}  seconds: replicas"
    )
    for name, made in tabulate().items():
        numbers = ", ".join(f"{at}: {number}" for at, number in made.decided)
        print(
            f"{name:28}{made.seconds:9}{made.devices:9}{made.trainer_idle:14}{made.sampler_idle:15}  {numbers}"
        )


if __name__ == "__main__":
    main()
