"""Completions of several turns: the policy speaks, an environment replies, and so on, in one growing list of ids.

The prompt of each turn is, id by id, the input and output of the engine in the turns before and the encoded reply: no
sampled token is ever tokenized again. So one pass over the whole list gives every turn's log-probabilities, and all
that `policy_update` needs to know is which tokens were sampled.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, validate_call

from tuneloop.core import plugins
from tuneloop.core.component import Options, convert_validation_error
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.environments import Environment
from tuneloop.formats.rollouts import Completion, Episode, FinishReason, Request, get_versions
from tuneloop.formats.tokens import decode_ids, encode_reply
from tuneloop.inference.engines import Engine, Sampling


def _check_args(args: JsonObject, info: ValidationInfo) -> JsonObject:
    """Refuse arguments that the environment does not have; one that only the stage's image has is checked there."""
    name = info.data.get("environment", "")  # empty: refused already
    if args and name is None:
        raise ValueError("goes with environment: set both, or neither")
    if name in plugins.list_shipped_variants("environments"):
        _find(name, args)
    return args


def _find(name: str, args: JsonMapping, prefix: str = "") -> Callable[..., Environment]:
    """Find the factory of the environment `name`, and check its arguments' names; `prefix` begins their errors."""
    factory = plugins.load_variant("environments", name)
    create: Callable[..., Environment] = (
        factory if callable(factory) else factory.create_environment
    )
    plugins.check_variant_args(name, create, args, first=1, prefix=prefix)
    return create


class EpisodeOptions(Options):
    """How episodes go."""

    environment: Annotated[str, plugins.validate_variant("environments")] | None = Field(
        None,
        description="replies to the policy: calculator, python, or pkg.mod:attr; none: one turn",
    )
    environment_args: Annotated[JsonObject, AfterValidator(_check_args)] = Field(
        {}, description="the environment's own arguments"
    )
    max_turns: int = Field(8, ge=1, description="maximum turns of the policy in an environment")
    keep_reasoning: bool = Field(
        False,
        description="accept a chat template that strips earlier turns' reasoning; tuneloop keeps it",
    )

    def open_environment(self, row: JsonMapping) -> Environment:
        """Open the environment of a new episode. Raises UserError: an argument or the row does not suit it."""
        create = _find(self.environment or "", self.environment_args, "environment_args.")
        try:
            environment: Environment = validate_call(create)(row, **self.environment_args)
        except ValidationError as error:
            raise convert_validation_error(error, "environment_args.") from None
        return environment


@dataclass
class _Live:
    """An episode that has not ended."""

    id: str
    prompt: list[int]
    environment: Environment
    chat: bool
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    turns: int = 0
    finish_reason: FinishReason = "abort"
    reward: float | None = None
    escape: str = ""

    def hear(self, completion: Completion) -> None:
        self.versions += get_versions(completion)
        self.extend(completion.ids, completion.logprobs, sampled=True)
        self.last, self.turns, self.finish_reason = (
            completion.ids,
            self.turns + 1,
            completion.finish_reason,
        )

    def extend(self, ids: Sequence[int], logprobs: Sequence[float], *, sampled: bool) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.mask += [sampled] * len(ids)

    def episode(self) -> Episode:
        facts = {
            "turns": self.turns,
            "reward": self.reward,
            **({"escape": self.escape} if self.escape else {}),
        }
        start = self.versions[0]
        end = self.versions[-1]
        return Episode(
            self.ids,
            self.logprobs,
            self.finish_reason,
            start,
            end,
            self.versions,
            None,
            self.mask,
            self.last,
            facts,
        )


def play_episodes(
    how: EpisodeOptions,
    engine: Engine,
    rows: Sequence[JsonMapping],
    requests: Sequence[Request],
    sampling: Sampling,
    tokenizer: Any,
    seed: Callable[[str, int], int],
    done: Callable[[int], None],
) -> list[list[Episode]]:
    """Play episodes, and return them in the order of `requests` (one per row of prompts in `rows`) and of their seeds.

    All unfinished episodes take their turns together, and the environment gets every turn. An episode ends when the
    environment says so, or with the finish reason ``length`` if a turn reaches `sampling.max_tokens`, after
    `how.max_turns` turns, or if reply and next turn do not fit the engine's context (the reply is dropped). `seed` gets
    an episode's name and the number of a later turn; `done` gets the number of requests whose episodes have ended."""
    everyone = [
        [
            _Live(f"{r.id}-s{s:02d}", r.prompt_ids, how.open_environment(row), row["chat"])
            for s in range(len(r.seeds))
        ]
        for row, r in zip(rows, requests)
    ]
    over = 0

    def beat(_: int) -> None:
        done(over)

    for group, said in zip(everyone, engine.generate(requests, sampling, beat)):
        for one, completion in zip(group, said, strict=True):
            one.hear(completion)
    alive = [one for group in everyone for one in group]
    while alive := list(_still(alive, how, engine, sampling, tokenizer)):
        names = {one.id for one in alive}
        over = sum(all(one.id not in names for one in group) for group in everyone)
        turns = [Request(one.id, one.prompt + one.ids, [seed(one.id, one.turns)]) for one in alive]
        for one, (completion,) in zip(alive, engine.generate(turns, sampling, beat)):
            one.hear(completion)
    done(len(requests))
    return [[one.episode() for one in group] for group in everyone]


def _still(
    alive: Sequence[_Live], how: EpisodeOptions, engine: Engine, sampling: Sampling, tokenizer: Any
) -> Iterator[_Live]:
    """Let the environments reply, and yield the episodes in which the policy has another turn."""
    for one in alive:
        turn = decode_ids(tokenizer, one.last)
        reply = one.environment.step(turn)
        one.reward = reply.reward
        one.escape = reply.escape
        if reply.done or reply.escape or one.finish_reason != "stop":
            continue
        ids = encode_reply(
            tokenizer,
            reply.text,
            one.chat,
            reply.role,
            sampling.stop_token_ids,
            how.keep_reasoning,
            turn=turn,
            last=one.last[-1],
        )
        room = engine.context - len(one.prompt) - len(one.ids) - len(ids)
        if one.turns == how.max_turns or room < sampling.max_tokens:
            one.finish_reason = "length"
            continue
        one.versions += one.versions[-1:] * len(ids)
        one.extend(ids, [0.0] * len(ids), sampled=False)
        yield one
