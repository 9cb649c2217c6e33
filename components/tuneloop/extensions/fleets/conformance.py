"""The protocol's tests, for any rollout endpoint: ``tuneloop endpoint check URL`` runs `CHECKS` in
order.

Only ``POST <url>/generate`` is used. An endpoint is compared with itself: what it samples with what
it scores, one temperature with another, a prompt with its own continuation. With ``--policy`` it is
also compared with the canary of that checkpoint.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tuneloop.core.artifacts import Artifact
from tuneloop.core.http import Response, Unanswered, open_response
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.server_token import build_token_headers
from tuneloop.core.wording import format_count
from tuneloop.formats.facts import VersionFacts
from tuneloop.inference.engines._connection import Lost, read_messages
from tuneloop.inference.engines.endpoint import ROUNDING, check_url
from tuneloop.inference.proof import read_canary

FAR = 1_000_000
"""Added to the served version, this gives one that no run has reached; its thousandfold is an id
that no vocabulary has.
"""
FIRST_ID = 3
"""Prompts have no lower ids: tokenizers put their special tokens there."""
SAMPLING: JsonMapping = {"temperature": 1.0, "max_tokens": 8, "stop_token_ids": []}
"""What a request asks for unless a check says otherwise: the fields of `Sampling` of
`inference/engines/__init__.py`. To `make_request` a keyword argument of another name is a field of
the request itself.
"""
FIELDS = {"ids": list, "logprobs": list, "finish_reason": str, "start_version": int}
"""Field that every completion has → its type."""


class Failed(AssertionError):
    """The endpoint does not keep to the protocol; the message says where."""


class Skipped(RuntimeError):
    """The check needs something that it does not have."""


@dataclass
class Probe:
    """An endpoint under test, with the options of `tuneloop endpoint check` (`extensions/fleets/endpoint_commands.py`).

    Attributes:
        url: of the endpoint, without ``/generate``.
        policy: the checkpoint that it should serve.
        vocabulary: prompts have ids below this.
        tolerance: mean absolute difference of log-probabilities, in nats, that still counts as
            equal.
        timeout_s: seconds without a byte after which a request has failed.
    """

    url: str
    policy: Artifact | None = None
    vocabulary: int = 256
    tolerance: float = 0.05
    timeout_s: float = 60.0

    def prompt(self, seed: int, length: int = 12) -> list[int]:
        """Draw random ids, a sequence that no tokenizer would make from text."""
        return random.Random(seed).choices(range(FIRST_ID, self.vocabulary), k=length)

    def read_messages(self, body: JsonObject) -> Iterator[JsonObject]:
        """Yield the messages of an answer; closing the iterator hangs up.

        Raises:
            Failed: the status is not 200, or a line is no JSON object or states an error.
        """
        with self._send(body) as response:
            if response.status != 200:
                text = response.read().decode(errors="replace")
                raise Failed(f"answers {response.status}: {text[:300]}")
            try:
                yield from read_messages(response)
            except Lost as lost:
                raise Failed(f"breaks off: {lost}") from lost

    def read_status(self, body: JsonObject) -> int:
        """Return the status of an answer, and hang up."""
        with self._send(body) as response:
            return response.status

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int] = (0,),
        **body: Any,
    ) -> list[list[Any]]:
        """Generate completions of each prompt, for each seed.

        Args:
            prompts: token ids.
            seeds: one completion of each prompt for each of these.
            body: further fields of the request, as for `make_request`.

        Raises:
            Failed: a request is answered never, or twice, or with another number of completions.
        """
        answers: dict[int, list[Any]] = {}
        for message in self.read_messages(make_request(prompts, seeds, **body)):
            if "completions" not in message:
                continue
            index = message.get("index")
            if index in answers:
                raise Failed(f"answers request {index} twice")
            answers[message["index"]] = message["completions"]
        indices = sorted(answers)
        if indices != list(range(len(prompts))):
            raise Failed(f"answers requests {indices} of {len(prompts)}")
        for completions in answers.values():
            if len(completions) != len(seeds):
                raise Failed(
                    f"gives {format_count(len(completions), 'completion')} for {format_count(len(seeds), 'seed')}"
                )
        return [answers[index] for index in indices]

    def generate_one(self, prompt: Sequence[int], seed: int = 0, **body: Any) -> Any:
        """Generate one completion; raises as `generate`."""
        return self.generate([prompt], [seed], **body)[0][0]

    def score(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each id but the first, at temperature 1."""
        completion = self.generate_one(ids, prompt_logprobs=True, temperature=0.0, max_tokens=1)
        logprobs: list[float] | None = completion.get("prompt_logprobs")
        if logprobs is None:
            raise Failed("gives no prompt_logprobs where they are asked for")
        count = len(logprobs) + 1
        if count != len(ids):
            raise Failed(
                f"scores {count} ids of a prompt of {len(ids)}: it is not taken as it is",
            )
        return logprobs

    def tolerates(self, distance: float) -> bool:
        """Return whether log-probabilities of this distance, in nats, count as equal."""
        # Written so that NaN, which JSON of Python has, is never equal.
        return distance <= self.tolerance

    @contextmanager
    def _send(self, body: JsonObject) -> Iterator[Response]:
        """Send a request; leaving the block hangs up."""
        try:
            with open_response(
                "POST",
                f"{self.url}/generate",
                body=body,
                headers=build_token_headers(),
                timeout_s=self.timeout_s,
            ) as response:
                yield response
        except Unanswered as error:
            raise Failed(str(error)) from error


