"""Alarms for the silent failures of reinforcement learning, found in the curves of a run.

The page and `status` show them. They go by the names of metrics that `training/policy_gradient.py`,
the algorithms, `stages/rollout.py` and `stages/reward.py` record and `Run.curves` reads, so that a
renamed metric silences one. The page knows these names, too (`ui/static/run.js`, `dom.js`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from tuneloop.runs.run_record import Curve

Points = Sequence[tuple[float, float]]
"""The points of a curve: iteration and value. There is one for each optimizer step, at fractions of
the iteration where `updates_per_batch` is above 1."""
PointsByName = Mapping[str, Points]
WINDOW = 5
"""The number of points whose median is taken as the first, or the current, value of a curve."""
LARGE_GAP = 0.01
"""In nats; different kernels with equal weights differ by less."""
SOLVED = 0.95
"""From this mean reward on there is little to learn: a policy may be certain and its groups
equal.
"""


def find_alarms(curves: Iterable[Curve]) -> list[str]:
    """Return a sentence for each alarm that the curves of a run give, with its iteration and its
    number.

    Curves over optimizer steps, as those of SFT, and those of evaluations give none.
    """
    points_by_name: dict[str, Points] = {}
    for curve in curves:
        if curve.axis == "iteration" and curve.role != "evaluator":
            points_by_name[curve.name] = list(zip(curve.x, curve.y))
    alarms = [check(points_by_name) for check in CHECKS]
    return [alarm for alarm in alarms if alarm]


def _check_gap(curves: PointsByName) -> str | None:
    """Engine and trainer compute the same probabilities; a gap that grows says that they no
    longer do.
    """
    points = curves.get("logprob_gap", ())
    if len(points) <= WINDOW:
        return None
    usual = median(gap for _, gap in points[:WINDOW])
    # A gap of zero has no tenfold.
    if not usual:
        return None
    for iteration, gap in points[WINDOW:]:
        if gap > max(10 * usual, LARGE_GAP):
            return (
                "the engine's log-probabilities of its own tokens are ten times as far from the "
                f"trainer's since iteration {iteration:g} ({usual:.2g} → {gap:.2g} nats): they no "
                "longer compute the same policy"
            )
    return None


def _check_groups(curves: PointsByName) -> str | None:
    """A group whose rewards are all equal has no advantage, and teaches nothing."""
    # Equal rewards are what is wanted once nearly all are right.
    _, equal_share = _measure_ends(curves.get("zero_variance", ()))
    _, reward = _measure_ends(curves.get("mean_reward", ()))
    if equal_share < 0.8 or reward > SOLVED:
        return None
    return (
        f"all rewards are equal in {equal_share:.0%} of groups: "
        "prompts are too easy or too hard, and little is learnt"
    )


def _check_length(curves: PointsByName) -> str | None:
    """Completions that grow while the reward does not are padded, or run into the limit."""
    # Two windows that do not overlap are compared.
    lengths = curves.get("mean_length", ())
    rewards = curves.get("mean_reward", ())
    if min(len(lengths), len(rewards)) < 2 * WINDOW:
        return None
    first_length, last_length = _measure_ends(lengths)
    first_reward, last_reward = _measure_ends(rewards)
    if last_length < 1.5 * first_length or last_reward > first_reward:
        return None
    return (
        f"completions grew from {first_length:.0f} to {last_length:.0f} tokens, "
        f"and the reward did not ({first_reward:.3f} → {last_reward:.3f})"
    )


def _check_entropy(curves: PointsByName) -> str | None:
    """A policy that has become certain explores no more."""
    entropies = curves.get("entropy", ())
    rewards = curves.get("mean_reward", ())
    if min(len(entropies), len(rewards)) < 2 * WINDOW:
        return None
    first_entropy, last_entropy = _measure_ends(entropies)
    _, reward = _measure_ends(rewards)
    if last_entropy > 0.05 * first_entropy or reward > SOLVED:
        return None
    return (
        f"the entropy fell from {first_entropy:.3g} to {last_entropy:.2g} nats: "
        "the policy samples nearly one answer only"
    )


def _check_clipping(curves: PointsByName) -> str | None:
    """If most tokens are clipped, a step is too large or the rollouts are too old."""
    _, clipped_share = _measure_ends(curves.get("clip_fraction", ()))
    if clipped_share <= 0.5:
        return None
    return (
        f"{clipped_share:.0%} of tokens are clipped: lower the learning rate, or updates_per_batch"
    )


def _measure_ends(points: Points) -> tuple[float, float]:
    """Return the medians of a curve's beginning and of its end; 0 for a curve without points."""
    values = [value for _, value in points]
    if not values:
        return 0.0, 0.0
    # A single iteration is too noisy to go by.
    return median(values[:WINDOW]), median(values[-WINDOW:])


CHECKS: tuple[Callable[[PointsByName], str | None], ...] = (
    _check_gap,
    _check_groups,
    _check_length,
    _check_entropy,
    _check_clipping,
)
"""In the order in which alarms are listed. Each returns a sentence, or None if all is well."""
