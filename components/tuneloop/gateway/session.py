"""A session of the gateway: Tinker's requests, carried out by `Resident` and `Sampler`."""

import contextlib
import functools
import hashlib
import itertools
import logging
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

from tuneloop.core.artifacts import Artifact, dump_canonical_json, find_manifest
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.core.seeds import derive_seed
from tuneloop.core.store import Store, local_path, normalize_url
from tuneloop.formats.facts import VersionFacts
from tuneloop.formats.rollouts import Request
from tuneloop.formats.tokens import load_tokenizer, stop_ids
from tuneloop.gateway import messages, wire
from tuneloop.gateway.ledger import Entry, Ledger
from tuneloop.gateway.resident import Resident, Sampler, Snapshot
from tuneloop.gateway.sampler import SharedSampler
from tuneloop.gateway.sessions import Meter, check_quota
from tuneloop.inference.engines import Sampling
from tuneloop.inference.refusals import Refused
from tuneloop.training import checkpoint

if TYPE_CHECKING:
    from tuneloop.training.fsdp.ranks import Ranks

SCHEME = "tinker://"
DRAINED = "drained"
SNAPSHOTS = 2
"""The number of unnamed versions that are kept for sampling sessions, in memory or the store."""
UNNAMED = "snapshots"
NOT_DONE = "not done: its session is ending; continue from its checkpoints"
log = logging.getLogger("tuneloop.session")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Session:
    """The models and sampling sessions of one session. Requests are accepted from any thread, and executed by the one
    that calls `do`. Its checkpoints are below the URL `artifacts`, those of the namespace's other sessions beside it;
    `ranks` opens the device when it is first needed. `sampler`: URL of the server to sample from, else empty."""

    def __init__(
        self, id: str, artifacts: str, ranks: "Callable[[], Ranks]", sampler: str = ""
    ) -> None:
        self.id = id
        self.artifacts = artifacts.rstrip("/")
        self.ledger = Ledger()
        self.models: dict[str, Resident] = {}
        self.names: dict[str, str] = {}
        self.samplers: dict[str, Snapshot | None] = {}
        self.meter = Meter()
        self.token_limit = float("inf")
        self._unnamed: list[str] = []
        self._asleep: list[Resident] = []
        self._ranks = functools.cache(ranks)
        self.shared = bool(sampler)
        self._saving = threading.Event()
        self._sampler = functools.cache(
            lambda: SharedSampler(sampler, self._check_saving) if sampler else Sampler()
        )

    def create_model(self, request: messages.CreateModel) -> str:
        """Queue a request for a new model, its number 0."""
        model = f"{self.id}:train:{request.model_seq_id}"
        lora = request.lora_config.to_peft()

        def work() -> JsonObject:
            policy = self._artifact(request.base_model)
            self.models[model] = Resident(
                policy, self._ranks(), lora, seed=request.lora_config.seed or 0
            )
            self.names[model] = request.base_model
            return {"model_id": model, "type": "create_model"}

        self.ledger.open(model, 0)
        return self._submit(model, 0, request, work)

    def load_weights(self, request: messages.LoadWeights) -> str:
        """Queue a request to continue a model from a checkpoint, or to create a new one from it."""
        if request.model_id is None and request.model_seq_id is None:
            raise UserError("model_id", None, "is required, or model_seq_id of a new model")
        model = request.model_id or f"{self.id}:train:{request.model_seq_id}"

        def work() -> JsonObject:
            policy = self._artifact(request.path)
            if request.model_id:
                with self._changing(model) as resident:
                    resident.load(policy, request.optimizer)
            else:
                self.models[model] = Resident(policy, self._ranks(), optimizer=request.optimizer)
                self.names[model] = request.path
            return {"path": request.path, "model_id": model, "type": "load_weights"}

        if request.model_id is None:
            self.ledger.open(model, 0)
        return self._submit(model, request.seq_id if request.model_id else 0, request, work)

    def forward_backward(self, body: bytes, request: wire.ForwardBackward) -> str:
        """Queue a request for gradients; `body` identifies it."""

        def work() -> messages.Losses:
            model = self._model(request.model_id)
            self._use_tokens(sum(len(datum.tokens) for datum in request.data))
            found = model.forward_backward(
                request.data, request.loss_fn, request.config, request.forward_only
            )
            return messages.Losses(*found)

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
            raise UserError(
                "path", request.path, "a name of letters, digits, dots, dashes and underscores"
            )
        if request.overwrite:
            raise UserError("overwrite", True, "a checkpoint is written once; choose another name")
        path = f"{SCHEME}{request.model_id}/{kind}/{request.path}"

        def work() -> JsonObject:
            url = self._url(path)
            if find_manifest(url) is not None:
                raise UserError("path", request.path, "is taken; choose another name")
            facts: JsonObject = {"session": self.id}
            facts |= {"ttl_seconds": request.ttl_seconds} if request.ttl_seconds else {}
            self._model(request.model_id).save(url, **facts)
            return {"path": path, "type": "save_weights" + "_for_sampler" * (kind != "weights")}

        return self._submit(request.model_id, request.seq_id, request, work)

    def save_weights_for_sampler(self, request: messages.SaveWeights) -> str:
        """Queue a request for weights to sample from: a named checkpoint, or a snapshot; only the newest are kept."""
        if request.path is not None:
            return self.save_weights(request, "sampler_weights")
        if request.kind != "snapshot":
            raise UserError(
                "kind", request.kind, "only snapshots are known here; their weights never change"
            )
        number = request.sampling_session_seq_id

        def work() -> JsonObject:
            sampling = f"{self.id}:sample:{f'u{len(self.samplers)}' if number is None else number}"
            model = self._model(request.model_id)
            name = request.model_id.rpartition(":")[2]
            if self.shared:  # the shared sampler reads weights from the store
                url = f"{self.artifacts}/train-{name}/{UNNAMED}/{os.urandom(8).hex()}"
                self.samplers[sampling] = Snapshot(
                    model.save(url, with_state=False, session=self.id), model.version
                )
            else:
                self.samplers[sampling] = model.snapshot()
            self._unnamed.append(sampling)
            self._drop_snapshots(SNAPSHOTS)
            self.ledger.open(sampling)
            return {
                "sampling_session_id": sampling,
                "path": None,
                "type": "save_weights_for_sampler",
            }

        return self._submit(request.model_id, request.seq_id, request, work)

    def create_sampling(self, request: messages.CreateSampling) -> str:
        """Open a sampling session of a checkpoint, and return its id."""
        sampling = f"{self.id}:sample:{request.sampling_session_seq_id}"
        named = request.model_path or request.base_model
        if not named:
            raise UserError("base_model", None, "is required, or model_path")
        policy = self._artifact(named)
        checkpoint.model_dir(policy)
        self.samplers.setdefault(sampling, Snapshot(policy, VersionFacts.read(policy).version))
        self.ledger.open(sampling)
        return sampling

    def sample(self, request: messages.Sample) -> str:
        """Queue a request for completions. Waiting requests that differ only in their prompts are executed together."""
        for name, value in (request.model_extra or {}).items():
            if value and name not in ("base_model", "model_path"):
                raise UserError(name, value, "is not known here; leave it out")
        params = request.sampling_params
        if params.top_k != -1 or params.top_p != 1:
            value = {"top_k": params.top_k, "top_p": params.top_p}
            raise UserError(
                "sampling_params",
                value,
                "top_k and top_p are not supported here: set top_k -1, top_p 1",
            )
        if isinstance(params.stop, str) or any(isinstance(stop, str) for stop in params.stop or ()):
            raise UserError(
                "sampling_params.stop", params.stop, "must be token ids; text is not supported here"
            )
        if not (ids := request.prompt.read_tokens()):
            raise UserError("prompt", [], "is empty")
        alike = (
            request.sampling_session_id,
            params.max_tokens,
            params.temperature,
            dump_canonical_json(params.stop),
        )
        batch = None if request.prompt_logprobs or params.max_tokens is None else alike
        entry = Entry(_fingerprint(request), self._sample, (request, ids), batch)
        return self.ledger.submit(request.sampling_session_id, request.seq_id, entry)

    def info(self, model: str) -> JsonObject:
        """Return the answer of ``get_info`` for a model."""
        resident = self._model(model)
        base = resident.trainer.base
        local = local_path(base.url)
        facts = base.manifest.facts
        name = self.names[model]
        tokenizer = str(local / base.manifest.root / "model") if local else facts.get("model")
        rank = resident.lora.r if resident.lora else None
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
            "is_lora": rank is not None,
            "lora_rank": rank,
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
        """Execute the requests that `Ledger.take` returned. A failure of one does not affect the others."""
        try:
            results = entries[0].work(list(entries))
        except Exception as error:
            traceback.clear_frames(
                error.__traceback__
            )  # they would keep tensors as long as the result
            if len(entries) == 1 or isinstance(
                error, Retryable
            ):  # each one alone would wait as long
                for entry in entries:
                    self.ledger.finish(entry, error=error)
                return
            for entry in entries:
                self.do([entry])
        else:
            for entry, result in zip(entries, results):
                self.ledger.finish(entry, result)

    def save_models(self) -> Future[Any]:
        """Save models that took steps, before all other requests; then refuse requests, and drop unnamed snapshots."""

        def work(entries: list[Entry]) -> list[None]:
            for name, model in self.models.items():
                try:
                    self._save_drained(name, model)
                except Exception as error:
                    log.error("%s could not be saved (%s: %s)", name, type(error).__name__, error)
            while left := self.ledger.take(0):
                for entry in left:
                    self.ledger.finish(entry, error=Refused(404, NOT_DONE))
            self._drop_snapshots(0)
            return [None] * len(entries)

        self.ledger.put_first([entry := Entry("", work)])
        self._saving.set()
        return entry.future

    def _check_saving(self) -> None:
        if self._saving.is_set():
            raise Refused(404, NOT_DONE)

    def _drop_snapshots(self, kept: int) -> None:
        """Drop unnamed weights except for the `kept` newest."""
        while len(self._unnamed) > kept:
            sampling = self._unnamed.pop(0)
            old = self.samplers[sampling]
            self.samplers[sampling] = None
            if self.shared and old:
                try:
                    Store(old.base.url).delete("")
                except (OSError, Retryable, UserError) as error:
                    log.warning("%s stays in the store: %s", old.base.url, error)

    def _save_drained(self, name: str, model: Resident) -> None:
        """Save a model with unsaved steps as ``weights/drained``, or as the first free name of ``drained-2``, …"""
        if model.version == model.saved:
            log.info("%s took no step since it was opened or saved: nothing to save", name)
            return
        names = itertools.chain([DRAINED], (f"{DRAINED}-{number}" for number in itertools.count(2)))
        paths = (f"{SCHEME}{name}/weights/{each}" for each in names)
        path = next(path for path in paths if find_manifest(self._url(path)) is None)
        model.gradients = False  # no step has used them: the client has to compute them again
        log.info("saved %s (%s)", path, model.save(self._url(path), session=self.id).url)

    def sleep(self) -> None:
        """Leave the device: models in training move to the host's memory, the sampler's model is dropped."""
        self._asleep = list(self.models.values())
        for resident in self._asleep:
            resident.trainer.sleep()
        if self._sampler.cache_info().currsize:
            self._sampler().drop()

    def wake(self) -> None:
        """Undo `sleep`."""
        while self._asleep:
            self._asleep.pop().trainer.wake()

    def _submit(
        self, stream: str, number: int | None, request: Any, work: Callable[[], Any]
    ) -> str:
        return self.ledger.submit(stream, number, Entry(_fingerprint(request), lambda _: [work()]))

    def _sample(self, entries: list[Entry]) -> list[messages.Samples]:
        wanted: list[tuple[messages.Sample, list[int]]] = [entry.request for entry in entries]
        first = wanted[0][0]
        snapshot = self._snapshot(first.sampling_session_id)
        params = first.sampling_params
        context, vocabulary, stops = _read_limits(checkpoint.model_dir(snapshot.base))
        for _, ids in wanted:
            if len(ids) >= context or not 0 <= min(ids) <= max(ids) < vocabulary:
                span = f"{len(ids)} tokens, {min(ids)} to {max(ids)}"
                raise UserError(
                    "prompt", span, f"the model has {vocabulary} tokens and a context of {context}"
                )
        length = min([params.max_tokens or context, *(context - len(ids) for _, ids in wanted)])
        if len(wanted) > 1 and length < (params.max_tokens or 0):
            raise UserError(
                "prompt",
                length,
                "one of several prompts does not fit; they are executed one by one",
            )
        sampling = Sampling(
            params.temperature,
            length,
            stops if params.stop is None else tuple(map(int, params.stop)),
        )
        requests = [
            Request(str(e.number), e.request[1], _seeds(e.request[0], e.number)) for e in entries
        ]
        at_most = length * sum(asked.num_samples for asked, _ in wanted)
        self._use_tokens(sum(len(ids) for _, ids in wanted) + at_most)
        used = 0
        try:
            groups = self._sampler().sample(snapshot, requests, sampling)
            used = sum(len(each.ids) for group in groups for each in group)
        finally:
            self.meter.count("", used - at_most)
        scored = [
            self._sampler().score(snapshot, ids) if a.prompt_logprobs else None for a, ids in wanted
        ]
        made = (
            [{"tokens": c.ids, "logprobs": c.logprobs, "stop_reason": c.finish_reason} for c in g]
            for g in groups
        )
        return [
            messages.Samples(sequences, prompt, snapshot.version)
            for sequences, prompt in zip(made, scored)
        ]

    def _use_tokens(self, more: int) -> None:
        check_quota(
            f"session {self.id!r}", "tokens_per_day", self.meter.count(""), more, self.token_limit
        )
        self.meter.count("", more)

    def _model(self, model: str) -> Resident:
        if model not in self.models:
            remedy = "was not created, or load_state or optim_step lost it, saying why; create one from a checkpoint"
            raise UserError("model_id", model, remedy)
        return self.models[model]

    @contextlib.contextmanager
    def _changing(self, model: str) -> Iterator[Resident]:
        """Yield a model; drop it if the change fails half-way, as it is then neither old nor new."""
        resident = self._model(model)
        try:
            yield resident
        finally:
            if not hasattr(resident, "trainer"):
                del self.models[model]

    def _snapshot(self, sampling: str) -> Snapshot:
        if sampling not in self.samplers:
            raise Refused(404, f"{sampling} is not known here")
        if (snapshot := self.samplers[sampling]) is None:
            remedy = f"its weights were dropped for newer ones ({SNAPSHOTS} are kept); use those, or save with a name"
            raise UserError("sampling_session_id", sampling, remedy)
        return snapshot

    def _artifact(self, named: str) -> Artifact:
        if named.startswith(SCHEME):
            return Artifact(self._url(named))
        path = posixpath.normpath(unquote(urlparse(normalize_url(named)).path))
        theirs = re.search(r"/sessions/([^/]+)/session-[0-9a-f]+(/|@|$)", path)
        if theirs and theirs[1] != self.id.partition(".")[0]:
            raise UserError(
                "path",
                named,
                "belongs to a session of another namespace; have it copied by its owner",
            )
        return Artifact(named)

    def _url(self, path: str) -> str:
        """Return the URL of ``tinker://<model>/<kind>/<name>``, which must be of a session in this namespace."""
        model, _, rest = path.removeprefix(SCHEME).partition("/")
        session, _, kind = model.partition(":")
        namespace, _, name = session.partition(".")
        known = re.fullmatch(rf"(weights|sampler_weights)/{NAME.pattern}", rest) and re.fullmatch(
            r"train:\d+", kind
        )
        if (
            not known
            or not re.fullmatch(r"[a-z0-9-]+", name)
            or namespace != self.id.partition(".")[0]
        ):
            raise UserError(
                "path", path, "no checkpoint of this namespace: tinker://<model>/weights/<name>"
            )
        return f"{self.artifacts.rpartition('/')[0]}/{name}/{kind.replace(':', '-')}/{rest}"


@functools.lru_cache(8)
def _read_limits(directory: Path) -> tuple[int, int, tuple[int, ...]]:
    """Read a model's context, the size of its vocabulary, and its default stop tokens."""
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(directory).get_text_config()
    context = int(getattr(text, "max_position_embeddings", 1 << 30))
    return context, int(text.vocab_size), stop_ids(load_tokenizer(directory), directory)


def _seeds(request: messages.Sample, number: int) -> list[int]:
    """Derive a seed for each completion, from the given seed, or else from the request."""
    given = request.sampling_params.seed
    stream: tuple[int | str, ...] = (
        () if given is not None else (request.sampling_session_id, number)
    )
    return [derive_seed(given or 0, "sample", *stream, i) for i in range(request.num_samples)]


def _fingerprint(request: Any) -> str:
    body = (
        request
        if isinstance(request, bytes)
        else dump_canonical_json(request.model_dump(mode="json")).encode()
    )
    return hashlib.sha256(body).hexdigest()
