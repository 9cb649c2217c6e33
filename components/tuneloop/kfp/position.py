"""Where the loop of a run stands, by what it has committed: ``python -m tuneloop.kfp.position --executor-input …``

KFP's ParallelFor hands nothing from one round to the next, so each round asks the store. Asked for an iteration, this
gives the policy it starts from; asked before the loop, the rounds still to do; after it, the last policy.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tuneloop.core.artifacts import find_below
from tuneloop.kfp.io import Task
from tuneloop.kfp.stage import build_handle


def find_position(
    run: str, start: dict[str, Any], *, iteration: int, iterations: int, target_reward: float, stride: int = 1
) -> tuple[dict[str, Any], list[int]]:
    """Find the policy that `iteration` starts from, and the iterations that are left.

    Before and after the loop every reward is looked at, several at a time. A round of it looks only for where it
    stands: the rewards before the first round were below the target, or there would be no round.

    Args:
        run: URL of the run.
        start: handle of the policy before the first iteration.
        iteration: 1, 2, …; 0 asks for the last policy of all.
        iterations: at most so many.
        target_reward: mean reward that ends the loop.
        stride: iterations of a round.

    Returns:
        the handle, with ``stopped`` if the loop ended before `iteration`; and the first iterations of the rounds that
        are left.
    """

    def made(i: int) -> tuple[dict[str, Any], float] | None:
        at = f"{run}/iterations/{i}"
        by_role = {manifest.role: (name, manifest) for name, manifest in find_below(at).items()}  # the last of each
        if not {"trainer", "scorer"} <= by_role.keys():
            return None
        name, update = by_role["trainer"]
        return build_handle(f"{at}/{name}", update), by_role["scorer"][1].results["mean_reward"]

    last = (iteration or iterations + 1) - 1
    done = bisect_left(range(1, last + 1), True, key=lambda i: made(i) is None)
    policy, asked = start, range(max(done, 1) if iteration else 1, done + 1)
    with ThreadPoolExecutor() as pool:
        for i, found in zip(asked, pool.map(made, asked)):
            if found is None:
                return policy, _rounds(i, iterations, stride)
            policy, reward = found
            if reward >= target_reward:
                return {**policy, "stopped": i}, []
    return policy, _rounds(done + 1, iterations, stride)


def _rounds(first: int, iterations: int, stride: int) -> list[int]:
    """The first iteration of each round, from the one that has `first` in it."""
    return list(range(first - (first - 1) % stride, iterations + 1, stride))


def main(argv: Sequence[str]) -> int:
    """Run as a program."""
    task = Task.read(argv[1])
    given = task.parameters
    policy, todo = find_position(
        given["run"],
        task.inputs["policy"],
        iteration=int(given["iteration"]),
        iterations=int(given["iterations"]),
        target_reward=given["target_reward"],
        stride=int(given["stride"]),
    )
    print(f"policy {policy['ref']}; to do: {todo or 'nothing'}", file=sys.stderr)
    task.describe("start", policy)
    task.write("start", f"{policy}\n")
    every, iteration = int(given["evaluate_every"]), int(given["iteration"])
    at = f"{given['run']}/iterations/{iteration}"
    task.results = {"todo": todo, "at": at, "evaluate": bool(every and iteration % every == 0)}
    task.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
