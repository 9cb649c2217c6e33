"""A loop ends at one place for all that run it: by the state here, and by the expression that Argo evaluates."""

import math
from typing import Any

from hera.expr import g
from hypothesis import given
from hypothesis import strategies as st

from tuneloop.argo.loop import build_loop_condition
from tuneloop.workflow.expressions import evaluate_boolean
from tuneloop.workflow.loop_state import LoopState

TASK: Any = g.tasks.update.outputs.parameters
CONDITION = str(build_loop_condition(TASK.iteration, TASK.reward))
REWARDS = st.floats(-2.0, 2.0) | st.sampled_from([0.0, 1.0, 0.5])


@given(st.integers(0, 5), REWARDS, st.integers(1, 5), REWARDS)
def test_argos_condition_is_that_of_the_state(
    iteration: int, reward: float, iterations: int, target: float
) -> None:
    state = LoopState(target_reward=target, iterations=iterations).after(iteration, reward)
    scope = {
        "tasks.update.outputs.parameters.iteration": str(iteration),
        "tasks.update.outputs.parameters.reward": repr(reward),
        "workflow.parameters.iterations": str(iterations),
        "workflow.parameters.target-reward": repr(target),
    }
    assert evaluate_boolean(CONDITION, scope) is not state.is_over


def test_a_loop_ends_at_its_last_iteration_or_at_its_reward() -> None:
    state = LoopState(target_reward=0.9, iterations=3)
    assert not state.is_over
    assert not state.after(2, 0.89).is_over
    assert state.after(2, 0.9).is_over
    assert state.after(3, 0.0).is_over
    assert state.after(1, math.nan).is_over
    assert LoopState(target_reward=0.9).after(10**9, 0.0).is_over is False
