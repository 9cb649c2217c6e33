"""Rounds of completions with an engine whose completions have given lengths."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneloop.core.seeds import derive_seed
from tuneloop.formats.carried import OpenGroup
from tuneloop.formats.rollouts import Completion, FinishReason, Request, get_versions
from tuneloop.inference.engines import Sampling
from tuneloop.inference.rounds import Rounds, bound_staleness

STOP, PROMPT = 1, [7, 7]


class Given:
    """Completions of the request `name` have `length(name, sample)` tokens in all, each by its seed and its place.
    `asked` has each call's requests."""

    def __init__(self, version: int, length: Callable[[str, int], int]) -> None:
        self.version, self.length = version, length
        self.asked: list[list[Request]] = []

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, done: Callable[[int], None]
    ) -> list[list[Completion]]:
        self.asked.append([*requests])
        done(0)
        return [self._complete(request, sampling) for request in requests]

    def _complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        name, _, number = request.id.partition("-s")
        return [
            self._say(
                seed,
                sampling,
                len(request.prompt_ids) - len(PROMPT),
                self.length(name, int(number or sample)),
            )
            for sample, seed in enumerate(request.seeds)
        ]

    def _say(self, seed: int, sampling: Sampling, before: int, wanted: int) -> Completion:
        left = wanted - before
        assert left > 0, "a completion that has ended is not asked for again"
        ids = [
            derive_seed(seed, "token", place) % 1000 + 2
            for place in range(min(left, sampling.max_tokens))
        ]
        if left <= sampling.max_tokens:
            ids[-1] = STOP
        reason: FinishReason = "stop" if left <= sampling.max_tokens else "length"
        return Completion(ids, [-0.5 * self.version] * len(ids), reason, self.version, self.version)


def play(
    engine: Given,
    rounds: Rounds,
    names: Sequence[str],
    n: int,
    most: int,
    over: list[int] | None = None,
) -> list[list[Completion]]:
    requests = [
        Request(name, PROMPT, [derive_seed(0, name, i) for i in range(n)]) for name in names
    ]

    def check(made: Sequence[Sequence[Completion]]) -> None:
        assert {v for group in made for said in group for v in get_versions(said)} == {
            engine.version
        }

    seeds = lambda name, length: derive_seed(0, "on", name, length)  # noqa: E731
    done = over.append if over is not None else lambda _: None
    return rounds.grow_completions(
        engine, requests, Sampling(1.0, most, (STOP,)), seeds, check, done
    )  # type: ignore[arg-type]


def test_completions_grow_until_enough_groups_have_ended() -> None:
    lengths = {"a": (1, 5), "b": (2, 2), "c": (7, 7), "d": (4, 3)}
    engine, rounds, over = (
        Given(3, lambda name, sample: lengths[name][sample]),
        Rounds(2, 2, 0, {}),
        list[int](),
    )
    made = play(engine, rounds, [*lengths], 2, 6, over)
    assert [[(r.id, len(r.prompt_ids) - 2) for r in asked] for asked in engine.asked] == [
        [("a", 0), ("b", 0), ("c", 0), ("d", 0)],
        [("a-s01", 2), ("c-s00", 2), ("c-s01", 2), ("d-s00", 2), ("d-s01", 2)],
    ]
    assert over == [0, 1], "after the first round b had ended, after the second b and d"
    assert rounds.divide_groups(made, 6) == ([1, 3], [0, 2])
    assert [[(len(c.ids), c.finish_reason) for c in group] for group in made] == [
        [(1, "stop"), (4, "length")], [(2, "stop"), (2, "stop")],
        [(4, "length"), (4, "length")], [(4, "stop"), (3, "stop")],
    ]  # fmt: skip
    seeds = [seed for asked in engine.asked for r in asked for seed in r.seeds]
    assert len(seeds) == len({*seeds}), "no stream is used twice"

    begun = {name: OpenGroup({}, PROMPT, made[i]) for i, name in enumerate(lengths) if i in (0, 2)}
    later = Rounds(2, 2, 1, begun)
    assert later.unfinished_tokens == 1 + 4 + 4 + 4
    engine = Given(4, lambda name, sample: 1 if name == "e" else lengths[name][sample])
    whole = play(engine, later, ["a", "c", "e"], 2, 6)
    assert [[r.id for r in asked] for asked in engine.asked] == [["a-s01", "c-s00", "c-s01", "e"]]
    assert later.divide_groups(whole, 6) == ([0, 1], [2])
    assert [said.ids[:4] for said in whole[1]] == [said.ids for said in made[2]]
    assert (
        whole[1][0].versions == [3, 3, 3, 3, 4, 4]
        and whole[1][0].logprobs == [-1.5] * 4 + [-2.0] * 2
    )
    assert (whole[1][0].start_version, whole[1][0].end_version, whole[1][0].finish_reason) == (
        3,
        4,
        "length",
    )
    assert whole[0][0] == made[0][0], "what has ended is as it was"


@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(0, 6), st.integers(1, 3), st.integers(0, 10**6)
)  # fmt: skip
def test_every_group_is_in_one_batch_and_no_token_is_older_than_the_bound(
    rounds: int, wanted: int, more: int, n: int, seed: int
) -> None:
    size, groups, begun, drawn = 2, wanted + more, dict[str, OpenGroup](), 0
    bound, batches = bound_staleness(rounds, groups, wanted), list[list[str]]()
    for version in range(12):
        fresh = [f"i{version:02d}-p{place}" for place in range(groups - len(begun))]
        drawn += len(fresh)
        names = [*begun, *fresh]
        engine = Given(
            version, lambda name, sample: derive_seed(seed, name, sample) % (2 * size * rounds) + 1
        )
        made = play(engine, one := Rounds(size, wanted, bound, begun), names, n, size * rounds)
        batch, left = one.divide_groups(made, size * rounds)
        batches.append([names[i] for i in batch])
        oldest = min(v for i in batch for said in made[i] for v in said.versions)
        assert version - oldest <= bound
        begun = {names[i]: OpenGroup({}, PROMPT, made[i]) for i in left}
    trained = [name for batch in batches for name in batch]
    assert len(trained) == len({*trained}) == 12 * wanted and not begun.keys() & {*trained}
    assert drawn == 12 * wanted + len(begun) == 11 * wanted + groups


@pytest.mark.parametrize(
    ("rounds", "groups", "wanted", "bound"),
    [
        (4, 8, 8, 0),
        (1, 16, 8, 1),
        (2, 16, 8, 1),
        (2, 9, 8, 1),
        (4, 16, 8, 3),
        (4, 24, 8, 4),
        (1, 24, 8, 2),
    ],
)
def test_the_bound_is_reached(rounds: int, groups: int, wanted: int, bound: int) -> None:
    """By groups that take all rounds beside others that end in the first."""
    assert bound_staleness(rounds, groups, wanted) == bound
    begun, ages = dict[str, OpenGroup](), list[int]()
    for version in range(bound + 1):
        fresh = [f"i{version}-p{place}" for place in range(groups - len(begun))]
        names = [*begun, *fresh]
        long = {f"i0-p{place}" for place in range(groups) if place >= wanted}
        engine = Given(version, lambda name, sample: 2 * rounds if name in long else 1)  # noqa: B023
        made = play(engine, one := Rounds(2, wanted, bound, begun), names, 1, 2 * rounds)
        batch, left = one.divide_groups(made, 2 * rounds)
        ages += [version - min(made[i][0].versions) for i in batch]
        begun = {names[i]: OpenGroup({}, PROMPT, made[i]) for i in left}
    assert max(ages) == bound
