"""Completions that grow in rounds, so that a batch is ready while others go on in the next iteration.

A round is one call of the engine. When to stop depends on how many groups have ended, and on no clock: the same tokens
give the same rounds, however often a stage is begun anew."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tuneloop.core.errors import UserError
from tuneloop.formats.carried import Begun
from tuneloop.formats.rollouts import Completion, FinishReason, Request, get_versions, request_id
from tuneloop.inference.engines import Engine, Sampling


def bound_staleness(rounds: int, groups: int, wanted: int) -> int:
    """Return how many iterations a token waits at most for the update that learns from it.

    Each iteration has a round at least, so a group has ended after `rounds` of them. Its first takes `wanted` groups
    away: of those begun no later, `groups - wanted` are left, which once they have ended are the first to leave."""
    batches = -(-groups // wanted)
    return max(rounds, 2) + batches - 3 if batches > 1 else 0


def has_ended(said: Completion, max_tokens: int) -> bool:
    """Return whether a completion needs no further token."""
    return said.finish_reason != "length" or len(said.ids) >= max_tokens


@dataclass(frozen=True)
class Rounds:
    """All completions grow by at most `size` tokens a round, until `wanted` groups have ended. `begun`: groups by name
    that go on; `oldest`: versions that their tokens may be older than the policy."""

    size: int
    wanted: int
    oldest: int
    begun: Mapping[str, Begun]

    @property
    def begun_tokens(self) -> int:
        """Tokens of the groups that go on, which earlier iterations sampled."""
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
        """Return the completions of all `requests`, ended or not. `seed` gets the name of a completion that goes on and
        its length; `check` what a round made; `done` the number of groups that have ended."""
        nothing = Completion([], [], "length", 0, 0)
        groups = [
            [*self.begun[each.id].completions] if each.id in self.begun else [nothing] * len(each.seeds)
            for each in requests
        ]
        ended = 0

        def beat(_: int) -> None:
            done(ended)

        while True:
            asked, places = _list_live(requests, groups, sampling.max_tokens, seed)
            made = engine.generate(asked, replace(sampling, max_tokens=self.size), beat)
            check(made)
            for (group, sample), new in zip(places, itertools.chain.from_iterable(made), strict=True):
                said = groups[group][sample]
                if not new.ids:
                    raise UserError("engine", engine.name, "gave no token to a completion; each takes one at least")
                # An engine may call it length where both are so: nothing is sampled behind a stop token.
                reason: FinishReason = "stop" if new.ids[-1] in sampling.stop_token_ids else new.finish_reason
                versions = get_versions(said) + get_versions(new)
                whole = said.ids + new.ids, said.logprobs + new.logprobs, reason
                groups[group][sample] = Completion(*whole, versions[0], versions[-1], versions)
            ended = sum(all(has_ended(said, sampling.max_tokens) for said in each) for each in groups)
            if ended >= self.wanted:
                return groups

    def divide_groups(self, groups: Sequence[Sequence[Completion]], max_tokens: int) -> tuple[list[int], list[int]]:
        """Divide groups, by their places, into the first `wanted` that have ended and all others."""
        ended = [i for i, each in enumerate(groups) if all(has_ended(said, max_tokens) for said in each)]
        batch = ended[: self.wanted]
        return batch, sorted({*range(len(groups))} - {*batch})


def _list_live(
    requests: Sequence[Request], groups: Sequence[Sequence[Completion]], most: int, seed: Callable[[str, int], int]
) -> tuple[list[Request], list[tuple[int, int]]]:
    """List what to ask for: a new group as one request, each completion that goes on as one of its own; and to which
    group and completion each answer belongs."""
    asked: list[Request] = []
    places: list[tuple[int, int]] = []
    for place, (request, group) in enumerate(zip(requests, groups)):
        live = [i for i, said in enumerate(group) if not has_ended(said, most)]
        places += [(place, i) for i in live]
        if not group[0].ids:
            asked.append(request)
            continue
        for i in live:
            name, ids = request_id(request.id, i), group[i].ids
            asked.append(Request(name, request.prompt_ids + ids, [seed(name, len(ids))]))
    return asked, places
