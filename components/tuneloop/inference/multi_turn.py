"""Completions of several turns: the policy speaks, an environment replies, and so on.

They are one growing list of ids. The prompt of each turn is, id by id, the input and output of the
engine in the turns before and the encoded reply: no sampled token is ever tokenized again. So one
pass over the whole list gives every turn's log-probabilities, and all that `policy_update` needs to
know is which tokens were sampled.

`inference/generate.py` calls `play_episodes` in a stage. `local/probe.py` opens a single
environment by `EpisodeOptions.open_environment`. The trainer reads `Episode.mask` as the column
``loss_mask`` (`formats/rollouts.py: SCHEMA`). The tests are
`tests/unit/inference/test_episodes.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, validate_call

from tuneloop.core import plugins
from tuneloop.core.component import Options, convert_validation_error
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.environments import Environment
from tuneloop.formats.rollouts import (
    Completion,
    Episode,
    FinishReason,
    Request,
    get_versions,
    request_id,
)
from tuneloop.formats.tokens import decode_ids, encode_reply
from tuneloop.inference.engines import Engine, Sampling


def _check_args(args: JsonObject, info: ValidationInfo) -> JsonObject:
    """Refuse arguments that the environment lacks; those of a third party's are checked later."""
    # The name is absent where it was refused already.
    name = info.data.get("environment", "")
    if args and name is None:
        raise ValueError("goes with environment: set both, or neither")
    if name in plugins.list_shipped_variants("environments"):
        _find_factory(name, args)
    return args


def _find_factory(name: str, args: JsonMapping, prefix: str = "") -> Callable[..., Environment]:
    """Find the factory of an environment, and check the names of its arguments.

    Raises:
        UserError: there is no such environment, or it lacks an argument (`prefix` + its name).
    """
    variant = plugins.load_variant("environments", name)
    create: Callable[..., Environment]
    create = variant if callable(variant) else variant.create_environment
    plugins.check_variant_args(name, create, args, first=1, prefix=prefix)
    return create


class EpisodeOptions(Options):
    """How episodes go: options of `rollout` and `evaluate`.

    A field that is added is a flag only once `SHARED_FLAGS` of `inference/generate.py` lists it,
    and `evaluate` follows the setting of `rollout` only where `config/loop.py: INHERITED` does.
    """

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
        description="accept a chat template that strips earlier turns' reasoning; "
        "tuneloop keeps it",
    )

    def open_environment(self, row: JsonMapping) -> Environment:
        """Open the environment of a new episode.

        Raises:
            UserError: an argument or the row does not suit it.
        """
        prefix = "environment_args."
        create = _find_factory(self.environment or "", self.environment_args, prefix)
        try:
            environment: Environment = validate_call(create)(row, **self.environment_args)
        except ValidationError as error:
            raise convert_validation_error(error, prefix) from None
        return environment


@dataclass
class _LiveEpisode:
    """An episode that has not ended.

    Attributes:
        id: the name of its group and the number of its sample, as `formats/rollouts.py: request_id`
            writes it. `inference/engines/_replicas.py: _find_replica` reads the group from it.
        prompt: ids of the first prompt.
        environment: of this episode alone.
        is_chat: whether replies are messages of a chat.
        ids, logprobs, versions, mask: one entry for each token after the prompt.
        turn: the ids that the policy sampled last.
        turns: of the policy so far.
        finish_reason: of the last turn.
        reward: the environment's, None if it gives none.
        escape: how the policy tried to get out of the sandbox, or empty.
    """

    id: str
    prompt: list[int]
    environment: Environment
    is_chat: bool
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    turns: int = 0
    finish_reason: FinishReason = "abort"
    reward: float | None = None
    escape: str = ""

    def add_turn(self, completion: Completion) -> None:
        """Append what the policy said."""
        self.versions += get_versions(completion)
        self._extend(completion.ids, completion.logprobs, is_sampled=True)
        self.turn = completion.ids
        self.turns += 1
        self.finish_reason = completion.finish_reason

    def add_reply(self, ids: Sequence[int]) -> None:
        """Append what the environment said; its ids have the version of the turn before."""
        # They are not trained on, but each token has a version, so that lists stay aligned.
        self.versions += self.versions[-1:] * len(ids)
        self._extend(ids, [0.0] * len(ids), is_sampled=False)

    def _extend(self, ids: Sequence[int], logprobs: Sequence[float], *, is_sampled: bool) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.mask += [is_sampled] * len(ids)

    def finish(self) -> Episode:
        """Return the episode as an engine's completion.

        Rewards read its facts as ``metadata["environment"]``
        (`formats/rollouts.py: build_reward_inputs`).
        """
        facts: JsonObject = {"turns": self.turns, "reward": self.reward}
        if self.escape:
            facts["escape"] = self.escape
        return Episode(
            ids=self.ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            start_version=self.versions[0],
            end_version=self.versions[-1],
            versions=self.versions,
            mask=self.mask,
            last=self.turn,
            facts=facts,
        )