def make_request(prompts: Sequence[Sequence[int]], seeds: Sequence[int], **body: Any) -> JsonObject:
    """Make the body of a request.

    Args:
        prompts: token ids.
        seeds: of the completions of each prompt.
        body: sampling parameters, which replace those of `SAMPLING`, and further fields.
    """
    sampling = dict(SAMPLING)
    for name in SAMPLING:
        if name in body:
            sampling[name] = body.pop(name)
    requests: list[JsonObject] = []
    for index, prompt in enumerate(prompts):
        request = {"id": f"check-{index}", "prompt_ids": list(prompt), "seeds": list(seeds)}
        requests.append(request)
    return {"requests": requests, "sampling": sampling} | body


def _average_distance(logprobs: Sequence[float], expected: Sequence[float]) -> float:
    """Return the mean absolute difference of two sequences of one length, in nats."""
    distances = [abs(a - b) for a, b in zip(logprobs, expected)]
    return sum(distances) / len(distances)


def check_form(probe: Probe) -> None:
    """completions have ids, logprobs, finish_reason, start_version, end_version"""
    for completion in probe.generate([probe.prompt(0), probe.prompt(1)], [1, 2, 3])[0]:
        for name, kind in FIELDS.items():
            value = completion.get(name)
            if not isinstance(value, kind):
                raise Failed(f"gives {name} {value!r}")
        ids = completion["ids"]
        logprobs = completion["logprobs"]
        reason = completion["finish_reason"]
        if len(ids) != len(logprobs):
            raise Failed(f"{len(ids)} ids, {len(logprobs)} logprobs")
        if not all(isinstance(token, int) for token in ids):
            raise Failed("gives ids that are not integers")
        for logprob in logprobs:
            if not math.isfinite(logprob) or logprob > ROUNDING:
                raise Failed("gives logprobs above 0 or not finite")
        if reason not in ("stop", "length"):
            raise Failed(f"ends with {reason!r}")


def check_lengths(probe: Probe) -> None:
    """max_tokens is kept to the token"""
    for limit in (1, 5):
        completion = probe.generate_one(probe.prompt(2), max_tokens=limit)
        count = len(completion["ids"])
        reason = completion["finish_reason"]
        if count != limit:
            raise Failed(f"gives {format_count(count, 'token')} where max_tokens is {limit}")
        if reason != "length":
            raise Failed(f"says {reason!r} at max_tokens")


