"""The protocol's tests, for any rollout endpoint: ``tuneloop endpoint check URL`` runs `CHECKS` in order.

Only ``POST <url>/generate`` is used. An endpoint is compared with itself (what it samples with what it scores, one
temperature with another, a prompt with its own continuation), and with a checkpoint's canary, given ``--policy``.
"""

import json
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
from tuneloop.core.json_types import JsonObject
from tuneloop.core.server_token import build_token_headers
from tuneloop.formats.facts import VersionFacts
from tuneloop.inference.engines.endpoint import check_url
from tuneloop.inference.proof import read_canary

FAR = 1_000_000
"""Added to the served version, this gives one that no run has reached."""


class Failed(AssertionError):
    """The endpoint does not keep to the protocol; the message says where."""


class Skipped(RuntimeError):
    """The check needs something that was not given."""


@dataclass
class Probe:
    """An endpoint under test. `tolerance`: mean absolute difference of log-probabilities that still counts as equal."""

    url: str
    policy: Artifact | None = None
    vocabulary: int = 256
    tolerance: float = 0.05
    timeout_s: float = 60.0

    def prompt(self, seed: int, length: int = 12) -> list[int]:
        """Draw random ids, a sequence that no tokenizer would make from text."""
        return random.Random(seed).choices(range(3, self.vocabulary), k=length)

    def lines(self, body: JsonObject) -> Iterator[JsonObject]:
        """Yield an answer's lines; closing it hangs up. Raises Failed: status not 200, or a line is no JSON object."""
        with self._send(body) as response:
            if response.status != 200:
                raise Failed(
                    f"answers {response.status}: {response.read().decode(errors='replace')[:300]}"
                )
            for line in filter(bytes.strip, response.lines()):
                try:
                    message = json.loads(line)
                except json.JSONDecodeError as error:
                    raise Failed(f"sends a line that is not JSON: {error}") from error
                _expect(
                    isinstance(message, dict), f"sends a line that is not an object: {line[:80]!r}"
                )
                _expect("error" not in message, f"breaks off: {message.get('error')}")
                yield message

    def status(self, body: JsonObject) -> int:
        with self._send(body) as response:
            return response.status

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int] = (0,), **body: Any
    ) -> list[list[Any]]:
        """Generate completions of each prompt, for each seed; every index must be answered once."""
        answers: dict[int, list[Any]] = {}
        for message in self.lines(make_request(prompts, seeds, **body)):
            if "completions" in message:
                _expect(
                    message.get("index") not in answers,
                    f"answers request {message.get('index')} twice",
                )
                answers[message["index"]] = message["completions"]
        _expect(
            sorted(answers) == list(range(len(prompts))),
            f"answers requests {sorted(answers)} of {len(prompts)}",
        )
        for completions in answers.values():
            _expect(
                len(completions) == len(seeds),
                f"gives {len(completions)} completions for {len(seeds)} seeds",
            )
        return [answers[i] for i in range(len(prompts))]

    def one(self, prompt: Sequence[int], seed: int = 0, **body: Any) -> Any:
        return self.generate([prompt], [seed], **body)[0][0]

    def scores(self, ids: Sequence[int], **body: Any) -> list[float]:
        """Score each id but the first at temperature 1."""
        completion = self.one(ids, prompt_logprobs=True, temperature=0.0, max_tokens=1, **body)
        logprobs: list[float] | None = completion.get("prompt_logprobs")
        _expect(logprobs is not None, "gives no prompt_logprobs where they are asked for")
        length = len(logprobs or [])
        _expect(
            length == len(ids) - 1,
            f"scores {length + 1} ids of a prompt of {len(ids)}: it is not taken as it is",
        )
        return logprobs or []

    @contextmanager
    def _send(self, body: JsonObject) -> Iterator[Response]:
        """Send a request; leaving the block hangs up."""
        try:
            options: Any = {
                "body": body,
                "headers": build_token_headers(),
                "timeout_s": self.timeout_s,
            }
            with open_response("POST", f"{self.url}/generate", **options) as response:
                yield response
        except Unanswered as error:
            raise Failed(str(error)) from error


