"""An endpoint that the user provides: only ``POST <url>/generate`` is used, and its answers are checked.

The fleet behind it pulls published weights (docs/weights.md) or is brought to each version
(`tuneloop.inference.fleet`), and may grow, shrink and lose replicas. Each prompt is a request of its own, for a load
balancer to place; several URLs take turns. A request demands a version at most `max_staleness` older than the policy's,
waits while no replica has it (409), goes to the next URL when a replica is lost, and is aborted by hanging up.
"""

import itertools
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError

from tuneloop.core import plugins
from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import convert_validation_error
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.seeds import derive_seed
from tuneloop.core.server_token import build_token_headers
from tuneloop.formats.rollouts import Completion, Ids, Request
from tuneloop.inference.capabilities import Capabilities
from tuneloop.inference.engines import Done, Engine, Sampling
from tuneloop.inference.engines._connection import Lost, open_answer, read_messages
from tuneloop.inference.fleet import Fleet, open_fleet
from tuneloop.inference.fleet.refit import Refitted, make_target, refit_fleet

CAPABILITIES = Capabilities(in_process=False, pulls=True)
Result = TypeVar("Result")
Form = TypeVar("Form")


class Options(BaseModel, frozen=True, extra="forbid"):
    """``engine_args`` of the engine `endpoint`."""

    max_staleness: int = Field(
        0, ge=0, description="versions that a token may be older than the policy"
    )
    partial_rollout: bool = Field(
        False, description="stream tokens; if a replica is lost, another goes on from them"
    )
    concurrency: int = Field(64, ge=1, description="requests at the same time")
    max_retries: int = Field(60, ge=0, description="retries of one request")
    retry_sleep: float = Field(1.0, ge=0, description="maximum seconds between two retries")
    max_model_len: int = Field(
        1 << 30, ge=1, description="maximum length of prompt and completion, in tokens"
    )
    fleet: str | None = Field(
        None,
        description="URL of the workers to bring to each version (`tuneloop fleet --help`); none: they pull",
    )
    hook: str | None = Field(
        None,
        description="pkg.mod:function, called before each request with {url, payload, headers, max_retries, "
        "retry_sleep}; returns the same, changed or not",
    )


def open_engine(endpoint: str | None, args: JsonMapping, timeout_s: float) -> Engine:
    """Open the engine behind `endpoint`, an absolute URL to which ``/generate`` is appended, or several separated by
    commas; None: the fleet's URL, or those of its workers. `args` are `Options`. `timeout_s`: seconds without a byte
    after which a replica counts as lost. Raises UserError for a missing or malformed URL, or an unknown option."""
    options = check_engine_args(args)
    fleet = open_fleet(options.fleet) if options.fleet else None
    where = endpoint or (fleet and fleet.endpoint)
    if not (where or fleet):
        raise UserError("--endpoint", endpoint, "the engine endpoint needs the URL of one")
    return Endpoint(check_urls(where) if where else (), options, timeout_s, fleet)


def check_engine_args(args: JsonMapping, prefix: str = "engine_args.") -> Options:
    """Check `args` and return them as options. Raises UserError for a wrong one; `prefix` begins its field."""
    try:
        return Options(**args)
    except ValidationError as error:
        raise convert_validation_error(error, prefix) from None