def check_stops(probe: Probe) -> None:
    """a completion ends with the first stop token, and contains it"""
    # The same seed samples the same tokens, so one of them can be made the stop token.
    unstopped_ids = probe.generate_one(
        probe.prompt(3),
        5,
        max_tokens=8,
    )["ids"]
    stop = unstopped_ids[4]
    expected = unstopped_ids[: unstopped_ids.index(stop) + 1]
    completion = probe.generate_one(
        probe.prompt(3),
        5,
        max_tokens=8,
        stop_token_ids=[stop],
    )
    ids = completion["ids"]
    reason = completion["finish_reason"]
    if ids != expected:
        raise Failed(f"gives {ids}, not {expected}, with stop token {stop}")
    if reason != "stop":
        raise Failed(f"says {reason!r} at a stop token")


def check_seeds(probe: Probe) -> None:
    """the same seed gives the same tokens, another seed gives other tokens"""
    (completions,) = probe.generate([probe.prompt(4)], range(8))
    (repeated_completions,) = probe.generate([probe.prompt(4)], range(8))
    for completion, repeated in zip(completions, repeated_completions):
        if completion["ids"] != repeated["ids"]:
            raise Failed("gives other tokens for the same seeds")
    if all(item["ids"] == completions[0]["ids"] for item in completions):
        raise Failed("gives the same tokens for eight seeds at temperature 1")


