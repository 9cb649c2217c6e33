"""Completions that grow in rounds, so that a batch is complete while longer ones continue in the next iteration.

A round is one call of the engine. When to stop depends on how many groups have ended, and on no clock: the same tokens
give the same rounds, however often a stage is restarted."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tuneloop.core.errors import UserError
from tuneloop.formats.carried import Begun
from tuneloop.formats.rollouts import Completion, FinishReason, Request, get_versions, request_id
from tuneloop.inference.engines import Engine, Sampling


def bound_staleness(rounds: int, groups: int, wanted: int) -> int:
    """Return the maximum number of iterations that a token waits for the update that trains on it.

    Each iteration has at least one round, so a group has ended after `rounds` iterations. The first of these takes
    `wanted` groups out, which leaves `groups - wanted` that are no newer; these are taken out first once they end."""
    batches = -(-groups // wanted)
    return max(rounds, 2) + batches - 3 if batches > 1 else 0


def has_ended(said: Completion, max_tokens: int) -> bool:
    """Return whether a completion needs no further token."""
    return said.finish_reason != "length" or len(said.ids) >= max_tokens


@dataclass(frozen=True)
class Rounds:
    """All completions grow by at most `size` tokens in a round, until `wanted` groups have ended. `begun`: unfinished
    groups of earlier iterations, by name; `oldest`: how many versions older than the policy their tokens may be."""

    size: int
    wanted: int
    oldest: int
    begun: Mapping[str, Begun]

    @property
    def begun_tokens(self) -> int:
        """The number of tokens that earlier iterations sampled for unfinished groups."""
        return sum(len(said.ids) for each in self.begun.values() for said in each.completions)

    def grow_completions(
        self,
        engine: Engine,
        requests: Sequence[Request],
        sampling: Sampling,
        seed: Callable[[str, int], int],
        check: Callable[[Sequence[Sequence[Completion]]], object],
        done: Callable[[int], None],
    ) -> list[list[Completion]]:
        """Return the completions of all `requests`, ended or not. `seed` gets the name and the length of a completion
        that continues; `check` gets all completions after a round; `done` gets the number of groups that have ended."""
        nothing = Completion([], [], "length", 0, 0)
        groups = [
            [*self.begun[each.id].completions]
            if each.id in self.begun
            else [nothing] * len(each.seeds)
            for each in requests
        ]
        ended = 0

        def beat(_: int) -> None:
            done(ended)

        while True:
            asked, places = _list_live(requests, groups, sampling.max_tokens, seed)
            made = engine.generate(asked, replace(sampling, max_tokens=self.size), beat)
            check(made)
            for (group, sample), new in zip(
                places, itertools.chain.from_iterable(made), strict=True
            ):
                said = groups[group][sample]
                if not new.ids:
                    raise UserError(
                        "engine",
                        engine.name,
                        "gave no token to a completion; each takes one at least",
                    )
                # An engine may say length although the last token is a stop token: nothing is sampled after that.
                reason: FinishReason = (
                    "stop" if new.ids[-1] in sampling.stop_token_ids else new.finish_reason
                )
                versions = get_versions(said) + get_versions(new)
                whole = said.ids + new.ids, said.logprobs + new.logprobs, reason
                groups[group][sample] = Completion(*whole, versions[0], versions[-1], versions)
            ended = sum(
                all(has_ended(said, sampling.max_tokens) for said in each) for each in groups
            )
            if ended >= self.wanted:
                return groups

    def divide_groups(
        self, groups: Sequence[Sequence[Completion]], max_tokens: int
    ) -> tuple[list[int], list[int]]:
        """Divide groups, by their places, into the first `wanted` that have ended and all others."""
        ended = [
            i for i, each in enumerate(groups) if all(has_ended(said, max_tokens) for said in each)
        ]
        batch = ended[: self.wanted]
        return batch, sorted({*range(len(groups))} - {*batch})


def _list_live(
    requests: Sequence[Request],
    groups: Sequence[Sequence[Completion]],
    most: int,
    seed: Callable[[str, int], int],
) -> tuple[list[Request], list[tuple[int, int]]]:
    """List the requests of a round, one for a new group and one for each completion that continues; and the group and
    completion to which each answer belongs."""
    asked: list[Request] = []
    places: list[tuple[int, int]] = []
    for place, (request, group) in enumerate(zip(requests, groups)):
        live = [i for i, said in enumerate(group) if not has_ended(said, most)]
        places += [(place, i) for i in live]
        if not group[0].ids:
            asked.append(request)
            continue
        for i in live:
            name = request_id(request.id, i)
            ids = group[i].ids
            asked.append(Request(name, request.prompt_ids + ids, [seed(name, len(ids))]))
    return asked, places
