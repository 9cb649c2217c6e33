"""A session of the gateway: Tinker's requests, carried out by `Resident` and `Sampler`.

It runs in the worker's process. A method of a request checks what it can at once and puts the rest,
as `work`, into the ledger; `do` runs that later, on the thread that owns the models.

A request that is added is a method here, a body in `messages.py`, a route in `worker.py:
Worker.app` and its name in `app.py: PROXIED`.
"""

import contextlib
import functools
import hashlib
import itertools
import logging
import math
import os
import posixpath
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from pydantic import BaseModel

from tuneloop.core.artifacts import Artifact, dump_canonical_json, find_manifest
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.core.seeds import derive_seed
from tuneloop.core.store import Store, local_path, normalize_url
from tuneloop.core.wording import format_count
from tuneloop.extensions.gateway import messages, wire
from tuneloop.extensions.gateway.ledger import Entry, Ledger
from tuneloop.extensions.gateway.resident import Resident, Sampler, Snapshot
from tuneloop.extensions.gateway.sampler import SharedSampler
from tuneloop.extensions.gateway.sessions import Meter, check_quota
from tuneloop.formats.architectures import get_context
from tuneloop.formats.facts import VersionFacts
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.formats.tokens import load_tokenizer, stop_ids
from tuneloop.inference.engines import Sampling
from tuneloop.inference.refusals import Refused
from tuneloop.training import checkpoint

if TYPE_CHECKING:
    from tuneloop.training.fsdp.ranks import Ranks