def check_concurrent(probe: Probe) -> None:
    """requests at the same time get their own answers"""

    def complete(prompt: Sequence[int]) -> Any:
        return probe.generate_one(prompt, temperature=0.0)

    # Of different lengths, so that an engine has to pad or to pack the batch.
    prompts = [probe.prompt(10 + i, 6 + i) for i in range(6)]
    alone = [complete(prompt) for prompt in prompts]
    together = [group[0] for group in probe.generate(prompts, temperature=0.0)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        parallel = list(pool.map(complete, prompts))
    completions_by_manner = {
        "in one request": together,
        "at the same time": parallel,
    }
    for manner, completions in completions_by_manner.items():
        for first, second in zip(alone, completions):
            # Later tokens may differ: a batch of another size rounds differently, and a near tie
            # of two tokens then ends the other way.
            distance = abs(first["logprobs"][0] - second["logprobs"][0])
            if not probe.tolerates(distance):
                raise Failed(f"gives another answer when there are several {manner}")


def check_prompt_ids(probe: Probe) -> None:
    """prompt ids are taken as they are: a prompt's continuation is that of its own tokens"""
    for seed in range(20, 24):
        prompt = probe.prompt(seed)
        completion = probe.generate_one(prompt, temperature=0.0, max_tokens=6)
        # A server that decodes the prompt and encodes it again gets other ids here.
        longer_prompt = prompt + completion["ids"][:3]
        remainder = probe.generate_one(longer_prompt, temperature=0.0, max_tokens=3)
        pairs = zip(completion["logprobs"][3:], remainder["logprobs"])
        difference = max(abs(a - b) for a, b in pairs)
        if not probe.tolerates(difference):
            raise Failed(f"continues its own tokens differently (by {difference:.3f} nats)")
        probe.score(prompt)


def check_scored(probe: Probe) -> None:
    """log-probabilities of sampled tokens are those of the whole, uncut distribution at temperature 1"""
    distances: list[float] = []
    for seed in range(30, 33):
        prompt = probe.prompt(seed)
        completion = probe.generate_one(prompt, seed, max_tokens=8)
        scores = probe.score(prompt + completion["ids"])[len(prompt) - 1 :]
        distances.append(_average_distance(completion["logprobs"], scores))
    worst = max(distances)
    if not probe.tolerates(worst):
        raise Failed(f"samples with other log-probabilities than it scores (by {worst:.3f} nats)")


def check_temperature(probe: Probe) -> None:
    """log-probabilities are of the sampled distribution: differences between tokens double at half the temperature"""

    def sample(temperature: float) -> dict[int, float]:
        """Return token → its log-probability, of first tokens that are sampled."""
        (completions,) = probe.generate(
            [probe.prompt(5)],
            range(192),
            max_tokens=1,
            temperature=temperature,
        )
        return {item["ids"][0]: item["logprobs"][0] for item in completions}

    warm = sample(1.0)
    cool = sample(0.5)
    common = sorted(warm.keys() & cool.keys(), key=warm.__getitem__)
    # The quotient below needs a difference that is well above the noise.
    if len(common) < 2 or warm[common[-1]] - warm[common[0]] < 4 * probe.tolerance:
        raise Skipped(
            "the same tokens were not seen at both temperatures; the model is too flat or too sure"
        )
    low = common[0]
    high = common[-1]
    ratio = (cool[high] - cool[low]) / (warm[high] - warm[low])
    if not abs(ratio - 2) < 0.2:
        raise Failed(
            f"the difference grows {ratio:.2f} times; the temperature is applied never, or twice"
        )
    # Logits that are divided and not normalised again would keep the ratio.
    mass = sum(math.exp(p) for p in cool.values())
    if not probe.tolerates(mass - 1):
        raise Failed(f"the tokens seen at temperature 0.5 have probability {mass:.2f} together")


def check_versions(probe: Probe) -> None:
    """every completion states one version for all its tokens, or one for each token"""
    for completion in probe.generate([probe.prompt(6)], [0, 1])[0]:
        start = completion.get("start_version")
        end = completion.get("end_version")
        are_integers = isinstance(start, int) and isinstance(end, int)
        if not are_integers or not 0 <= start <= end:
            raise Failed(f"says versions {start}, {end}")
        versions = completion.get("versions") or []
        if start != end and len(versions) != len(completion["ids"]):
            raise Failed("changed version and does not say at which token")


def check_exact_version(probe: Probe) -> None:
    """a demanded version answers the request, or the status is 409 while it is not served"""
    served = probe.generate_one(probe.prompt(7))["end_version"]
    completion = probe.generate_one(probe.prompt(7), version=served)
    start = completion["start_version"]
    end = completion["end_version"]
    if not start == end == served:
        raise Failed(f"answers with {start}")
    older = served - 1 if served else FAR
    for version in (served + FAR, older):
        status = probe.read_status(
            make_request(
                [probe.prompt(7)],
                [0],
                version=version,
            )
        )
        if status != 409:
            raise Failed(
                f"serves version {served}, and answers {status} where version {version} is demanded"
            )


def check_min_version(probe: Probe) -> None:
    """a demanded minimum version is respected: the status is 409 until it is served"""
    served = probe.generate_one(probe.prompt(7))["end_version"]
    completion = probe.generate_one(probe.prompt(7), min_version=served)
    if completion["start_version"] < served:
        raise Failed("answers with an older version")
    future = served + FAR
    status = probe.read_status(
        make_request(
            [probe.prompt(7)],
            [0],
            min_version=future,
        )
    )
    if status != 409:
        raise Failed(
            f"serves version {served}, and answers {status} where {future} or later is demanded"
        )


def check_refuses(probe: Probe) -> None:
    """ids outside the vocabulary are refused with 400, and do not harm other requests"""
    for ids in ([5, FAR * 1000], [5, -1], []):
        status = probe.read_status(make_request([ids], [0]))
        if status != 400:
            raise Failed(f"answers {status} to prompt ids {ids}")
    # An embedding that is read out of bounds ends a process on a GPU for all its callers.
    probe.generate_one(probe.prompt(8))


def check_streams(probe: Probe) -> None:
    """streamed tokens are those of the completion, each with its version"""
    tokens_by_sample: dict[int, list[tuple[int, float]]] = {}
    completions: list[Any] = []
    request = make_request(
        [probe.prompt(9)],
        [3, 4],
        max_tokens=12,
        stream=True,
    )
    for message in probe.read_messages(request):
        if "sample" in message:
            if not isinstance(message.get("version"), int):
                raise Failed("streams tokens without their version")
            tokens = tokens_by_sample.setdefault(message["sample"], [])
            tokens += zip(message["ids"], message["logprobs"])
        elif "completions" in message:
            completions = message["completions"]
    if not tokens_by_sample:
        raise Failed("streams nothing where stream is asked for")
    for sample, completion in enumerate(completions):
        tokens = list(zip(completion["ids"], completion["logprobs"]))
        if tokens_by_sample.get(sample) != tokens:
            raise Failed("streams other tokens than the completion has")


def check_aborts(probe: Probe) -> None:
    """the request of a client that hangs up is dropped, and does not delay others"""

    def measure() -> float:
        start = time.perf_counter()
        probe.generate_one(probe.prompt(40), max_tokens=4)
        return time.perf_counter() - start

    usual = measure()
    # 100,000 tokens: an endpoint that goes on with them answers the next request late.
    prompts = [probe.prompt(41 + i, 6) for i in range(8)]
    probe.read_status(make_request(prompts, range(64), max_tokens=200))
    delayed = measure()
    if delayed >= 10 * usual + 2:
        raise Failed(f"answers in {delayed:.1f} s after a caller hung up, {usual:.2f} s before")


def check_weights(probe: Probe) -> None:
    """it serves the checkpoint: its version, and the trainer's log-probabilities of a test text"""
    if probe.policy is None:
        raise Skipped("give --policy, the checkpoint that should be served")
    expected = VersionFacts.read(probe.policy).version
    canary = read_canary(probe.policy)
    served = probe.generate_one(probe.prompt(7))["end_version"]
    if served != expected:
        raise Failed(f"says version {served}, the checkpoint is version {expected}")
    mean = _average_distance(canary.logprobs, probe.score(canary.ids))
    if not mean <= canary.tolerance:
        raise Failed(
            f"its log-probabilities of the checkpoint's test text (its canary) are {mean:.3f} nats "
            f"from the trainer's (tolerance {canary.tolerance:.3f}, noise of right weights {canary.noise.mean:.3f}): "
            "other weights, or other ids"
        )


# Its name without ``check_`` and its docstring are a row of the table that
# `tuneloop endpoint check` prints. ``docs/weights.md`` says how many there are, and
# `tests/extensions/fleets/test_conformance.py` plants faults in `tests/unit/inference/peer.py`, for
# each the check that is to catch it.
CHECKS: tuple[Callable[[Probe], None], ...] = (
    check_form,
    check_lengths,
    check_stops,
    check_seeds,
    check_concurrent,
    check_prompt_ids,
    check_scored,
    check_temperature,
    check_versions,
    check_exact_version,
    check_min_version,
    check_refuses,
    check_streams,
    check_aborts,
    check_weights,
)


def run_checks(probe: Probe) -> Iterator[tuple[str, str, str]]:
    """Run all checks, one after the other.

    Yields:
        The name of a check, ``ok``, ``failed`` or ``skipped``, and what it checks, with the reason
        if it is not ``ok``.
    """
    check_url(probe.url)
    for check in CHECKS:
        # The rule that a check's docstring states is what people read in the table.
        rule = (check.__doc__ or "").strip()
        result = "ok"
        explanation = rule
        try:
            check(probe)
        except Failed as failed:
            result = "failed"
            explanation = f"{rule}: {failed}"
        except Skipped as skipped:
            result = "skipped"
            explanation = f"{rule}: {skipped}"
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            # A check reads the fields of an answer as the protocol has them.
            result = "failed"
            problem = f"answers in another form ({type(error).__name__}: {error})"
            explanation = f"{rule}: {problem}"
        yield check.__name__.removeprefix("check_"), result, explanation
