"""Where the loop of a run stands, by what it has committed: ``python -m tuneloop.kfp.position --executor-input …``

KFP's ParallelFor hands nothing from one round to the next, so each round asks the store. Asked for an iteration, this
gives the policy it starts from; asked before the loop, the iterations still to do; after it, the last policy.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tuneloop.artifacts import find
from tuneloop.kfp.io import Task
from tuneloop.kfp.stage import handle


def position(
    run: str, start: dict[str, Any], *, iteration: int, iterations: int, target_reward: float
) -> tuple[dict[str, Any], list[int]]:
    """The policy that `iteration` starts from, and the iterations that are not done.

    Args:
        run: URL of the run.
        start: handle of the policy before the first iteration.
        iteration: 1, 2, …; 0 asks for the last policy of all.
        iterations: at most so many.
        target_reward: mean reward that ends the loop.

    Returns:
        the handle, with ``stopped`` if the loop ended before `iteration`; and the rest of the iterations.
    """
    policy, last = start, (iteration or iterations + 1) - 1
    for done in range(1, last + 1):
        at = f"{run}/iterations/{done}"
        update, reward = find(f"{at}/policy-update"), find(f"{at}/reward")
        if update is None or reward is None:
            return policy, list(range(done, iterations + 1))
        policy = handle(f"{at}/policy-update", update)
        if reward.results["mean_reward"] >= target_reward:
            return {**policy, "stopped": done}, []
    return policy, list(range(last + 1, iterations + 1))


def main(argv: Sequence[str]) -> int:
    """Run as a program."""
    task = Task.read(argv[1])
    given = task.parameters
    policy, todo = position(
        given["run"],
        task.inputs["policy"],
        iteration=int(given["iteration"]),
        iterations=int(given["iterations"]),
        target_reward=given["target_reward"],
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