SCHEME = "tinker://"
"""The beginning of a checkpoint's path, which `CHECKPOINT` matches."""
DRAINED = "drained"
"""The name of the checkpoint in which a session that ends saves a model (`_save_drained`)."""
SNAPSHOTS = 2
"""The number of unnamed versions that are kept for sampling sessions, in memory or the store."""
UNNAMED = "snapshots"
"""The folder of unnamed versions in the store, beside `CHECKPOINT`'s ``weights``."""
NOT_DONE = "not done: its session is ending; continue from its checkpoints"
log = logging.getLogger("tuneloop.session")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Matches the name that a client gives a checkpoint; it becomes a folder in the store."""
CHECKPOINT = re.compile(
    rf"({SCHEME})?(?P<namespace>[^:./]*)\.(?P<session>[a-z0-9-]+):train:(?P<number>\d+)"
    rf"/(?P<file>(weights|sampler_weights)/{NAME.pattern})"
)
"""Matches the path of a checkpoint, as Tinker's client has it. Its kinds, ``weights`` and
``sampler_weights``, are those that `save_weights` writes; `_url` makes the place in the store of
it."""


class Session:
    """The models and sampling sessions of one session.

    Requests are accepted from any thread, and executed by the one that calls `do`.

    Attributes:
        models: id → model.
        names: id of a model → the name of the checkpoint that it was created from.
        samplers: id of a sampling session → its weights; None once they were dropped.
        meter: counts tokens of today.
        token_limit: how many tokens it may use today, as the gateway says with each request.
    """

    def __init__(
        self,
        id: str,
        artifacts: str,
        ranks: "Callable[[], Ranks]",
        sampler: str = "",
    ) -> None:
        """Begin a session without models.

        Args:
            id: ``<namespace>.<name>``.
            artifacts: the URL that its checkpoints lie below; those of the namespace's other
                sessions lie beside it.
            ranks: opens the device when it is first needed.
            sampler: URL of the server to sample from; empty: this process samples.
        """
        self.id = id
        self.artifacts = artifacts.rstrip("/")
        self.ledger = Ledger()
        self.models: dict[str, Resident] = {}
        self.names: dict[str, str] = {}
        self.samplers: dict[str, Snapshot | None] = {}
        self.meter = Meter()
        self.token_limit = math.inf
        self._unnamed: list[str] = []
        self._asleep: list[Resident] = []
        self._ranks = functools.cache(ranks)
        self._server = sampler
        self._saving = threading.Event()

    @functools.cached_property
    def _sampler(self) -> SharedSampler | Sampler:
        return SharedSampler(self._server, self._check_saving) if self._server else Sampler()

    def create_model(self, request: messages.CreateModel) -> str:
        """Queue a request for a new model, its number 0."""
        model = f"{self.id}:train:{request.model_seq_id}"
        lora = request.lora_config.to_peft()

        def work() -> JsonObject:
            policy = self._artifact(request.base_model)
            seed = request.lora_config.seed or 0
            self.models[model] = Resident(policy, self._ranks(), lora, seed=seed)
            self.names[model] = request.base_model
            return {"model_id": model, "type": "create_model"}

        # The model's stream exists before the model, as clients do not wait for it.
        self.ledger.open(model, 0)
        return self._submit(model, 0, request, work)

    def load_weights(self, request: messages.LoadWeights) -> str:
        """Queue a request to continue a model from a checkpoint, or to create a new one from it."""
        if request.model_id is None and request.model_seq_id is None:
            raise UserError("model_id", None, "is required, or model_seq_id of a new model")
        model = request.model_id or f"{self.id}:train:{request.model_seq_id}"

        def work() -> JsonObject:
            policy = self._artifact(request.path)
            # A model keeps its trainer until the checkpoint is verified.
            if request.model_id:
                with self._changing(model) as resident:
                    resident.load(policy, request.optimizer)
            else:
                self.models[model] = Resident(policy, self._ranks(), optimizer=request.optimizer)
                self.names[model] = request.path
            return {"path": request.path, "model_id": model, "type": "load_weights"}

        # A new model has a stream of its own, which begins with this request.
        if request.model_id is None:
            self.ledger.open(model, 0)
        return self._submit(model, request.seq_id if request.model_id else 0, request, work)

    def forward_backward(self, body: bytes, request: wire.ForwardBackward) -> str:
        """Queue a request for gradients; `body` identifies it."""

        def work() -> messages.Losses:
            model = self._model(request.model_id)
            self._use_tokens(sum(len(datum.tokens) for datum in request.data))
            logprobs, metrics = model.forward_backward(
                request.data, request.loss_fn, request.config, request.forward_only
            )
            return messages.Losses(logprobs, metrics)

        return self._submit(request.model_id, request.seq_id, body, work)

    def refuse(self, body: bytes, model: str, number: int, error: Exception) -> str:
        """Queue a failed request: without its number, later requests would wait for ever."""

        def work() -> Any:
            raise error

        return self._submit(model, number, body, work)

    def optim_step(self, request: messages.OptimStep) -> str:
        """Queue a request for an optimizer step."""

        def work() -> JsonObject:
            with self._changing(request.model_id) as resident:
                return {"metrics": resident.optim_step(request.adam_params), "type": "optim_step"}

        return self._submit(request.model_id, request.seq_id, request, work)

    def save_weights(self, request: messages.SaveWeights, kind: str = "weights") -> str:
        """Queue a request for a checkpoint below ``<artifacts>/train-<n>/<kind>``."""
        if request.path is None or not NAME.fullmatch(request.path):
            remedy = "a name of letters, digits, dots, dashes and underscores"
            raise UserError("path", request.path, remedy)
        if request.overwrite:
            raise UserError("overwrite", True, "a checkpoint is written once; choose another name")
        path = f"{SCHEME}{request.model_id}/{kind}/{request.path}"

        def work() -> JsonObject:
            url = self._url(path)
            # Asked before the gigabytes are written. A commit of another in between is refused, too.
            if find_manifest(url) is not None:
                raise UserError("path", request.path, "is taken; choose another name")
            facts: JsonObject = {"session": self.id}
            if request.ttl_seconds:
                facts["ttl_seconds"] = request.ttl_seconds
            self._model(request.model_id).save(url, facts)
            answer = "save_weights" if kind == "weights" else "save_weights_for_sampler"
            return {"path": path, "type": answer}

        return self._submit(request.model_id, request.seq_id, request, work)

    def save_weights_for_sampler(self, request: messages.SaveWeights) -> str:
        """Queue a request for weights to sample from: a named checkpoint, or a snapshot.

        Only the newest snapshots are kept.
        """
        if request.path is not None:
            return self.save_weights(request, "sampler_weights")
        if request.kind != "snapshot":
            remedy = "only snapshots are known here; their weights never change"
            raise UserError("kind", request.kind, remedy)

        def work() -> JsonObject:
            number = request.sampling_session_seq_id
            name = f"u{len(self.samplers)}" if number is None else str(number)
            sampling = f"{self.id}:sample:{name}"
            self.samplers[sampling] = self._take_snapshot(request.model_id)
            self._unnamed.append(sampling)
            self._drop_snapshots(SNAPSHOTS)
            self.ledger.open(sampling)
            return {
                "sampling_session_id": sampling,
                "path": None,
                "type": "save_weights_for_sampler",
            }

        return self._submit(request.model_id, request.seq_id, request, work)

    def _take_snapshot(self, model_id: str) -> Snapshot:
        model = self._model(model_id)
        if not self._server:
            return model.snapshot()
        # The sampler that sessions share reads weights from the store.
        folder = f"train-{model_id.rpartition(':')[2]}"
        url = f"{self.artifacts}/{folder}/{UNNAMED}/{os.urandom(8).hex()}"
        weights = model.save(url, {"session": self.id}, with_state=False)
        return Snapshot(weights, model.version)

    def create_sampling(self, request: messages.CreateSampling) -> str:
        """Open a sampling session of a checkpoint, and return its id."""
        sampling = f"{self.id}:sample:{request.sampling_session_seq_id}"
        name = request.model_path or request.base_model
        if not name:
            raise UserError("base_model", None, "is required, or model_path")
        policy = self._artifact(name)
        # A checkpoint without a model is refused now, and not when it is sampled from.
        checkpoint.model_dir(policy)
        self.samplers.setdefault(sampling, Snapshot(policy, VersionFacts.read(policy).version))
        self.ledger.open(sampling)
        return sampling

    def sample(self, request: messages.Sample) -> str:
        """Queue a request for completions.

        Waiting requests that differ only in their prompts are executed together.
        """
        _check_sampling(request)
        ids = request.prompt.read_tokens()
        if not ids:
            raise UserError("prompt", [], "is empty")
        params = request.sampling_params
        batch = None
        # It has all parameters that change a completion, but for prompt and seeds: `_sample` takes
        # those of the first request for all.
        # Without a maximum, or with scores, the length of its prompt decides what is computed.
        if params.max_tokens is not None and not request.prompt_logprobs:
            batch = (
                request.sampling_session_id,
                params.max_tokens,
                params.temperature,
                dump_canonical_json(params.stop),
            )
        entry = Entry(_fingerprint(request), self._sample, (request, ids), batch)
        return self.ledger.submit(request.sampling_session_id, request.seq_id, entry)

    def info(self, model: str) -> JsonObject:
        """Return the answer of ``get_info`` for a model."""
        resident = self._model(model)
        base = resident.trainer.base
        facts = base.manifest.facts
        folder = local_path(base.url)
        # A client on the same machine or volume loads the tokenizer from the checkpoint.
        tokenizer = str(folder / base.manifest.root / "model") if folder else facts.get("model")
        name = self.names[model]
        return {
            "type": "get_info",
            "model_data": {
                "arch": facts.get("architecture"),
                "model_name": name,
                "tokenizer_id": tokenizer,
            },
            "model_id": model,
            "model_name": name,
            "weight_version": resident.version,
            "is_lora": resident.lora is not None,
            "lora_rank": resident.lora.r if resident.lora else None,
        }

    def sampler(self, sampling: str) -> JsonObject:
        """Return the description of a sampling session."""
        snapshot = self._snapshot(sampling)
        return {
            "sampler_id": sampling,
            "base_model": snapshot.base.ref,
            "weight_version": snapshot.version,
        }

    def do(self, entries: Sequence[Entry]) -> None:
        """Execute the requests that `Ledger.take` returned.

        A failure of one does not affect the others.
        """
        try:
            results = entries[0].work(list(entries))
        except Exception as error:
            # The frames would keep tensors as long as the result.
            traceback.clear_frames(error.__traceback__)
            # What is away for several requests is away for each of them, and they would wait again.
            if len(entries) == 1 or isinstance(error, Retryable):
                self.ledger.fail(entries, error)
                return
            for entry in entries:
                self.do([entry])
        else:
            for entry, result in zip(entries, results):
                self.ledger.finish(entry, result)

    def save_models(self) -> Future[Any]:
        """Save models that took steps, before all other requests; then refuse requests, and drop
        unnamed snapshots.
        """

        def work(entries: list[Entry]) -> list[None]:
            for name, model in self.models.items():
                try:
                    self._save_drained(name, model)
                except Exception as error:
                    log.error("%s could not be saved (%s: %s)", name, type(error).__name__, error)
            while undone := self.ledger.take(0):
                self.ledger.fail(undone, Refused(404, NOT_DONE))
            self._drop_snapshots(0)
            return [None] * len(entries)

        entry = Entry("", work)
        self.ledger.put_first([entry])
        # A request that waits for the sampler ends now.
        self._saving.set()
        return entry.future

    def _check_saving(self) -> None:
        if self._saving.is_set():
            raise Refused(404, NOT_DONE)

    def _drop_snapshots(self, count: int) -> None:
        """Drop unnamed weights except for the `count` newest."""
        while len(self._unnamed) > count:
            sampling = self._unnamed.pop(0)
            snapshot = self.samplers[sampling]
            self.samplers[sampling] = None
            if self._server and snapshot:
                url = snapshot.base.url
                try:
                    Store(url).delete("")
                except (OSError, Retryable, UserError) as error:
                    log.warning("%s stays in the store: %s", url, error)

    def _save_drained(self, name: str, model: Resident) -> None:
        """Save a model with unsaved steps as ``weights/drained``, or as the first free name of
        ``drained-2``, …
        """
        if model.version == model.saved:
            log.info("%s took no step since it was opened or saved: nothing to save", name)
            return
        path = f"{SCHEME}{name}/weights/{DRAINED}"
        for number in itertools.count(2):
            if find_manifest(self._url(path)) is None:
                break
            path = f"{SCHEME}{name}/weights/{DRAINED}-{number}"
        # No step has used the gradients, so the client has to compute them again.
        model.gradients = False
        artifact = model.save(self._url(path), {"session": self.id})
        log.info("saved %s (%s)", path, artifact.url)

    def sleep(self) -> None:
        """Leave the device: models in training move to the host's memory, the sampler's model is
        dropped.
        """
        self._asleep = list(self.models.values())
        for resident in self._asleep:
            resident.trainer.sleep()
        # A sampler that was never used has no model.
        if "_sampler" in self.__dict__:
            self._sampler.drop()

    def wake(self) -> None:
        """Undo `sleep`."""
        while self._asleep:
            self._asleep.pop().trainer.wake()

    def _submit(
        self,
        stream: str,
        number: int | None,
        request: bytes | BaseModel,
        work: Callable[[], object],
    ) -> str:
        return self.ledger.submit(stream, number, Entry(_fingerprint(request), lambda _: [work()]))

    def _sample(self, entries: list[Entry]) -> list[messages.Samples]:
        """Execute requests of one sampling session with equal parameters."""
        first: messages.Sample = entries[0].request[0]
        params = first.sampling_params
        snapshot = self._snapshot(first.sampling_session_id)
        context, vocabulary, stops = _read_limits(checkpoint.model_dir(snapshot.base))
        requests: list[Request] = []
        for entry in entries:
            message, ids = entry.request
            if len(ids) >= context or not 0 <= min(ids) <= max(ids) < vocabulary:
                span = f"{format_count(len(ids), 'token')}, {min(ids)} to {max(ids)}"
                limits = (
                    f"the model has {format_count(vocabulary, 'token')} and a context of {context}"
                )
                raise UserError("prompt", span, limits)
            requests.append(Request(str(entry.number), ids, _seeds(message, entry.number)))
        prompt_lengths = [len(request.prompt_ids) for request in requests]
        length = min(params.max_tokens or context, context - max(prompt_lengths))
        if len(entries) > 1 and length < (params.max_tokens or 0):
            problem = "one of several prompts does not fit; they are executed one by one"
            raise UserError("prompt", length, problem)
        if params.stop is not None:
            stops = tuple(map(int, params.stop))
        sampling = Sampling(params.temperature, length, stops)
        # The most that may be sampled is counted first, and what was not sampled is given back.
        limit = length * sum(len(request.seeds) for request in requests)
        self._use_tokens(sum(prompt_lengths) + limit)
        used = 0
        try:
            groups = self._sampler.sample(snapshot, requests, sampling)
            used = sum(len(completion.ids) for group in groups for completion in group)
        finally:
            self.meter.count("", used - limit)
        results: list[messages.Samples] = []
        for entry, group in zip(entries, groups):
            message, ids = entry.request
            # Scores are rare, so they are not computed together.
            scores = self._sampler.score(snapshot, ids) if message.prompt_logprobs else None
            sequences = [_describe_completion(completion) for completion in group]
            results.append(messages.Samples(sequences, scores, snapshot.version))
        return results

    def _use_tokens(self, count: int) -> None:
        used = self.meter.count("")
        check_quota(f"session {self.id!r}", "tokens_per_day", used, count, self.token_limit)
        self.meter.count("", count)

    def _model(self, model: str) -> Resident:
        if model not in self.models:
            raise UserError(
                "model_id",
                model,
                "was not created, or load_state or optim_step lost it, saying why; "
                "create one from a checkpoint",
            )
        return self.models[model]

    @contextlib.contextmanager
    def _changing(self, model: str) -> Iterator[Resident]:
        """Yield a model; drop it if the change fails half-way and its trainer is lost."""
        resident = self._model(model)
        try:
            yield resident
        finally:
            if not hasattr(resident, "trainer"):
                del self.models[model]

    def _snapshot(self, sampling: str) -> Snapshot:
        if sampling not in self.samplers:
            raise Refused(404, f"{sampling} is not known here")
        snapshot = self.samplers[sampling]
        if snapshot is None:
            raise UserError(
                "sampling_session_id",
                sampling,
                f"its weights were dropped for newer ones ({SNAPSHOTS} are kept); "
                "use those, or save with a name",
            )
        return snapshot

    def _artifact(self, name: str) -> Artifact:
        """Open the checkpoint that a request names by a path of Tinker's or a reference."""
        if name.startswith(SCHEME):
            return Artifact(self._url(name))
        path = posixpath.normpath(unquote(urlparse(normalize_url(name)).path))
        match = re.search(r"/sessions/([^/]+)/session-[0-9a-f]+(/|@|$)", path)
        # The store's credentials would read any namespace's checkpoints.
        if match and match[1] != self._namespace:
            remedy = "belongs to a session of another namespace; have it copied by its owner"
            raise UserError("path", name, remedy)
        return Artifact(name)

    @property
    def _namespace(self) -> str:
        return self.id.partition(".")[0]

    def _url(self, path: str) -> str:
        """Return the URL of ``tinker://<model>/<kind>/<name>``.

        Raises UserError if it is no checkpoint, or of a session of another namespace.
        """
        match = CHECKPOINT.fullmatch(path)
        if not match or match["namespace"] != self._namespace:
            problem = "no checkpoint of this namespace: tinker://<model>/weights/<name>"
            raise UserError("path", path, problem)
        sessions = self.artifacts.rpartition("/")[0]
        return f"{sessions}/{match['session']}/train-{match['number']}/{match['file']}"


