"""An endpoint that the user provides.

Only ``POST <url>/generate`` is used, and its answers are checked. The fleet behind it pulls
published weights (docs/weights.md) or is brought to each version (`tuneloop.inference.fleet`), and
may grow, shrink and lose replicas. Each prompt is a request of its own, for a load balancer to
place; several URLs take turns. A request demands a version at most `max_staleness` older than the
policy's, waits while no replica has it (409), goes to the next URL when a replica is lost, and is
aborted by hanging up.

The class of its settings is in `config/engines.py`; `tuneloop endpoint check` tries a server before
a run (`extensions/fleets/conformance.py`). It computes nothing in this process.
"""

import itertools
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
from tuneloop.core.wording import format_count
from tuneloop.formats.facts import VersionFacts
from tuneloop.formats.model_files import read_vocabulary_size
from tuneloop.formats.rollouts import Completion, Ids, Request
from tuneloop.inference.capabilities import Capabilities
from tuneloop.inference.engines import Done, Engine, EngineReport, Sampling
from tuneloop.inference.engines._connection import (
    Ended,
    Form,
    Lost,
    open_answer,
    read_form,
    read_messages,
)
from tuneloop.inference.fleet import Fleet, open_fleet
from tuneloop.inference.fleet.refit import Refitted, make_target, refit_fleet

CAPABILITIES = Capabilities(in_process=False)
POLL_S = 0.2
"""Seconds between two reports of progress."""
FIRST_PAUSE_S = 0.02
"""Seconds before the first retry; they double after each round over all URLs."""
MAX_DOUBLINGS = 20
"""Keeps the power of two small; the pause has its limit long before."""
ROUNDING = 1e-3
"""Log-probabilities may exceed 0 by this much, in nats: half precision does not sum to 1."""
ADVICE = "`tuneloop endpoint check` shows which rules it breaks"
Result = TypeVar("Result")


class Options(BaseModel, frozen=True, extra="forbid"):
    """``engine_args`` of the engine `endpoint`.

    `config/loop.py: max_staleness` reads `max_staleness` where it is set, and takes 0 otherwise.
    `fleet` is set by the section `engine.weights` (`config/engine_weights.py: RefitFleet`), and is
    left out of a stage's identity (`inference/generate.py: input_identity`); any other field is
    part of it.
    """

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
        description="URL of the workers to bring to each version (`tuneloop fleet --help`); "
        "none: they pull",
    )
    hook: str | None = Field(
        None,
        description="pkg.mod:function, called before each request with {url, payload, headers, "
        "max_retries, retry_sleep}; returns the same, changed or not",
    )


def open_engine(endpoint: str | None, args: JsonMapping, timeout_s: float) -> Engine:
    """Open the engine behind an endpoint.

    Args:
        endpoint: an absolute URL to which ``/generate`` is appended, or several separated by
            commas; None: the fleet's URL, or those of its workers.
        args: `Options`.
        timeout_s: seconds without a byte after which a replica counts as lost.

    Raises:
        UserError: a missing or malformed URL, or an unknown option.
    """
    options = check_engine_args(args)
    fleet = open_fleet(options.fleet) if options.fleet else None
    address = endpoint or (fleet and fleet.endpoint)
    # Without an address the workers of the fleet are asked directly.
    urls = check_urls(address) if address else []
    if not (urls or fleet):
        raise UserError("--endpoint", endpoint, "the engine endpoint needs the URL of one")
    return Endpoint(urls, options, timeout_s, fleet)


def check_engine_args(args: JsonMapping, prefix: str = "engine_args.") -> Options:
    """Check `args` and return them as options.

    Raises:
        UserError: one is wrong; its field begins with `prefix`.
    """
    try:
        return Options(**args)
    except ValidationError as error:
        raise convert_validation_error(error, prefix) from None


