import math

import pytest
import torch

from tuneloop.algorithms import grpo

REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.5, 9.0])
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
VALID = torch.tensor([True] * 7 + [False])


def test_advantages_by_hand():
    found = grpo.advantages(REWARDS, GROUPS, VALID)
    std = math.sqrt((0.75**2 + 3 * 0.25**2) / 3)
    torch.testing.assert_close(found[:4], torch.tensor([0.75, -0.25, -0.25, -0.25]) / (std + 1e-4))
    assert found[4:].tolist() == [0, 0, 0, 0]  # equal rewards, a group of one, not a score


def test_scales_of_advantages():
    batch = grpo.advantages(REWARDS, GROUPS, VALID, scale_rewards="batch")
    none = grpo.advantages(REWARDS, GROUPS, VALID, scale_rewards="none")
    torch.testing.assert_close(none[:4], torch.tensor([0.75, -0.25, -0.25, -0.25]))
    torch.testing.assert_close(batch, none / (REWARDS[:7].std() + 1e-4))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e9])
def test_what_is_no_score_moves_no_advantage(value):
    poisoned = REWARDS.clone()
    poisoned[7] = value
    assert grpo.advantages(poisoned, GROUPS, VALID).equal(grpo.advantages(REWARDS, GROUPS, VALID))


def test_equal_rewards_that_round_give_exact_zero():
    found = grpo.advantages(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.long), torch.ones(7, dtype=torch.bool))
    assert found.tolist() == [0.0] * 7


def test_no_score_at_all():
    assert grpo.advantages(REWARDS, GROUPS, torch.zeros(8, dtype=torch.bool)).tolist() == [0.0] * 8


def gradient(ratio: float, advantage: float) -> tuple[float, float]:
    """Loss and its derivative by log π at one token."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, _ = grpo.loss(logprob, torch.zeros(1), torch.tensor([advantage]))
    loss.sum().backward()
    return loss.item(), logprob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 1.0, -1.1, -1.1),
        (1.5, 1.0, -1.28, 0.0),  # clipped above, at the higher bound
        (1.5, -1.0, 1.5, 1.5),  # a bad token that became likelier is pushed down without bound
        (0.5, -1.0, 0.8, 0.0),  # clipped below
        (0.5, 1.0, -0.5, -0.5),
    ],
)
def test_clipping(ratio, advantage, loss, slope):
    assert gradient(ratio, advantage) == pytest.approx((loss, slope), abs=1e-6)


def test_importance_weight_is_truncated_and_not_differentiated():
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    engine = torch.tensor([-1.0 - math.log(5), -1.0 + math.log(4), -90.0])
    loss, measures = grpo.loss(logprobs, logprobs.detach(), torch.ones(3), engine_logprobs=engine)
    assert loss.tolist() == pytest.approx([-2.0, -0.25, -2.0])
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-2.0, -0.25, -2.0])
    assert measures["logprob_gap"].tolist() == pytest.approx([math.log(5), math.log(4), 89.0])
    assert measures["importance_weight"].tolist() == pytest.approx([5.0, 0.25, math.exp(20)])
    off, measures = grpo.loss(
        logprobs, logprobs.detach(), torch.ones(3), engine_logprobs=engine, importance_sampling_cap=0
    )
    assert off.tolist() == pytest.approx([-1.0] * 3)
    assert "importance_weight" in measures


@pytest.mark.parametrize(("corrected", "slope"), [(False, 1 - math.exp(-0.5)), (True, 0.5)])
def test_kl_to_the_reference(corrected, slope):
    """With the correction the slope is log π/π_ref, whose mean under π is the slope of KL(π, π_ref)."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    terms = {"reference_logprobs": torch.tensor([-1.5, -2.0]), "beta": 0.1, "use_bias_correction_kl": corrected}
    loss, measures = grpo.loss(logprobs, logprobs.detach(), torch.zeros(2), **terms)
    assert measures["kl"].tolist() == pytest.approx([math.exp(-0.5) + 0.5 - 1, 0.0])
    assert loss.tolist() == pytest.approx([0.1 * (math.exp(-0.5) - 0.5), 0.0])
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([0.1 * slope, 0.0])
