"""Completions that grow in rounds, so that a batch is complete while longer ones continue later.

A round is one call of the engine. When to stop depends on how many groups have ended, and on no
clock: the same tokens give the same rounds, however often a stage is restarted.

`stages/rollout.py` makes `Rounds` where `carry_after` is set, and `inference/generate.py` calls
`grow_completions`. `stages/rollout.py` writes the unfinished groups into the artifact
(`formats/carried.py`), from which the next iteration continues them. The tests are
`tests/unit/inference/test_rounds.py` and `tests/unit/stages/test_carry.py`.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tuneloop.core.errors import UserError
from tuneloop.formats.carried import OpenGroup
from tuneloop.formats.rollouts import Completion, Request, get_versions, request_id
from tuneloop.inference.engines import Engine, Sampling


def bound_staleness(rounds: int, groups: int, batch_groups: int) -> int:
    """Return the maximum number of iterations that a token waits for the update that trains on it.

    Each iteration has at least one round, so a group has ended after `rounds` iterations. The first
    of these takes `batch_groups` groups out, which leaves `groups - batch_groups` that are no
    newer. These are taken out first once they end.

    `config/loop.py: max_staleness` lets the update accept rollouts of this age, and the rollout
    refuses older tokens (`Rounds.oldest`): the bound has to hold for the order of `divide_groups`.

    Args:
        rounds: the number that a completion of full length takes.
        groups: the number that is sampled at a time.
        batch_groups: the number that an iteration trains on.
    """
    batches = -(-groups // batch_groups)
    return max(rounds, 2) + batches - 3 if batches > 1 else 0


@dataclass(frozen=True)
class Rounds:
    """All completions grow by `size` tokens in a round, until `batch_groups` groups have ended.

    Attributes:
        size: tokens that each completion gets in a round.
        batch_groups: the call ends once so many groups have ended.
        oldest: versions that the tokens of unfinished groups may be older than the policy.
        unfinished: groups of earlier iterations that have not ended, by name.
    """

    size: int
    batch_groups: int
    oldest: int
    unfinished: Mapping[str, OpenGroup]

    @property
    def unfinished_tokens(self) -> int:
        """The number of tokens that earlier iterations sampled for unfinished groups."""
        return sum(len(c.ids) for group in self.unfinished.values() for c in group.completions)

    def grow_completions(
        self,
        engine: Engine,
        requests: Sequence[Request],
        sampling: Sampling,
        seed_of_length: Callable[[str, int], int],
        check: Callable[[Sequence[Sequence[Completion]]], object],
        done: Callable[[int], None],
    ) -> list[list[Completion]]:
        """Return the completions of all `requests`, ended or not.

        Args:
            engine: serves the policy.
            requests: one for each group, of unfinished groups too.
            sampling: of whole completions; a round takes fewer tokens.
            seed_of_length: returns the seed of a completion that continues, from its name and the
                number of its tokens so far.
            check: called with the new part of each completion after a round.
            done: called with the number of groups that have ended.

        Raises:
            UserError: the engine gave no token to a completion.
        """
        empty = Completion([], [], "length", 0, 0)
        groups: list[list[Completion]] = []
        for request in requests:
            unfinished = self.unfinished.get(request.id)
            if unfinished is None:
                groups.append([empty] * len(request.seeds))
            else:
                groups.append(list(unfinished.completions))
        ended = 0

        def report_progress(_: int) -> None:
            done(ended)

        while True:
            parts, targets = _list_live(requests, groups, sampling.max_tokens, seed_of_length)
            limited = replace(sampling, max_tokens=self.size)
            answers = engine.generate(parts, limited, report_progress)
            check(answers)
            additions = itertools.chain.from_iterable(answers)
            for (number, sample), addition in zip(targets, additions, strict=True):
                # Otherwise the rounds would never end.
                if not addition.ids:
                    problem = "gave no token to a completion; each takes one at least"
                    raise UserError("engine", engine.name, problem)
                group = groups[number]
                group[sample] = _join(group[sample], addition, sampling)
            ended = sum(_is_ended(group, sampling.max_tokens) for group in groups)
            if ended >= self.batch_groups:
                return groups

    def divide_groups(
        self,
        groups: Sequence[Sequence[Completion]],
        max_tokens: int,
    ) -> tuple[list[int], list[int]]:
        """Divide groups into the batch, which has the first that have ended, and the others.

        Returns:
            The numbers of the groups in the batch, and of the others.
        """
        batch: list[int] = []
        remainder: list[int] = []
        for number, group in enumerate(groups):
            if len(batch) < self.batch_groups and _is_ended(group, max_tokens):
                batch.append(number)
            else:
                remainder.append(number)
        return batch, remainder


def _join(completion: Completion, addition: Completion, sampling: Sampling) -> Completion:
    """Append the tokens of a round to a completion.

    Fields of `Completion` that are not named here are lost (`prompt_logprobs` is not asked for).
    """
    versions = get_versions(completion) + get_versions(addition)
    # An engine may say length although the last token is a stop token: nothing follows that.
    is_stopped = addition.ids[-1] in sampling.stop_token_ids
    return Completion(
        ids=completion.ids + addition.ids,
        logprobs=completion.logprobs + addition.logprobs,
        finish_reason="stop" if is_stopped else addition.finish_reason,
        start_version=versions[0],
        end_version=versions[-1],
        versions=versions,
    )


def _needs_tokens(completion: Completion, max_tokens: int) -> bool:
    return completion.finish_reason == "length" and len(completion.ids) < max_tokens


def _is_ended(group: Sequence[Completion], max_tokens: int) -> bool:
    return not any(_needs_tokens(completion, max_tokens) for completion in group)


def _list_live(
    requests: Sequence[Request],
    groups: Sequence[Sequence[Completion]],
    max_tokens: int,
    seed_of_length: Callable[[str, int], int],
) -> tuple[list[Request], list[tuple[int, int]]]:
    """List the requests of a round: one for a new group, one for each completion that continues.

    Also list the numbers of the group and of the completion to which each answer belongs.
    """
    parts: list[Request] = []
    targets: list[tuple[int, int]] = []
    for number, (request, group) in enumerate(zip(requests, groups)):
        is_new = not group[0].ids
        # The completions of a new group share its prompt, which the engine computes once.
        if is_new:
            parts.append(request)
        for sample, completion in enumerate(group):
            if not _needs_tokens(completion, max_tokens):
                continue
            targets.append((number, sample))
            if is_new:
                continue
            ids = completion.ids
            name = request_id(request.id, sample)
            # With the first seed the random stream of the earlier tokens would repeat.
            seed = seed_of_length(name, len(ids))
            parts.append(Request(name, request.prompt_ids + ids, [seed]))
    return parts, targets