def make_request(prompts: Sequence[Sequence[int]], seeds: Sequence[int], **body: Any) -> JsonObject:
    """Make the body of a request; sampling parameters and others by name."""
    sampling = {"temperature": 1.0, "max_tokens": 8, "stop_token_ids": []}
    sampling |= {name: body.pop(name) for name in list(body) if name in sampling}
    requests = [
        {"id": f"check-{i}", "prompt_ids": list(p), "seeds": list(seeds)}
        for i, p in enumerate(prompts)
    ]
    return {"requests": requests, "sampling": sampling, **body}


def _expect(holds: bool, why: str) -> None:
    if not holds:
        raise Failed(why)


def check_form(probe: Probe) -> None:
    """completions have ids, logprobs, finish_reason, start_version, end_version"""
    for completion in probe.generate([probe.prompt(0), probe.prompt(1)], [1, 2, 3])[0]:
        for name, kind in (
            ("ids", list),
            ("logprobs", list),
            ("finish_reason", str),
            ("start_version", int),
        ):
            _expect(
                isinstance(completion.get(name), kind), f"gives {name} {completion.get(name)!r}"
            )
        ids = completion["ids"]
        logprobs = completion["logprobs"]
        _expect(len(ids) == len(logprobs), f"{len(ids)} ids, {len(logprobs)} logprobs")
        _expect(all(isinstance(i, int) for i in ids), "gives ids that are not integers")
        _expect(
            all(math.isfinite(p) and p <= 1e-3 for p in logprobs),
            "gives logprobs above 0 or not finite",
        )
        _expect(
            completion["finish_reason"] in ("stop", "length"),
            f"ends with {completion['finish_reason']!r}",
        )


def check_lengths(probe: Probe) -> None:
    """max_tokens is kept to the token"""
    for limit in (1, 5):
        completion = probe.one(probe.prompt(2), max_tokens=limit)
        _expect(
            len(completion["ids"]) == limit,
            f"gives {len(completion['ids'])} tokens where max_tokens is {limit}",
        )
        _expect(
            completion["finish_reason"] == "length",
            f"says {completion['finish_reason']!r} at max_tokens",
        )


def check_stops(probe: Probe) -> None:
    """a completion ends with the first stop token, and contains it"""
    free = probe.one(probe.prompt(3), 5, max_tokens=8)["ids"]
    wanted = free[: free.index(free[4]) + 1]
    completion = probe.one(probe.prompt(3), 5, max_tokens=8, stop_token_ids=[free[4]])
    _expect(
        completion["ids"] == wanted,
        f"gives {completion['ids']}, not {wanted}, with stop token {free[4]}",
    )
    _expect(
        completion["finish_reason"] == "stop",
        f"says {completion['finish_reason']!r} at a stop token",
    )


def check_seeds(probe: Probe) -> None:
    """the same seed gives the same tokens, another seed gives other tokens"""
    (first,) = probe.generate([probe.prompt(4)], range(8))
    (again,) = probe.generate([probe.prompt(4)], range(8))
    _expect(
        [s["ids"] for s in first] == [s["ids"] for s in again],
        "gives other tokens for the same seeds",
    )
    _expect(
        len({tuple(s["ids"]) for s in first}) > 1,
        "gives the same tokens for eight seeds at temperature 1",
    )


def check_concurrent(probe: Probe) -> None:
    """requests at the same time get their own answers"""
    prompts = [probe.prompt(10 + i, 6 + i) for i in range(6)]
    alone = [probe.one(p, temperature=0.0) for p in prompts]
    (together) = [group[0] for group in probe.generate(prompts, temperature=0.0)]
    with ThreadPoolExecutor(6) as pool:
        parallel = list(pool.map(lambda p: probe.one(p, temperature=0.0), prompts))
    for how, answers in (("in one request", together), ("at the same time", parallel)):
        for own, other in zip(alone, answers):
            near = abs(own["logprobs"][0] - other["logprobs"][0]) <= probe.tolerance
            _expect(near, f"gives another answer when there are several {how}")


