import pytest

from tests.unit.sharing.lease_plans import (
    ALONE,
    GROUP,
    OVERLAPPED,
    PLANS,
    SERIAL,
    SHARED,
    compare_plans,
)
from tests.unit.sharing.lease_simulation import Rules
from tests.unit.sharing.test_simulate import loop

BOTH = {"trainer": 2, "sampler": 1}


def test_what_each_plan_comes_to() -> None:
    """By hand: two runs of 4 iterations, 3 s sampling, 2 s without a device, 1 s training."""
    plans = compare_plans({name: loop(3, 2, 1, 4) for name in "ab"}, BOTH, False, Rules(GROUP))
    assert list(plans) == list(PLANS)
    assert [plan.total for plan in plans.values()] == [24, 21, 48, 33, 33]
    assert [plan.mean for plan in plans.values()] == [6, 5, 6, 46 / 6, 46 / 6], (
        "8 each, 6 once b has no company"
    )
    assert [(plan.runs, plan.iterations, plan.accelerators) for plan in plans.values()] == [
        (1, 4, 3)
    ] * 2 + [(2, 8, 3)] * 3
    assert plans[ALONE].idle("sampler") == 0.5
    assert plans[ALONE].idle("trainer") == pytest.approx(5 / 6)
    assert plans[SERIAL].idle("sampler") == 0.5
    assert plans[SHARED[0]].idle("sampler") == pytest.approx(1 - 24 / 33)
    assert plans[SHARED[0]].throughput == 8 / 33 / 3


def test_devices_that_serve_both_roles_count_once() -> None:
    plans = compare_plans({name: loop(3, 2, 1, 4) for name in "ab"}, BOTH, True, Rules(GROUP))
    assert {name: plan.accelerators for name, plan in plans.items()} == {
        **dict.fromkeys(PLANS, 2),
        OVERLAPPED: 3,
    }
    assert plans[ALONE].idle("trainer") == plans[ALONE].idle("sampler") == pytest.approx(1 / 3)
    assert plans[OVERLAPPED].idle("trainer") == pytest.approx(1 - 4 / 21)


def test_a_sampler_without_devices_is_counted_as_none() -> None:
    """Somebody else's endpoint: throughput is that of the trainer's devices, and nothing is divided by 0."""
    plans = compare_plans(
        {name: loop(3, 2, 1, 4) for name in "ab"}, {"trainer": 2, "sampler": 0}, False, Rules(GROUP)
    )
    assert {plan.accelerators for plan in plans.values()} == {2}
    assert plans[ALONE].throughput == 4 / 24 / 2 and plans[ALONE].idle("sampler") == 0.5
