"""Where a loop stands, and whether it goes on: the one definition.

A pod of several iterations (`local/iterations.py`), a task of Kubeflow Pipelines (`kfp/stage.py`,
`kfp/iterations.py`) and `tuneloop status` (`runs/summary.py`) ask a `LoopState`; Argo's ``when`` is
made from the same function (`tuneloop.argo.loop.build_loop_condition`).

Another limit of a loop is an argument of `goes_on`, a field of `LoopState`, and a parameter of the
workflow with a name that `argo/loop.py` reads; each of those who make a `LoopState` has to pass it,
as its default means that there is no such limit.
"""

import math
from dataclasses import dataclass, replace
from typing import Any


def goes_on(
    iteration: Any,
    reward: Any,
    iterations: Any,
    target_reward: Any,
) -> Any:
    """Return whether an iteration follows the one with this number and this mean reward.

    The arguments are numbers, or terms of an expression that a workflow engine evaluates. A reward
    that is not a number ends the loop.
    """
    # Not `and`, which terms of an expression do not have: Hera's have comparisons and `&`.
    return (iteration < iterations) & (reward < target_reward)


@dataclass(frozen=True)
class LoopState:
    """Where a loop stands.

    Attributes:
        iterations: the number of the last iteration; without one, the reward alone ends the loop.
        target_reward: the mean reward that ends the loop.
        iteration: the last one that has ended; 0 before the first.
        reward: its mean reward.
    """

    target_reward: float
    iterations: float = math.inf
    iteration: int = 0
    reward: float = -math.inf

    def after(self, iteration: int, reward: float) -> "LoopState":
        """Return the state after an iteration with this number and mean reward."""
        return replace(
            self,
            iteration=iteration,
            reward=reward,
        )

    @property
    def is_over(self) -> bool:
        """Whether no iteration follows."""
        return not goes_on(
            self.iteration,
            self.reward,
            self.iterations,
            self.target_reward,
        )
