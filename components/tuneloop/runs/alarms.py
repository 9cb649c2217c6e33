"""Alarms for the silent failures of reinforcement learning, found in the curves of a run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from tuneloop.runs.run_record import Curve

Points = Sequence[tuple[float, float]]
WINDOW = 5
"""The number of iterations whose median is taken as the first, or the current, value of a curve."""
LARGE_GAP = 0.01
"""In nats; different kernels with equal weights differ by less."""


def find_alarms(curves: Iterable[Curve]) -> list[str]:
    """Return a sentence for each alarm that the curves of a run give, with its iteration and its number."""
    loop = (curve for curve in curves if curve.axis == "iteration" and curve.role != "evaluator")
    inside = {curve.name: [*zip(curve.x, curve.y)] for curve in loop}
    return [alarm for check in CHECKS if (alarm := check(inside))]


def _check_gap(curves: Mapping[str, Points]) -> str | None:
    """Engine and trainer compute the same probabilities; a gap that grows says that they no longer do."""
    points = curves.get("logprob_gap", ())
    if len(points) <= WINDOW or not (usual := median(y for _, y in points[:WINDOW])):
        return None
    for x, y in points[WINDOW:]:
        if y > max(10 * usual, LARGE_GAP):
            rose = f"at iteration {x:g} ({usual:.2g} → {y:.2g} nats)"
            return f"the log-probability gap rose tenfold {rose}: engine and trainer disagree"
    return None


def _check_groups(curves: Mapping[str, Points]) -> str | None:
    """A group whose rewards are all equal has no advantage, and teaches nothing."""
    share, reward = (_ends(curves.get(name, ()))[1] for name in ("zero_variance", "mean_reward"))
    if share < 0.8 or reward > 0.95:
        return None
    return f"all rewards are equal in {share:.0%} of groups: prompts are too easy or too hard, and little is learnt"


def _check_length(curves: Mapping[str, Points]) -> str | None:
    """Completions that grow while the reward does not are padded, or run into the limit."""
    lengths, rewards = curves.get("mean_length", ()), curves.get("mean_reward", ())
    if min(len(lengths), len(rewards)) < 2 * WINDOW:
        return None
    (before, now), (worse, better) = map(_ends, (lengths, rewards))
    if now < 1.5 * before or better > worse:
        return None
    grew = f"completions grew from {before:.0f} to {now:.0f} tokens"
    return f"{grew}, and the reward did not ({worse:.3f} → {better:.3f})"


def _check_entropy(curves: Mapping[str, Points]) -> str | None:
    """A policy that has become certain explores no more."""
    points, rewards = curves.get("entropy", ()), curves.get("mean_reward", ())
    if min(len(points), len(rewards)) < 2 * WINDOW:
        return None
    before, now = _ends(points)
    if now > 0.05 * before or _ends(rewards)[1] > 0.95:
        return None
    return f"the entropy fell from {before:.3g} to {now:.2g} nats: the policy samples nearly one answer only"


def _check_clipping(curves: Mapping[str, Points]) -> str | None:
    """Where most tokens are clipped, a step is too large or the rollouts are too old."""
    share = _ends(curves.get("clip_fraction", ()))[1]
    return (
        f"{share:.0%} of tokens are clipped: lower the learning rate, or updates_per_batch"
        if share > 0.5
        else None
    )


def _ends(points: Points) -> tuple[float, float]:
    """Return the medians of a curve's beginning and of its end; 0 where it has no points."""
    values = [y for _, y in points] or [0.0]
    return median(values[:WINDOW]), median(values[-WINDOW:])


CHECKS: tuple[Callable[[Mapping[str, Points]], str | None], ...] = (
    _check_gap, _check_groups, _check_length, _check_entropy, _check_clipping,
)  # fmt: skip