def play_episodes(
    options: EpisodeOptions,
    engine: Engine,
    rows: Sequence[JsonMapping],
    requests: Sequence[Request],
    sampling: Sampling,
    tokenizer: Any,
    seed_of_turn: Callable[[str, int], int],
    done: Callable[[int], None],
) -> list[list[Episode]]:
    """Play episodes, and return them in the order of `requests` and of their seeds.

    All unfinished episodes take their turns together, and the environment gets every turn. An
    episode ends when the environment says so. It ends with the finish reason ``length`` if a turn
    reaches `sampling.max_tokens`, after `options.max_turns` turns, or if reply and next turn do not
    fit the engine's context (the reply is dropped).

    Args:
        options: of the episodes.
        engine: serves the policy.
        rows: of prompts, one for each of `requests`.
        requests: the first turns.
        sampling: of one turn.
        tokenizer: the policy's.
        seed_of_turn: returns the seed of a later turn, from the episode's name and the number of
            turns before it.
        done: called with the number of requests whose episodes have ended.
    """
    groups: list[list[_LiveEpisode]] = []
    for row, request in zip(rows, requests):
        group: list[_LiveEpisode] = []
        for sample in range(len(request.seeds)):
            # An environment has state, so each episode has its own.
            episode = _LiveEpisode(
                id=request_id(request.id, sample),
                prompt=request.prompt_ids,
                environment=options.open_environment(row),
                is_chat=row["chat"],
            )
            group.append(episode)
        groups.append(group)
    ended = 0

    def report_progress(_: int) -> None:
        done(ended)

    answers = engine.generate(requests, sampling, report_progress)
    for group, completions in zip(groups, answers):
        for episode, completion in zip(group, completions, strict=True):
            episode.add_turn(completion)
    live = [episode for group in groups for episode in group]
    while live := list(_step_environments(live, options, engine, sampling, tokenizer)):
        names = {episode.id for episode in live}
        ended = sum(all(episode.id not in names for episode in group) for group in groups)
        turns: list[Request] = []
        for episode in live:
            # With the seed of the turn before, the random stream would repeat.
            seed = seed_of_turn(episode.id, episode.turns)
            turns.append(Request(episode.id, episode.prompt + episode.ids, [seed]))
        answers = engine.generate(turns, sampling, report_progress)
        for episode, (completion,) in zip(live, answers):
            episode.add_turn(completion)
    done(len(requests))
    return [[episode.finish() for episode in group] for group in groups]


def _step_environments(
    live: Sequence[_LiveEpisode],
    options: EpisodeOptions,
    engine: Engine,
    sampling: Sampling,
    tokenizer: Any,
) -> Iterator[_LiveEpisode]:
    """Let the environments reply, and yield the episodes in which the policy has another turn."""
    for episode in live:
        text = decode_ids(tokenizer, episode.turn)
        reply = episode.environment.step(text)
        episode.reward = reply.reward
        episode.escape = reply.escape
        if reply.done or reply.escape or episode.finish_reason != "stop":
            continue
        ids = encode_reply(
            tokenizer,
            reply.text,
            episode.is_chat,
            reply.role,
            sampling.stop_token_ids,
            options.keep_reasoning,
            turn=text,
            last=episode.turn[-1],
        )
        room = engine.context - len(episode.prompt) - len(episode.ids) - len(ids)
        # The next turn has to have its full length: a shorter one would be another distribution.
        if episode.turns == options.max_turns or room < sampling.max_tokens:
            episode.finish_reason = "length"
            continue
        episode.add_reply(ids)
        yield episode
