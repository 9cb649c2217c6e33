"""Each algorithm by hand; tests/local/test_parity.py has them beside TRL."""

import math

import pytest
import torch
from pydantic import ValidationError

from tuneloop.algorithms import _terms, cispo, dapo, dr_grpo, grpo, gspo, reinforce_plus_plus, rloo
from tuneloop.algorithms._objective import Completions, PolicyGradient, Tokens
from tuneloop.core import plugins

REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.5, 9.0])
GROUPS = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
VALID = torch.tensor([True] * 7 + [False])
LENGTHS = torch.tensor([1, 2, 3, 1, 2, 1, 1, 2])


def completions(rewards=REWARDS, valid=VALID, kl=None):
    return Completions(rewards, GROUPS, valid, LENGTHS, LENGTHS, kl)


def firsts(values):
    """Of each completion the first token's, which all of its tokens share here."""
    parts = values.split(LENGTHS.tolist())
    assert all(part.eq(part[0]).all() for part in parts)
    return torch.stack([part[0] for part in parts])


def tokens(logprobs, old, advantages, sequence=None, **more):
    sequence = torch.arange(len(logprobs)) if sequence is None else torch.tensor(sequence)
    return Tokens(logprobs, torch.as_tensor(old), torch.as_tensor(advantages), sequence, **more)


def every():
    found = [
        plugins.load_variant("algorithms", name, "Algorithm")
        for name in plugins.list_variants("algorithms")
    ]
    return [algorithm for algorithm in found if issubclass(algorithm, PolicyGradient)]


def made(algorithm, **options):
    return algorithm(
        **{"max_completion_length": 10, **options} if algorithm is dr_grpo.Algorithm else options
    )


def test_advantages_by_hand():
    found = firsts(grpo.Algorithm().advantages(completions()))
    std = math.sqrt((0.75**2 + 3 * 0.25**2) / 3)
    centred = torch.tensor([0.75, -0.25, -0.25, -0.25])
    torch.testing.assert_close(found[:4], centred / (std + 1e-4))
    assert found[4:].tolist() == [0, 0, 0, 0]  # equal rewards, a group of one, not a score
    none = firsts(made(dr_grpo.Algorithm).advantages(completions()))
    torch.testing.assert_close(none[:4], centred)
    batch = firsts(grpo.Algorithm(scale_rewards="batch").advantages(completions()))
    torch.testing.assert_close(batch, none / (REWARDS[:7].std() + 1e-4))
    torch.testing.assert_close(
        firsts(rloo.Algorithm().advantages(completions()))[:4], centred * 4 / 3
    )


@pytest.mark.parametrize("algorithm", every(), ids=lambda a: a.__module__.rpartition(".")[2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e9])
def test_what_is_no_score_moves_no_advantage(algorithm, value):
    poisoned = REWARDS.clone()
    poisoned[7] = value
    one = made(algorithm)
    assert one.advantages(completions(poisoned)).equal(one.advantages(completions()))
    assert (
        one.advantages(completions(valid=torch.zeros(8, dtype=torch.bool))).tolist() == [0.0] * 13
    )


def test_equal_rewards_that_round_give_exact_zero():
    for algorithm in (grpo, rloo, reinforce_plus_plus):
        batch = completions(torch.full((8,), 0.1), torch.ones(8, dtype=torch.bool))
        assert algorithm.Algorithm().advantages(batch).tolist() == [0.0] * 13


def test_overlong_completions_are_punished_before_the_group_is_compared():
    """Of at most 3 tokens with a cache of 2: lengths 1, 2, 3 cost 0, 1/2, 1."""
    found = dapo.Algorithm(
        max_completion_len=3, soft_punish_cache=2, scale_rewards="none"
    ).advantages(completions())
    shaped = torch.tensor([1.0, -0.5, -1.0, 0.0])
    torch.testing.assert_close(firsts(found)[:4], shaped - shaped.mean())


def test_reinforce_plus_plus_by_hand():
    """Three completions; a token's return is the reward less β times the KL from here on; then whitened over tokens."""
    batch = Completions(
        torch.tensor([1.0, 0.0, 7.0]),
        torch.tensor([0, 0, 0]),
        torch.tensor([True, True, False]),
        torch.tensor([2, 1, 1]),
        torch.tensor([2, 1, 1]),
        torch.tensor([0.5, -1.0, 2.0, 3.0]),
    )
    found = reinforce_plus_plus.Algorithm(beta=0.1).advantages(batch)
    returns = torch.tensor([1.0 - 0.1 * (0.5 - 1.0), 1.0 + 0.1, -0.2])
    wanted = (returns - returns.mean()) / returns.std(correction=0)
    torch.testing.assert_close(found, torch.cat([wanted, torch.zeros(1)]))
    centred = torch.tensor([0.5, 0.5, -0.5])
    group = reinforce_plus_plus.Algorithm(baseline="group").advantages(batch)
    torch.testing.assert_close(group[:3], (centred - centred.mean()) / centred.std(correction=0))


def test_divergence_in_the_reward():
    """RLOO: a completion's reward falls by β times the sum over its tokens."""
    kl = torch.arange(13.0)
    sums = torch.stack([part.sum() for part in kl.split(LENGTHS.tolist())])
    found = firsts(rloo.Algorithm(beta=0.01).advantages(completions(kl=kl)))
    shaped = (REWARDS - 0.01 * sums)[:4]
    torch.testing.assert_close(found[:4], (shaped - shaped.mean()) * 4 / 3)