def check_prompt_ids(probe: Probe) -> None:
    """prompt ids are taken as they are: a prompt's continuation is that of its own tokens"""
    for seed in range(20, 24):
        prompt = probe.prompt(seed)
        whole = probe.one(prompt, temperature=0.0, max_tokens=6)
        rest = probe.one(prompt + whole["ids"][:3], temperature=0.0, max_tokens=3)
        difference = max(abs(a - b) for a, b in zip(whole["logprobs"][3:], rest["logprobs"]))
        _expect(
            difference <= probe.tolerance,
            f"continues its own tokens differently (by {difference:.3f} nats)",
        )
        probe.scores(prompt)


def check_scored(probe: Probe) -> None:
    """log-probabilities of sampled tokens are those of the whole, uncut distribution at temperature 1"""
    worst = 0.0
    for seed in range(30, 33):
        prompt = probe.prompt(seed)
        completion = probe.one(prompt, seed, max_tokens=8)
        theirs = probe.scores(prompt + completion["ids"])[len(prompt) - 1 :]
        worst = max(
            worst, sum(abs(a - b) for a, b in zip(completion["logprobs"], theirs)) / len(theirs)
        )
    _expect(
        worst <= probe.tolerance,
        f"samples with other log-probabilities than it scores (by {worst:.3f} nats)",
    )


def check_temperature(probe: Probe) -> None:
    """log-probabilities are of the sampled distribution: differences between tokens double at half the temperature"""
    prompt = probe.prompt(5)
    warm, cool = (
        {
            s["ids"][0]: s["logprobs"][0]
            for s in probe.generate([prompt], range(192), max_tokens=1, temperature=t)[0]
        }
        for t in (1.0, 0.5)
    )
    common = sorted(warm.keys() & cool.keys(), key=lambda token: warm[token])
    if len(common) < 2 or warm[common[-1]] - warm[common[0]] < 4 * probe.tolerance:
        raise Skipped(
            "the same tokens were not seen at both temperatures; the model is too flat or too sure"
        )
    low = common[0]
    high = common[-1]
    ratio = (cool[high] - cool[low]) / (warm[high] - warm[low])
    _expect(
        abs(ratio - 2) < 0.2,
        f"the difference grows {ratio:.2f} times; the temperature is applied never, or twice",
    )
    mass = sum(math.exp(p) for p in cool.values())
    _expect(
        mass <= 1 + probe.tolerance,
        f"the tokens seen at temperature 0.5 have probability {mass:.2f} together",
    )


def check_versions(probe: Probe) -> None:
    """every completion states one version for all its tokens, or one for each token"""
    for completion in probe.generate([probe.prompt(6)], [0, 1])[0]:
        start = completion.get("start_version")
        end = completion.get("end_version")
        _expect(
            isinstance(start, int) and isinstance(end, int) and 0 <= start <= end,
            f"says versions {start}, {end}",
        )
        each = completion.get("versions") or []
        _expect(
            start == end or len(each) == len(completion["ids"]),
            "changed version and does not say at which token",
        )


def check_exact_version(probe: Probe) -> None:
    """a demanded version answers the request, or the status is 409 while it is not served"""
    served = probe.one(probe.prompt(7))["end_version"]
    completion = probe.one(probe.prompt(7), version=served)
    start = completion["start_version"]
    end = completion["end_version"]
    _expect(start == end == served, f"answers with {start}")
    for wrong in (served + FAR, max(served - 1, 0) if served else FAR):
        status = probe.status(make_request([probe.prompt(7)], [0], version=wrong))
        _expect(
            status == 409,
            f"serves version {served}, and answers {status} where version {wrong} is demanded",
        )


