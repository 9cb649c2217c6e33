"""What an update learns from scored rollouts: groups, advantages and mini-batches.

`stages/policy_update.py` calls these in order: `keep_groups`, `set_advantages`,
`split_mini_batches`. Its `replay_updates` repeats updates that were committed earlier with this
code and proves every bit: another order, random stream or sum ends the replay of runs that go on
with a later release. Tests: `tests/unit/stages/test_policy_update.py`, `test_replay.py`.
"""

from array import array
from collections.abc import Sequence

from tuneloop.algorithms._objective import Completions, PolicyGradient
from tuneloop.algorithms._terms import estimate_kl
from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import Stage
from tuneloop.core.errors import UserError
from tuneloop.core.wording import format_count
from tuneloop.formats.facts import RewardFacts
from tuneloop.training.samples import Sample, select_groups


def keep_groups(
    stage: Stage,
    rewards: Artifact,
    samples: list[Sample],
    updates: int,
    step: int,
) -> tuple[list[Sample], int]:
    """Keep the groups that the update uses, if more were sampled than it wants.

    How many groups were kept, and how many were not, is recorded in ``facts.groups`` and as
    metrics, by the names that `samples.select_groups` gives. ``facts.groups`` of the rollouts is
    something else: what was asked for and wanted (`formats/facts.py: OversamplingFacts`).

    Args:
        updates: optimizer steps that the user asked for.
        step: of the optimizer, before the update.

    Returns:
        The samples of the groups that are kept, and the optimizer steps: at most one a group.
    """
    oversampling = RewardFacts.read(rewards, "--rewards").groups
    if oversampling is None:
        return samples, updates
    samples, counts = select_groups(samples, oversampling.wanted)
    stage.facts["groups"] = counts
    stage.log("groups: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    stage.metric(step, **{f"groups_{name}": count for name, count in counts.items()})
    return samples, min(updates, counts["kept"])


def set_advantages(algorithm: PolicyGradient, samples: Sequence[Sample]) -> None:
    """Set the advantages of all samples, one a target token, and which samples count and are used.

    With a KL term in the reward, the samples must have the log-probabilities of both policies.
    """
    import torch

    targets = torch.tensor([sample.document.target_count for sample in samples])
    kl = None
    if algorithm.beta and algorithm.kl_in == "reward":
        old = _join_logprobs([sample.old for sample in samples], samples)
        reference = _join_logprobs([sample.reference for sample in samples], samples)
        kl = estimate_kl(torch.tensor(old), torch.tensor(reference), algorithm.kl_estimator)
    completions = Completions(
        rewards=torch.tensor([sample.score or 0.0 for sample in samples]),
        groups=torch.tensor([sample.group for sample in samples]),
        valid=torch.tensor([sample.score is not None for sample in samples]),
        lengths=torch.tensor([sample.length for sample in samples]),
        targets=targets,
        kl=kl,
    )
    values = algorithm.advantages(completions)
    # The values of all samples lie end to end, one a target token.
    for sample, advantages in zip(samples, values.split(targets.tolist())):
        sample.advantages = array("f", advantages.tolist())
        _mark_use(algorithm, sample, has_advantage=bool(advantages.any()))


def _mark_use(algorithm: PolicyGradient, sample: Sample, *, has_advantage: bool) -> None:
    """Set whether a sample counts in the mean of the loss, and whether it goes through the model."""
    # A completion that was cut off may have been right: its reward is noise (DAPO's overlong
    # filtering, arXiv 2503.14476, section 3.4).
    is_masked = algorithm.mask_truncated_completions and sample.truncated
    is_valid = sample.score is not None and not is_masked
    # A KL term in the loss has a gradient for every token.
    has_kl_in_loss = bool(algorithm.beta and algorithm.kl_in == "loss")
    has_gradient = has_advantage or has_kl_in_loss or algorithm.needs_every_completion
    sample.counted = is_valid and (has_gradient or not algorithm.dynamic_sampling)
    sample.used = is_valid and has_gradient and bool(sample.document.target_count)


def _join_logprobs(parts: "Sequence[array[float]]", samples: Sequence[Sample]) -> list[float]:
    """Join the log-probabilities of all samples; those that were not computed count as zero."""
    joined: list[float] = []
    for part, sample in zip(parts, samples):
        joined += part or [0.0] * sample.document.target_count
    return joined


def split_mini_batches(stage: Stage, samples: Sequence[Sample], count: int) -> list[list[Sample]]:
    """Split scored samples into `count` parts of whole groups, in random order.

    Raises:
        UserError: there are fewer groups than parts.
    """
    import torch

    groups = sorted({sample.group for sample in samples})
    if count > len(groups):
        remedy = f"is more than the {format_count(len(groups), 'group')} of rollouts; lower it"
        raise UserError("--updates-per-batch", count, remedy)
    generator = torch.Generator().manual_seed(stage.seed("mini_batches"))
    order = torch.randperm(len(groups), generator=generator).tolist()
    # Groups are dealt out like cards, so that the parts have equally many but for one.
    part_by_group = {groups[index]: position % count for position, index in enumerate(order)}
    batches: list[list[Sample]] = [[] for _ in range(count)]
    for sample in samples:
        if sample.score is not None:
            batches[part_by_group[sample.group]].append(sample)
    return batches