def check_url(url: str) -> str:
    """Check `url`, and return it without a trailing slash.

    Raises:
        UserError: it is no absolute URL of http or https.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        remedy = "must be an absolute URL: http://host:port or https://host/path"
        raise UserError("rollout_endpoint_url", url, remedy)
    return url.rstrip("/")


def check_urls(text: str) -> list[str]:
    """Check the URLs in `text`, which are separated by commas. Raises as `check_url`."""
    return [check_url(url.strip()) for url in text.split(",")]


class Piece(BaseModel, strict=True):
    """Tokens of one completion, as a server streams them (`inference/served.py: Tokens`)."""

    index: int = Field(ge=0)
    ids: Ids
    logprobs: list[float]
    version: int


@dataclass
class Partial:
    """What has arrived of one completion.

    Attributes:
        seed: of the request.
        ids, logprobs, versions: one entry for each token.
        done: the completion, once it has ended.
    """

    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    done: Completion | None = None

    def extend(self, piece: Piece) -> None:
        """Add the tokens of a piece."""
        self.ids += piece.ids
        self.logprobs += piece.logprobs
        self.versions += [piece.version] * len(piece.ids)

    def find_end(self, sampling: Sampling) -> str:
        """Return the finish reason of a completion that needs no further token, else nothing."""
        if self.ids and self.ids[-1] in sampling.stop_token_ids:
            return "stop"
        if len(self.ids) >= sampling.max_tokens:
            return "length"
        return ""

    def derive_next_seed(self) -> int:
        """Derive the seed of a request that continues from here.

        With the first seed its random stream would repeat. A stage names the seeds of its own
        continuations in another way (`Stage.seed`, by the completion's name); an engine is given
        no name, only the first seed. That is harmless: this seed is one of a stage's already, of
        63 bits, so the two streams are the same only if SHA-256 collides. And it is used only
        after a loss, at a length that no seed decides.
        """
        if not self.ids:
            return self.seed
        return derive_seed(self.seed, "continue", len(self.ids))


class Endpoint:
    """`Engine` over an opaque endpoint, at one URL or several.

    Attributes:
        urls: of replicas, or of load balancers before them.
        fleet: the workers to bring to each version; None: they pull.
        refitted: timings of the fleet's last refit.
        retries: how many there were.
    """

    name = "endpoint"

    def __init__(
        self,
        urls: Sequence[str],
        options: Options,
        timeout_s: float,
        fleet: Fleet | None = None,
    ) -> None:
        self.urls = urls
        self.options = options
        self.timeout_s = timeout_s
        self.fleet = fleet
        self.refitted: Refitted | None = None
        self._configured_urls = urls
        self.context = options.max_model_len
        self.max_staleness = options.max_staleness
        self.version = -1
        self.digest = ""
        self.retries = 0
        self._hook = plugins.load_variant("engines", options.hook) if options.hook else None
        self._turns = itertools.count()
        self._stopping = threading.Event()

    def load(self, policy: Artifact, *, force: bool = False) -> None:
        """Demand this version from now on; a fleet that does not pull is brought to it."""
        if self.fleet:
            target = make_target(policy)
            self.refitted = refit_fleet(self.fleet, target, timeout_s=self.timeout_s, force=force)
            # Workers may have been replaced under other addresses since the last version.
            self.urls = self._configured_urls or self.refitted.urls
        self.version = VersionFacts.read(policy).version
        self.digest = policy.manifest.digest
        # This one file is fetched, and not the weights beside it.
        directory = policy.part("model/config.json").parent
        self.vocab_size = read_vocabulary_size(directory)

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        done: Done,
    ) -> list[list[Completion]]:
        self._stopping.clear()
        threads = min(self.options.concurrency, max(len(requests), 1))
        pool = ThreadPoolExecutor(threads)
        futures: list[Future[list[Completion]]] = []
        try:
            for request in requests:
                futures.append(pool.submit(self._complete, request, sampling))
            running = set(futures)
            while running:
                # `done` is also how a stage learns of SIGTERM, so it is called while nothing ends.
                ended, running = wait(running, timeout=POLL_S, return_when=FIRST_COMPLETED)
                for future in ended:
                    # The first error ends the batch.
                    future.result()
                done(len(futures) - len(running))
            return [future.result() for future in futures]
        finally:
            # Threads that still wait hang up, and the endpoint drops their requests.
            self._stopping.set()
            pool.shutdown(cancel_futures=True)

    def score(self, ids: Sequence[int]) -> list[float]:
        """Score as `Engine.score` does, by the very version of the policy.

        Wait until a replica has it.
        """
        self._stopping.clear()
        request = Request("canary", list(ids), [0])
        sampling = Sampling(0.0, 1, ())
        body: JsonObject = {
            "sampling": asdict(sampling),
            "version": self.version,
            "prompt_logprobs": True,
        }
        (completion,) = self._retry(lambda url: self._complete_at(url, request, body, sampling))
        version = completion.start_version
        # `_read` accepts a staler version, but the canary's log-probabilities are this one's.
        if version != self.version:
            raise self._blame(f"answers with version {version} where {self.version} was demanded")
        logprobs = completion.prompt_logprobs
        if logprobs is None or len(logprobs) != len(ids) - 1:
            raise self._blame("gives no prompt_logprobs, one for each id but the first")
        return logprobs

    def report(self) -> EngineReport:
        refitted = asdict(self.refitted) if self.refitted else {}
        return EngineReport(max_staleness=self.max_staleness, refitted=refitted)

    def close(self) -> None:
        self._stopping.set()

    def _complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        """Complete one prompt, over as many attempts as it takes."""
        body: JsonObject = {"sampling": asdict(sampling)}
        # Where no staleness is allowed, a replica that is ahead may not answer either.
        if self.max_staleness:
            body["min_version"] = self.version - self.max_staleness
        else:
            body["version"] = self.version
        if not self.options.partial_rollout:
            return self._retry(lambda url: self._complete_at(url, request, body, sampling))
        parts = [Partial(seed) for seed in request.seeds]
        self._retry(lambda url: self._stream_at(url, request, body, sampling, parts))
        return [part.done for part in parts if part.done]

    def _retry(self, attempt: Callable[[str], Result]) -> Result:
        """Return the result of `attempt` at a URL.

        Each retry uses the next URL. The wait before it doubles after each full round.
        """
        turn = next(self._turns)
        tries = 0
        while True:
            url = self.urls[(turn + tries) % len(self.urls)]
            try:
                return attempt(url)
            except Lost as lost:
                # The user's hook may have changed the limits of this request.
                limits = lost.sent or self.options.model_dump()
                if tries >= limits["max_retries"] or self._stopping.is_set():
                    raise Retryable(f"{url}: {lost}, after {tries} retries") from lost
                # More doublings would overflow after many retries.
                rounds = min(tries // len(self.urls), MAX_DOUBLINGS)
                pause = FIRST_PAUSE_S * 2.0**rounds
                self._stopping.wait(min(limits["retry_sleep"], pause))
                tries += 1
                self.retries += 1

    def _complete_at(
        self,
        url: str,
        request: Request,
        body: JsonObject,
        sampling: Sampling,
    ) -> list[Completion]:
        """Read all completions of one prompt from one answer."""
        payload: JsonObject = {"requests": [asdict(request)]}
        with self._send(url, payload | body) as messages:
            for message in messages:
                if "completions" not in message:
                    continue
                ended = self._parse(Ended, message)
                completions: list[Completion] = []
                for fields in ended.completions:
                    completions.append(self._read(fields, sampling.max_tokens))
                if len(completions) != len(request.seeds):
                    raise self._blame(
                        f"gives {format_count(len(completions), 'completion')} "
                        f"where {len(request.seeds)} were asked for"
                    )
                # A replica aborts what it runs as it shuts down.
                if any(completion.finish_reason == "abort" for completion in completions):
                    raise Lost("a completion was aborted")
                return completions
            raise Lost("broke off before the end")

    def _stream_at(
        self,
        url: str,
        request: Request,
        body: JsonObject,
        sampling: Sampling,
        parts: Sequence[Partial],
    ) -> None:
        """Stream the tokens of completions that have not ended, and add them to `parts`.

        Tokens that arrive before a loss are kept, with their versions.
        """
        for part in parts:
            reason = part.find_end(sampling)
            if part.done is None and reason:
                # Only the message that it ended was lost.
                part.done = self._finish(part, {"ids": [], "finish_reason": reason}, sampling)
        # All are 0 at first; after a loss each completion continues at its own length. A request
        # has one limit for all its completions, so each length is a request of its own.
        lengths = {len(part.ids) for part in parts if part.done is None}
        for length in sorted(lengths):
            group: list[Partial] = []
            for part in parts:
                if part.done is None and len(part.ids) == length:
                    group.append(part)
            self._stream_group(url, request, body, sampling, group)

    def _stream_group(
        self,
        url: str,
        request: Request,
        body: JsonObject,
        sampling: Sampling,
        group: Sequence[Partial],
    ) -> None:
        """Stream the rest of completions that have the same number of tokens so far."""
        requests: list[JsonObject] = []
        for part in group:
            prompt_ids = request.prompt_ids + part.ids
            continued = Request(request.id, prompt_ids, [part.derive_next_seed()])
            requests.append(asdict(continued))
        max_tokens = sampling.max_tokens - len(group[0].ids)
        payload: JsonObject = {"requests": requests}
        payload |= body
        payload["sampling"] = asdict(replace(sampling, max_tokens=max_tokens))
        payload["stream"] = True
        with self._send(url, payload) as messages:
            for message in messages:
                if "sample" in message:
                    piece = self._parse(Piece, message)
                    self._check_version(piece.version)
                    self._find_part(group, piece.index).extend(piece)
                elif "completions" in message:
                    ended = self._parse(Ended, message)
                    part = self._find_part(group, ended.index)
                    part.done = self._finish(part, ended.completions[0], sampling)
            if any(part.done is None for part in group):
                raise Lost("broke off before the end")

    def _find_part(self, parts: Sequence[Partial], index: int) -> Partial:
        if index >= len(parts):
            raise self._blame(f"answers request {index} of {len(parts)}")
        return parts[index]

    def _finish(self, part: Partial, fields: JsonObject, sampling: Sampling) -> Completion:
        """Make the completion of streamed tokens, and of the `fields` that its end states."""
        if fields.get("finish_reason") == "abort":
            raise Lost("a completion was aborted")
        ids = fields.get("ids")
        if not part.ids or not isinstance(ids, list):
            raise self._blame("streams other tokens than the finished completion has")
        # After a loss the end has only the ids since then.
        first = len(part.ids) - len(ids)
        if part.ids[first:] != ids:
            raise self._blame("streams other tokens than the finished completion has")
        is_mixed = len(set(part.versions)) > 1
        streamed = {
            "ids": part.ids,
            "logprobs": part.logprobs,
            "versions": part.versions if is_mixed else [],
            "start_version": part.versions[0],
            "end_version": part.versions[-1],
        }
        return self._read(fields | streamed, sampling.max_tokens)

    def _read(self, fields: JsonMapping, max_tokens: int) -> Completion:
        """Read a completion, and check that it is a possible one."""
        completion = self._parse(Completion, fields)
        if completion.start_version != completion.end_version and not completion.versions:
            raise self._blame("gives two versions, but no version for each token")
        ids = completion.ids
        logprobs = completion.logprobs
        if not 0 < len(ids) <= max_tokens or len(logprobs) != len(ids):
            raise self._blame(
                f"gives {len(ids)} ids and {len(logprobs)} log-probabilities of {max_tokens}"
            )
        # The trainer would fail at an id that it has no embedding for.
        highest = max(ids)
        if highest >= self.vocab_size:
            limit = f"the policy's vocabulary of {self.vocab_size}"
            raise self._blame(f"gives the id {highest}, beyond {limit}")
        for logprob in logprobs:
            if not math.isfinite(logprob) or logprob > ROUNDING:
                raise self._blame("gives log-probabilities that are above 0 or not finite")
        if completion.versions and len(completion.versions) != len(ids):
            raise self._blame("gives another number of versions than of ids")
        for version in completion.versions or [completion.start_version]:
            self._check_version(version)
        return completion

    def _parse(self, form: type[Form], fields: JsonMapping) -> Form:
        """Read a part of an answer. Raises UserError if it has another form."""
        return read_form(form, fields, ", ".join(self.urls), ADVICE)

    def _check_version(self, version: int) -> None:
        """Raise UserError unless tokens may be of this version."""
        oldest = self.version - self.max_staleness
        if oldest <= version <= self.version:
            return
        demand = str(self.version)
        if self.max_staleness:
            demand = f"{oldest} to {self.version}"
        raise self._blame(f"answers with version {version} where {demand} was demanded")

    def _blame(self, problem: str) -> UserError:
        """Return the error of an endpoint that does not keep to the protocol."""
        return UserError("--endpoint", ", ".join(self.urls), f"{problem}; {ADVICE}")

    @contextmanager
    def _send(self, url: str, payload: JsonObject) -> Iterator[Iterator[JsonObject]]:
        """Yield the messages of one answer."""
        request = self._prepare(url, payload)
        try:
            self._check_stop()
            with open_answer(
                "POST",
                request["url"],
                server=", ".join(self.urls),
                timeout_s=self.timeout_s,
                body=request["payload"],
                headers=request["headers"],
                check=self._check_stop,
            ) as response:
                yield read_messages(response)
        except Lost as lost:
            lost.sent = request
            raise

    def _prepare(self, url: str, payload: JsonObject) -> JsonObject:
        """Return the request, as the user's hook has changed it, and the limits of its retries.

        The keys are an interface: users' hooks read and change them (`Options.hook`). `_send` and
        `_retry` read them afterwards.
        """
        headers = {"Content-Type": "application/json"}
        headers |= build_token_headers()
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
            kind = type(changed).__name__
            raise TypeError(f"the hook {self.options.hook} must return a dict, not {kind}")
        return fields | changed

    def _check_stop(self) -> None:
        """Raise Lost once the batch has ended or the engine is closed, so that threads end."""
        if self._stopping.is_set():
            raise Lost("stopped")