def check_min_version(probe: Probe) -> None:
    """a demanded minimum version is respected: the status is 409 until it is served"""
    served = probe.one(probe.prompt(7))["end_version"]
    _expect(
        probe.one(probe.prompt(7), min_version=served)["start_version"] >= served,
        "answers with an older version",
    )
    status = probe.status(make_request([probe.prompt(7)], [0], min_version=served + FAR))
    _expect(
        status == 409,
        f"serves version {served}, and answers {status} where {served + FAR} or later is demanded",
    )


def check_refuses(probe: Probe) -> None:
    """ids outside the vocabulary are refused with 400, and do not harm other requests"""
    for ids in ([5, FAR * 1000], [5, -1], []):
        status = probe.status(make_request([ids], [0]))
        _expect(status == 400, f"answers {status} to prompt ids {ids}")
    probe.one(probe.prompt(8))


def check_streams(probe: Probe) -> None:
    """streamed tokens are those of the completion, each with its version"""
    parts: dict[int, list[tuple[int, float]]] = {}
    whole: list[Any] = []
    for message in probe.lines(make_request([probe.prompt(9)], [3, 4], max_tokens=12, stream=True)):
        if "sample" in message:
            _expect(isinstance(message.get("version"), int), "streams tokens without their version")
            parts.setdefault(message["sample"], []).extend(zip(message["ids"], message["logprobs"]))
        elif "completions" in message:
            whole = message["completions"]
    _expect(bool(parts), "streams nothing where stream is asked for")
    for j, message in enumerate(whole):
        tokens = [*zip(message["ids"], message["logprobs"])]
        _expect(parts.get(j) == tokens, "streams other tokens than the completion has")


def check_aborts(probe: Probe) -> None:
    """the request of a client that hangs up is dropped, and does not delay others"""
    clock = time.perf_counter()
    probe.one(probe.prompt(40), max_tokens=4)
    usual = time.perf_counter() - clock
    flood = make_request([probe.prompt(41 + i, 6) for i in range(8)], range(64), max_tokens=200)
    probe.status(flood)
    clock = time.perf_counter()
    probe.one(probe.prompt(40), max_tokens=4)
    waited = time.perf_counter() - clock
    _expect(
        waited < 10 * usual + 2,
        f"answers in {waited:.1f} s after a caller hung up, {usual:.2f} s before",
    )


def check_weights(probe: Probe) -> None:
    """it serves the checkpoint: its version, and the trainer's log-probabilities of a test text"""
    if probe.policy is None:
        raise Skipped("give --policy, the checkpoint that should be served")
    want = VersionFacts.read(probe.policy).version
    canary = read_canary(probe.policy)
    served = probe.one(probe.prompt(7))["end_version"]
    _expect(served == want, f"says version {served}, the checkpoint is version {want}")
    theirs = probe.scores(canary.ids)
    mean = sum(abs(a - b) for a, b in zip(canary.logprobs, theirs)) / len(theirs)
    _expect(
        mean <= canary.tolerance,
        f"its log-probabilities of the checkpoint's test text (its canary) are {mean:.3f} nats from the trainer's "
        f"(tolerance {canary.tolerance:.3f}, noise of right weights {canary.noise.mean:.3f}): "
        "other weights, or other ids",
    )


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
    """Run all checks, one after the other; yield the name of each, ``ok``, ``failed`` or ``skipped``, and why."""
    check_url(probe.url)
    for each in CHECKS:
        what = (each.__doc__ or "").strip()
        result = "ok"
        why = what
        try:
            each(probe)
        except Failed as failed:
            result = "failed"
            why = f"{what}: {failed}"
        except Skipped as skipped:
            result = "skipped"
            why = f"{what}: {skipped}"
        except (
            KeyError,
            TypeError,
            IndexError,
            AttributeError,
        ) as error:  # an answer of an unexpected form
            result = "failed"
            why = f"{what}: answers in another form ({type(error).__name__}: {error})"
        yield each.__name__.removeprefix("check_"), result, why