def gradient(ratio: float, advantage: float, **options) -> tuple[float, float]:
    """Loss and its derivative by log π at one token."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    loss = dapo.Algorithm(**options).loss(tokens(logprob, [0.0], [advantage])).per_token
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


def test_two_sided_clipping():
    assert gradient(5.0, -1.0, delta=3.0) == pytest.approx((3.0, 0.0))


def test_cispo_has_a_bound():
    """Null means "as epsilon" to the others, which cispo does not have."""
    with pytest.raises(ValidationError, match="epsilon_high"):
        cispo.Algorithm(epsilon_high=None)


def test_cispo_keeps_the_gradient_of_a_clipped_token():
    logprob = torch.tensor([math.log(8.0)], requires_grad=True)
    output = cispo.Algorithm().loss(tokens(logprob, [0.0], [2.0]))
    output.per_token.sum().backward()
    assert logprob.grad.item() == pytest.approx(-5 * 2)
    assert output.metrics["clip_fraction"].tolist() == [1]


def test_sequence_ratios():
    logprobs, old, sequence = torch.tensor([0.1, 0.3, 0.5]), torch.zeros(3), [0, 0, 1]
    about = tokens(logprobs, old, torch.ones(3), sequence)
    torch.testing.assert_close(gspo.Algorithm().ratio(about), torch.tensor([0.2, 0.2, 0.5]).exp())
    torch.testing.assert_close(rloo.Algorithm().ratio(about), torch.tensor([0.4, 0.4, 0.5]).exp())


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("none", [1, 1, 1, 1]),
        ("token_truncate", [2, 0.25, 2, 0.5]),
        ("token_mask", [0, 0, 0, 0.5]),
        ("sequence_truncate", [1.25, 1.25, 2, 2]),
        ("sequence_mask", [1.25, 1.25, 0, 0]),
        ("geometric_truncate", [1.25**0.5, 1.25**0.5, 2, 2]),
        ("geometric_mask", [1, 1, 0, 0]),
    ],
)
def test_corrections_of_the_engine(mode, weights):
    """Completions of two tokens, sampled 5, 1/4, 20 and 1/2 times too seldom; the weights have no gradient."""
    logprobs = torch.full((4,), -1.0, requires_grad=True)
    engine = -1.0 - torch.tensor([5.0, 0.25, 20.0, 0.5]).log()
    low = 0.3 if mode.endswith("mask") else None
    one = dapo.Algorithm(vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_min=low)
    output = one.loss(
        tokens(logprobs, logprobs.detach(), torch.ones(4), [0, 0, 1, 1], engine=engine)
    )
    loss = output.per_token
    assert loss.tolist() == pytest.approx([-float(w) for w in weights])
    loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx(loss.tolist())
    assert output.metrics["rejected"].tolist() == [float(w == 0) for w in weights]
    assert output.metrics["logprob_gap"].tolist() == pytest.approx(
        [math.log(x) for x in (5, 4, 20, 2)]
    )


def test_a_hopeless_engine_gives_a_finite_weight():
    weight, raw = _terms.compute_importance_weights(
        torch.tensor([89.0, -500.0]), torch.tensor([0, 0]), "token_truncate", None, 2.0
    )
    assert weight.tolist() == pytest.approx([2.0, math.exp(-20)])
    assert raw.isfinite().all()


def test_bad_completions_that_drifted_are_dropped():
    logprobs, old = torch.tensor([-1.0, -3.0, -3.0]), torch.tensor([-1.0, -1.0, -1.0])
    output = dapo.Algorithm(off_policy_mask_threshold=0.5, epsilon=0.9).loss(
        tokens(logprobs, old, [-1.0, -1.0, 1.0], [0, 1, 2])
    )
    assert output.per_token.tolist() == pytest.approx([1.0, 0.0, -math.exp(-2)])


@pytest.mark.parametrize(
    ("estimator", "corrected", "value", "slope"),
    [
        ("k1", False, 0.5, 1.0),
        ("k1", True, 0.5, 1.5),
        ("k2", False, 0.125, 0.5),
        ("k2", True, 0.125, 0.625),
        ("k3", False, math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
        ("k3", True, math.exp(-0.5) - 0.5, 0.5),
    ],
)
def test_kl_estimators(estimator, corrected, value, slope):
    """At log π/π_ref = 0.5. The slope of KL itself is that ratio (plus what has mean 0): k2's, and corrected k3's."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    one = dapo.Algorithm(beta=0.1, kl_estimator=estimator, use_bias_correction_kl=corrected)
    reference = torch.tensor([-1.5, -2.0])
    output = one.loss(tokens(logprobs, logprobs.detach(), torch.zeros(2), reference=reference))
    loss = output.per_token
    assert output.metrics["kl"].tolist() == pytest.approx([value, 0.0], abs=1e-6)
    assert loss.tolist() == pytest.approx([0.1 * value, 0.0], abs=1e-6)
    loss[0].backward()
    assert logprobs.grad.tolist() == pytest.approx([0.1 * slope, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"loss_agg_mode": "token-mean"}, [1 / 6] * 3),
        ({"loss_agg_mode": "seq-mean-token-mean"}, [1 / 3, 1 / 6, 1 / 9]),
        ({"loss_agg_mode": "seq-mean-token-sum-norm", "max_completion_length": 10}, [1 / 30] * 3),
    ],
)
def test_aggregation(options, weights):
    assert dapo.Algorithm(**options).token_weights(
        torch.tensor([1, 2, 3])
    ).tolist() == pytest.approx(weights)


@pytest.mark.parametrize(
    ("algorithm", "options", "match"),
    [
        (grpo, {"vllm_importance_sampling_clip_min": 3.0}, "must be below"),
        (dr_grpo, {}, "max_completion_length must be set"),
        (dapo, {"max_completion_len": 8}, "must be set together"),
    ],
)
def test_options_that_can_not_be(algorithm, options, match):
    with pytest.raises(ValueError, match=match):
        algorithm.Algorithm(**options)