def _check_sampling(request: messages.Sample) -> None:
    """Refuse values that are not supported here. Raises UserError."""
    params = request.sampling_params
    if params.top_k != -1 or params.top_p != 1:
        value = {"top_k": params.top_k, "top_p": params.top_p}
        remedy = "top_k and top_p are not supported here: set top_k -1, top_p 1"
        raise UserError("sampling_params", value, remedy)
    if isinstance(params.stop, str) or any(isinstance(stop, str) for stop in params.stop or ()):
        remedy = "must be token ids; text is not supported here"
        raise UserError("sampling_params.stop", params.stop, remedy)


def _describe_completion(completion: Completion) -> JsonObject:
    return {
        "tokens": completion.ids,
        "logprobs": completion.logprobs,
        "stop_reason": completion.finish_reason,
    }


@functools.lru_cache(8)
def _read_limits(directory: Path) -> tuple[int, int, tuple[int, ...]]:
    """Read a model's context, the size of its vocabulary, and its default stop tokens."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory).get_text_config()
    return (
        get_context(config),
        int(config.vocab_size),
        stop_ids(load_tokenizer(directory), directory),
    )


def _seeds(request: messages.Sample, number: int) -> list[int]:
    """Derive a seed for each completion, from the request's seed, or else from the request."""
    seed = request.sampling_params.seed
    completions = range(request.num_samples)
    if seed is not None:
        return [derive_seed(seed, "sample", index) for index in completions]
    stream = request.sampling_session_id
    return [derive_seed(0, "sample", stream, number, index) for index in completions]


def _fingerprint(request: bytes | BaseModel) -> str:
    if not isinstance(request, bytes):
        request = dump_canonical_json(request.model_dump(mode="json")).encode()
    return hashlib.sha256(request).hexdigest()