def check_url(url: str) -> str:
    """Check `url`, and return it without a trailing slash. Raises UserError where it is no absolute URL of http(s)."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UserError(
            "rollout_endpoint_url",
            url,
            "must be an absolute URL: http://host:port or https://host/path",
        )
    return url.rstrip("/")


def check_urls(text: str) -> list[str]:
    """Check the URLs in `text`, which are separated by commas. Raises UserError if one is not an absolute URL."""
    return [check_url(url.strip()) for url in text.split(",")]


class Piece(BaseModel, strict=True):
    """Tokens of one completion."""

    index: int = Field(ge=0)
    ids: Ids
    logprobs: list[float]
    version: int


class Whole(BaseModel, strict=True):
    """Completions that have ended."""

    index: int = Field(ge=0)
    completions: list[JsonObject] = Field(min_length=1)


@dataclass
class Partial:
    """What is known of one completion so far; `versions` has one a token."""

    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    done: Completion | None = None

    def extend(self, piece: Piece) -> None:
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.versions += [piece.version] * len(piece.ids)

    def find_end(self, sampling: Sampling) -> str:
        """Return the finish reason of a completion that needs no further token, else nothing."""
        if self.ids and self.ids[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.ids) >= sampling.max_tokens else ""

    def derive_next_seed(self) -> int:
        """Derive the seed of a request that continues from here: with the first seed its random stream would repeat."""
        return derive_seed(self.seed, "continue", len(self.ids)) if self.ids else self.seed


class Endpoint:
    """`Engine` over an opaque endpoint, at one URL or several. `refitted`: timings of its fleet's last refit."""

    name = "endpoint"

    def __init__(
        self, urls: Sequence[str], options: Options, timeout_s: float, fleet: Fleet | None = None
    ) -> None:
        self.urls = urls
        self.options = options
        self.timeout_s = timeout_s
        self.fleet = fleet
        self.refitted: Refitted | None = None
        self._given = urls
        self.context = options.max_model_len
        self.max_staleness = options.max_staleness
        self.version = -1
        self.digest = ""
        self.requests = self.retries = 0
        self._hook = plugins.load_variant("engines", options.hook) if options.hook else None
        self._turns = itertools.count()
        self._stopping = threading.Event()

    def load(self, policy: Artifact, *, force: bool = False) -> None:
        """Demand this version from now on; a fleet that does not pull is brought to it."""
        if self.fleet:
            self.refitted = refit_fleet(
                self.fleet, make_target(policy), timeout_s=self.timeout_s, force=force
            )
            self.urls = self._given or self.refitted.urls
        self.version = policy.manifest.facts["version"]
        self.digest = policy.manifest.digest
        self.vocab_size = json.loads(policy.part("model/config.json").read_text())["vocab_size"]

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, done: Done
    ) -> list[list[Completion]]:
        self._stopping.clear()
        pool = ThreadPoolExecutor(min(self.options.concurrency, max(len(requests), 1)))
        futures: list[Future[list[Completion]]] = []
        try:
            futures = [pool.submit(self._complete, request, sampling) for request in requests]
            left: set[Future[list[Completion]]] = set(futures)
            while left:
                ended, left = wait(left, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in ended:
                    future.result()
                done(len(futures) - len(left))
            return [future.result() for future in futures]
        finally:
            self._stopping.set()  # threads that still wait hang up, and the endpoint drops their requests
            pool.shutdown(cancel_futures=True)

    def score(self, ids: Sequence[int]) -> list[float]:
        """Score as `Engine.score` does, by the very version of the policy: wait until a replica has it."""
        self._stopping.clear()
        request = Request("canary", list(ids), [0])
        sampling = Sampling(0.0, 1, ())
        body = {"sampling": asdict(sampling), "version": self.version, "prompt_logprobs": True}
        (completion,) = self._retry(lambda url: self._whole(url, request, body, sampling))
        if completion.start_version != self.version:
            raise self._wrong(
                f"answers with version {completion.start_version} where {self.version} was demanded"
            )
        if completion.prompt_logprobs is None or len(completion.prompt_logprobs) != len(ids) - 1:
            raise self._wrong("gives no prompt_logprobs, one for each id but the first")
        return completion.prompt_logprobs

    def close(self) -> None:
        self._stopping.set()

    def _complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        """Complete one prompt, over as many attempts as it takes."""
        oldest = self.version - self.max_staleness
        body = {
            "sampling": asdict(sampling),
            "min_version" if self.max_staleness else "version": oldest,
        }
        if not self.options.partial_rollout:
            return self._retry(lambda url: self._whole(url, request, body, sampling))
        parts = [Partial(seed) for seed in request.seeds]
        self._retry(lambda url: self._go_on(url, request, body, sampling, parts))
        return [part.done for part in parts if part.done]

    def _retry(self, attempt: Callable[[str], Result]) -> Result:
        """Return the result of `attempt` at a URL. Each retry uses the next URL; waits double after a full round."""
        turn = next(self._turns)
        tries = 0
        while True:
            url = self.urls[(turn + tries) % len(self.urls)]
            try:
                return attempt(url)
            except Lost as lost:
                sent = lost.sent or self.options.model_dump()
                if tries >= sent["max_retries"] or self._stopping.is_set():
                    raise Retryable(f"{url}: {lost}, after {tries} retries") from lost
                self._stopping.wait(
                    min(sent["retry_sleep"], 0.02 * 2.0 ** min(tries // len(self.urls), 20))
                )
                tries += 1
                self.retries += 1

    def _whole(
        self, url: str, request: Request, body: JsonMapping, sampling: Sampling
    ) -> list[Completion]:
        """Read all completions of one prompt from one answer."""
        with self._ask(url, {"requests": [asdict(request)], **body}) as lines:
            for message in lines:
                if "completions" in message:
                    completions = [
                        self._read(c, sampling.max_tokens)
                        for c in self._parse(Whole, message).completions
                    ]
                    if (count := len(completions)) != len(request.seeds):
                        raise self._wrong(
                            f"gives {count} completions where {len(request.seeds)} were asked for"
                        )
                    if any(c.finish_reason == "abort" for c in completions):
                        raise Lost("a completion was aborted")
                    return completions
            raise Lost("broke off before the end")

    def _go_on(
        self,
        url: str,
        request: Request,
        body: JsonMapping,
        sampling: Sampling,
        parts: Sequence[Partial],
    ) -> None:
        """Stream what is not done yet; tokens that arrive before a loss are kept, with their versions."""
        for part in parts:
            if part.done is None and (
                reason := part.find_end(sampling)
            ):  # only the message that it ended was lost
                part.done = self._finish(part, {"ids": [], "finish_reason": reason}, sampling)
        lengths = {len(part.ids) for part in parts if part.done is None}
        for length in sorted(
            lengths
        ):  # all 0 at first; after a loss each continues at its own length
            some = [part for part in parts if part.done is None and len(part.ids) == length]
            continued = [
                Request(request.id, request.prompt_ids + part.ids, [part.derive_next_seed()])
                for part in some
            ]
            left = replace(sampling, max_tokens=sampling.max_tokens - length)
            payload = {
                "requests": [asdict(r) for r in continued],
                **body,
                "sampling": asdict(left),
                "stream": True,
            }
            with self._ask(url, payload) as lines:
                for message in lines:
                    if "sample" in message:
                        piece = self._parse(Piece, message)
                        self._check_version(piece.version)
                        self._find_part(some, piece.index).extend(piece)
                    elif "completions" in message:
                        whole = self._parse(Whole, message)
                        part = self._find_part(some, whole.index)
                        part.done = self._finish(part, whole.completions[0], sampling)
                if any(part.done is None for part in some):
                    raise Lost("broke off before the end")

    def _find_part(self, parts: Sequence[Partial], index: int) -> Partial:
        if index >= len(parts):
            raise self._wrong(f"answers request {index} of {len(parts)}")
        return parts[index]

    def _finish(self, part: Partial, fields: JsonMapping, sampling: Sampling) -> Completion:
        if fields.get("finish_reason") == "abort":
            raise Lost("a completion was aborted")
        told = fields.get("ids")
        if not (
            part.ids and isinstance(told, list) and part.ids[len(part.ids) - len(told) :] == told
        ):
            raise self._wrong("streams other tokens than the finished completion has")
        mixed = part.versions if len(set(part.versions)) > 1 else []
        whole = {**fields, "ids": part.ids, "logprobs": part.logprobs, "versions": mixed}
        whole |= {"start_version": part.versions[0], "end_version": part.versions[-1]}
        return self._read(whole, sampling.max_tokens)

    def _read(self, fields: JsonMapping, max_tokens: int) -> Completion:
        """Read a completion, and check that it is a possible one."""
        completion = self._parse(Completion, fields)
        if completion.start_version != completion.end_version and not completion.versions:
            raise self._wrong("gives two versions, but no version for each token")
        ids = completion.ids
        logprobs = completion.logprobs
        if not 0 < len(ids) <= max_tokens or len(logprobs) != len(ids):
            raise self._wrong(
                f"gives {len(ids)} ids and {len(logprobs)} log-probabilities of {max_tokens}"
            )
        if (most := max(ids)) >= self.vocab_size:
            raise self._wrong(
                f"gives the id {most}, beyond the policy's vocabulary of {self.vocab_size}"
            )
        if not all(math.isfinite(p) and p <= 1e-3 for p in logprobs):
            raise self._wrong("gives log-probabilities that are above 0 or not finite")
        if completion.versions and len(completion.versions) != len(ids):
            raise self._wrong("gives another number of versions than of ids")
        for version in completion.versions or [completion.start_version]:
            self._check_version(version)
        return completion

    def _parse(self, form: type[Form], fields: JsonMapping) -> Form:
        try:
            return form(**fields)
        except ValidationError as error:
            wrong = error.errors()[0]
            where = ".".join(map(str, wrong["loc"]))
            raise self._wrong(
                f"answers in another form ({where}: {wrong['input']!r}: {wrong['msg']})"
            ) from error
        except TypeError as error:
            raise self._wrong(f"answers in another form ({error})") from error

    def _check_version(self, version: int) -> None:
        if not self.version - self.max_staleness <= version <= self.version:
            bound = (
                f"{self.version - self.max_staleness} to {self.version}"
                if self.max_staleness
                else self.version
            )
            raise self._wrong(f"answers with version {version} where {bound} was demanded")

    def _wrong(self, what: str) -> UserError:
        remedy = f"{what}; `tuneloop endpoint check` shows which rules it breaks"
        return UserError("--endpoint", ", ".join(self.urls), remedy)

    @contextmanager
    def _ask(self, url: str, payload: JsonObject) -> Iterator[Iterator[JsonObject]]:
        """Yield the messages of one answer."""
        sent = self._prepare(url, payload)
        try:
            self._check_stop()
            self.requests += 1
            with open_answer(
                "POST",
                sent["url"],
                server=", ".join(self.urls),
                timeout_s=self.timeout_s,
                body=sent["payload"],
                headers=sent["headers"],
                check=self._check_stop,
            ) as response:
                yield read_messages(response)
        except Lost as lost:
            lost.sent = sent
            raise

    def _prepare(self, url: str, payload: JsonObject) -> JsonObject:
        headers = {"Content-Type": "application/json", **build_token_headers()}
        fields: JsonObject = {
            "url": f"{url}/generate",
            "payload": payload,
            "headers": headers,
            "max_retries": self.options.max_retries,
            "retry_sleep": self.options.retry_sleep,
        }
        if self._hook is None:
            return fields
        changed = self._hook(fields)
        if not isinstance(changed, dict):
            raise TypeError(
                f"the hook {self.options.hook} must return a dict, not {type(changed).__name__}"
            )
        return {**fields, **changed}

    def _check_stop(self) -> None:
        if self._stopping.is_set():
            raise Lost("stopped")
