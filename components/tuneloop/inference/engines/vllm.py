"""vLLM, in process or behind the URL of a `tuneloop.inference.server`.

vllm is imported only when weights are loaded here; a server's client does not need it.

With the argument ``deterministic``, completions are a function of the weights, the sampling and the
requests of one call, provided that the conditions in docs/training.md are equal. These requests
make one batch, in their order, which shares no step and no prefix cache with another call. vLLM
uses batch-invariant kernels where they exist.

A stage calls `generate` and `score` in its own process. A server drives the same class step by step
from one thread (`inference/engine_loop.py`). The two uses are never mixed in one process. The tests
are `tests/local/test_vllm.py`, `tests/unit/inference/test_options.py`, and
`tests/unit/sharing/test_snapshot.py` for ``snapshot``.
"""

import ast
import difflib
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.formats.facts import VersionFacts
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.inference.capabilities import Capabilities
from tuneloop.inference.engines import Done, Engine, EngineReport, Sampling, TensorProof
from tuneloop.inference.engines._readback import read_back, reload_weights, reset_prefix_cache
from tuneloop.inference.engines._start_errors import explain_start_error
from tuneloop.inference.engines._tensors import Readback, digest_model
from tuneloop.inference.engines._vllm_start import INSTALL, describe_kernels, start_engine
from tuneloop.inference.served import PROBE, Answer, ServedEngine, Tokens, open_client
from tuneloop.sharing.snapshot import check_snapshots, resume_processes, suspend_process

CAPABILITIES = Capabilities(serves=True)
DETERMINISTIC = "deterministic"
SNAPSHOT = "snapshot"
ADDED_ARGS = (DETERMINISTIC, SNAPSHOT)
"""The engine arguments that are tuneloop's own, and true or false.

The section `engine` sets them (`config/engines.py: VllmEngine`), and `argo/memory_estimate.py`
reads ``snapshot``. They are not given to vLLM.
"""
RESERVED_ARGS = (
    "model",
    "tokenizer",
    "skip_tokenizer_init",
    "logprobs_mode",
    "seed",
    "load_format",
)
"""Engine arguments that tuneloop sets.

With other values a rollout would not be what its manifest says.
"""
VOLATILE = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")
"""Fields of a model's configuration that may differ between versions of one policy.

`Vllm.change` refuses a policy that differs in any other. So a field that a newer transformers
writes, or that the trainer changes, ends a run at the first version that has it, unless it is here.
"""


def open_engine(endpoint: str | None, args: JsonMapping, timeout_s: float) -> Engine:
    """Open a client of servers, else an engine in this process.

    Args:
        endpoint: URLs of servers, separated by commas; None: sample in this process.
        args: vLLM's ``EngineArgs`` by name, and `ADDED_ARGS`. A server has its own and is not sent these,
            but its `Client` heeds ``enable_sleep_mode`` and `ADDED_ARGS`.
        timeout_s: seconds without a byte after which a server counts as dead.

    Raises:
        UserError: an argument that tuneloop sets; several servers and ``deterministic``.
    """
    if not endpoint:
        return Vllm(args)
    return open_client(
        endpoint,
        timeout_s,
        sleeps=bool(args.get("enable_sleep_mode") or args.get(SNAPSHOT)),
        deterministic=bool(args.get(DETERMINISTIC)),
    )


def open_served_engine(args: JsonMapping) -> ServedEngine:
    """Open what a server computes with. Raises UserError: an argument that tuneloop sets."""
    return Vllm(args)


def check_engine_args(args: JsonMapping, prefix: str = "--engine-args ") -> None:
    """Refuse arguments that tuneloop sets itself.

    Raises:
        UserError: there is one; the field is `prefix` and the argument's name.
    """
    for name in args.keys() & set(RESERVED_ARGS):
        raise UserError(f"{prefix}{name}", args[name], "is set by tuneloop; leave it out")
    for name in ADDED_ARGS:
        value = args.get(name, False)
        if not isinstance(value, bool):
            raise UserError(f"{prefix}{name}", value, "must be true or false")


def check_here(args: JsonMapping, prefix: str) -> None:
    """Refuse arguments that the installed vLLM does not have: options differ by its release.

    Its source is read, as importing it takes seconds.

    Raises:
        UserError: vLLM is not installed, or lacks an option.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        raise UserError("engine.kind", "vllm", INSTALL)
    if not args or spec.origin is None:
        return
    source = (Path(spec.origin).with_name("engine") / "arg_utils.py").read_bytes()
    options: list[str] = []
    for definition in ast.parse(source).body:
        if not isinstance(definition, ast.ClassDef) or definition.name != "EngineArgs":
            continue
        # Its fields are the options.
        for statement in definition.body:
            if isinstance(statement, ast.AnnAssign):
                options.append(ast.unparse(statement.target))
    for name in args.keys() - set(options) - set(ADDED_ARGS):
        near = difflib.get_close_matches(name, options, n=1)
        remedy = f"did you mean {near[0]}?" if near else "see its EngineArgs"
        raise UserError(f"{prefix}{name}", args[name], f"vLLM has no such option; {remedy}")


class Vllm:
    """`Engine` and `ServedEngine` over vLLM's engine in this process.

    `generate` and `score` are for one caller; a server drives `begin_batch`, `submit`, `step` and
    `abort` from the thread that owns the engine.

    Attributes:
        determinism: of a deterministic engine with weights, what decides the bits: ``device``,
            ``threads``, ``batch_invariant``.
        dtype: of the weights, such as ``bfloat16``.
        files: the model directory that was loaded last.
        suspended: ids of the processes of an engine with ``snapshot`` that is asleep, in which
            calls of CUDA wait.
        tensor_proof: what a server found when it read back the tensors after the last change.
    """

    name = "vllm"

    def __init__(self, args: JsonMapping) -> None:
        check_engine_args(args)
        self.args = {name: value for name, value in args.items() if name not in ADDED_ARGS}
        self.deterministic = bool(args.get(DETERMINISTIC))
        self.snapshot = bool(args.get(SNAPSHOT))
        if self.snapshot:
            ways = ("tensor_parallel_size", "pipeline_parallel_size")
            several = any(args.get(way, 1) != 1 for way in ways)
            check_snapshots(f"--engine-args {SNAPSHOT}", several)
        self.sleeps = not self.snapshot or bool(args.get("enable_sleep_mode"))
        self.suspended: list[int] = []
        self.determinism: JsonObject = {}
        self.engine: Any = None
        self.context = 0
        self.version = -1
        self.digest = ""
        self.dtype = ""
        self.files: Path | None = None
        self.tensor_proof: TensorProof | None = None
        # Names of tensors that vLLM keeps in a form of its own.
        self._opaque: frozenset[str] = frozenset()
        # Of requests that ran during a change: the version that made each token so far.
        self._versions: dict[str, list[int]] = {}
        # Of requests that are streamed: all tokens so far.
        self._streamed: dict[str, Tokens] = {}

    @property
    def is_suspended(self) -> bool:
        """Whether its processes are stopped while it sleeps."""
        return bool(self.suspended)

    def load(self, policy: Artifact, *, force: bool = False) -> None:
        """Serve `policy`. Raises as `change`."""
        version = VersionFacts.read(policy).version
        digest = policy.manifest.digest
        if force or (self.version, self.digest) != (version, digest):
            self.change(policy.part("model"), version, digest)

    def change(self, model: Path, version: int, digest: str) -> None:
        """Start on the weights in a model directory, or change to them in place.

        Running requests go on with the new weights: their cached keys and values are computed
        again, and their completions say which version made which token.

        Raises:
            UserError: vLLM is absent, refuses an argument, or runs a model of another shape.
        """
        config: JsonObject = json.loads((model / "config.json").read_text())
        shape = {key: value for key, value in config.items() if key not in VOLATILE}
        if self.engine is None:
            self._start(model)
            self.shape = shape
        elif shape != self.shape:
            remedy = "is a model of another shape; start another engine for it"
            raise UserError("policy", str(model), remedy)
        else:
            self._note_versions()
            # Neither version is served during the change.
            self.version = -1
            self.digest = ""
            reload_weights(self.engine, model)
        self.files = model
        self.tensor_proof = None
        self.version = version
        self.digest = digest

    def _start(self, model: Path) -> None:
        self.engine = start_engine(model, self.args, self.deterministic)
        self._try_first_step(model)
        self.determinism = describe_kernels() if self.deterministic else {}
        self.context = self.engine.model_config.max_model_len
        self.dtype = str(self.engine.model_config.dtype).removeprefix("torch.")
        # What differs right after vLLM's own first load of these files, it keeps in another form.
        self._opaque = frozenset(read_back(self.engine, model, PROBE).different)

    def _note_versions(self) -> None:
        """Note that the current version made the newest tokens of all running requests."""
        # vLLM has no public way to ask how many tokens a running request has.
        for state in self.engine.output_processor.request_states.values():
            versions = self._versions.setdefault(state.external_req_id, [])
            newest = state.detokenizer.num_output_tokens() - len(versions)
            versions += [self.version] * newest

    def _try_first_step(self, model: Path) -> None:
        """Compute two tokens, since some kernels refuse a model only then.

        Raises:
            UserError: the engine can never serve the model here.
        """
        try:
            self.begin_batch()
            self.submit("first-step", [0, 1, 2], 0, Sampling(1.0, 2, ()))
            while not list(self.step()):
                pass
        except Exception as error:
            self.engine = None
            lasting = explain_start_error(error, model, self.args)
            if lasting is None:
                raise
            raise lasting from error

    def compare_files(self, model: Path, every: int = PROBE) -> Readback:
        """Compare the tensors that vLLM holds with those below `model`.

        Of a layer that is packed for a CPU, one column in `every` is read. A tensor that vLLM keeps
        in another form (transposed, quantized, reordered) counts as unread.
        """
        return read_back(self.engine, model, every).without(self._opaque)

    def read_back(self, policy: Artifact) -> TensorProof:
        """Compare the tensors that vLLM holds with those of a checkpoint."""
        model = policy.part("model")
        return self.summarize(self.compare_files(model), digest_model(model))

    def summarize(self, comparison: Readback, digest: str) -> TensorProof:
        """Add the digest of the files that were compared, and the dtype of the engine."""
        return comparison.summarize(digest, self.dtype)

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        done: Done,
    ) -> list[list[Completion]]:
        keys: list[list[str]] = []
        for index, request in enumerate(requests):
            keys.append([f"{index}-{sample}" for sample in range(len(request.seeds))])
        completions: dict[str, Completion] = {}
        missing = [len(group) for group in keys]
        self.begin_batch()
        try:
            for request, group in zip(requests, keys):
                for key, seed in zip(group, request.seeds):
                    self.submit(key, request.prompt_ids, seed, sampling)
            while any(missing):
                for key, completion in self.step():
                    assert isinstance(completion, Completion)
                    if completion.finish_reason == "abort":
                        raise Retryable("vLLM has given up a request; see its log")
                    completions[key] = completion
                    index = int(key.partition("-")[0])
                    missing[index] -= 1
                done(missing.count(0))
        finally:
            # `done` raises an error if the stage is to stop.
            self.abort([key for group in keys for key in group if key not in completions])
        return [[completions[key] for key in group] for group in keys]

    def score(self, ids: Sequence[int]) -> list[float]:
        self.begin_batch()
        self.submit("score", ids, 0, Sampling(0.0, 1, ()), prompt_logprobs=True)
        while True:
            for _, completion in self.step():
                assert isinstance(completion, Completion)
                return completion.prompt_logprobs or []

    def report(self) -> EngineReport:
        return EngineReport(determinism=self.determinism)

    def close(self) -> None:
        """End the engine, and vLLM's state of this process with it.

        Other engines in the process end, too.
        """
        if self.engine is not None:
            # vLLM's public engine has no method that ends it.
            self.engine.engine_core.shutdown()
        self.engine = None
        self.files = None
        self.poison()

    def flush(self) -> None:
        """Drop all cached keys and values; a deterministic engine does so before each batch."""
        if self.engine is not None and not self.deterministic:
            reset_prefix_cache(self.engine)

    def begin_batch(self) -> None:
        """If deterministic, drop the prefix cache, so that no earlier request matters.

        No request may be running.
        """
        if self.deterministic:
            reset_prefix_cache(self.engine)

    def poison(self) -> None:
        """Serve nothing until the next change succeeds."""
        self.version = -1
        self.digest = ""
        self.tensor_proof = None

    def sleep(self, level: int) -> None:
        """Release the device's memory; no request may be running.

        Level 1 keeps weights on the host, 2 drops them; ``snapshot`` keeps the rest.

        Raises:
            SnapshotFailed: the process can serve no more.
            UserError: device or engine do not support it.
        """
        if self.sleeps and not self.suspended:
            remedy = (
                "vLLM's sleep mode gives back memory of CUDA and ROCm devices only; "
                "stop the server instead"
            )
            _check_sleep_mode("sleep", remedy)
            if not self.engine.model_config.enable_sleep_mode:
                remedy = "start the engine with --engine-args '{\"enable_sleep_mode\": true}'"
                raise UserError("sleep", level, remedy)
            self.engine.sleep(level)
            if level > 1:
                self.poison()
        if self.snapshot:
            self.suspended = self.suspended or suspend_process(os.getpid())

    def wake_up(self) -> None:
        """Undo `sleep`. After level 2 weights have to be loaded again. Raises as `sleep`."""
        resume_processes(self.suspended)
        self.suspended = []
        if self.sleeps:
            _check_sleep_mode("wake_up", "this device has no sleep mode")
            self.engine.wake_up()

    def submit(
        self,
        key: str,
        prompt_ids: Sequence[int],
        seed: int,
        sampling: Sampling,
        *,
        prompt_logprobs: bool = False,
        stream: bool = False,
    ) -> None:
        """Queue one completion, as `ServedEngine.submit` describes.

        A prompt is scored from the weights, never from the prefix cache.
        """
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            # Stop tokens are given above, not by a file beside the weights.
            ignore_eos=True,
            seed=seed,
            logprobs=0,
            prompt_logprobs=0 if prompt_logprobs else None,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        )
        # vLLM would crash on an id that has no embedding.
        vocabulary = self.engine.model_config.get_vocab_size()
        if not prompt_ids or min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary:
            raise ValueError(f"prompt ids must be at least one, from 0 to {vocabulary - 1}")
        try:
            (prompt,) = self.engine.renderer.render_cmpl([{"prompt_token_ids": list(prompt_ids)}])
            self.engine.add_request(key, prompt, params)
        except VLLMClientError as error:
            raise ValueError(str(error)) from error
        if stream:
            self._streamed[key] = Tokens([], [], self.version)

    def count_requests(self) -> tuple[int, int]:
        """Count the running and the queued requests; any thread may call this."""
        # The engine's thread may set it to None meanwhile.
        engine = self.engine
        if engine is None or engine.engine_core.engine_core is None:
            return 0, 0
        running, waiting = engine.engine_core.engine_core.scheduler.get_request_counts()
        return running, waiting

    def step(self) -> Iterator[tuple[str, Answer]]:
        """Run one forward pass over the queued requests.

        Yields:
            The names and answers of those that finished, or stream new tokens.
        """
        for output in self.engine.step():
            key = output.request_id
            sample = output.outputs[0]
            logprobs = [float(logprob) for logprob in sample.logprobs.logprobs]
            tokens = Tokens(list(sample.token_ids), logprobs, self.version)
            if key in self._streamed:
                yield key, tokens
                # vLLM gives only the newest tokens of a request that is streamed.
                streamed = self._streamed[key]
                streamed.ids.extend(tokens.ids)
                streamed.logprobs.extend(tokens.logprobs)
                tokens = streamed
            if output.finished:
                yield key, self._complete(key, output, tokens)

    def abort(self, keys: Sequence[str]) -> None:
        """Drop the requests queued under these names; unknown names are ignored."""
        if keys and self.engine is not None:
            self.engine.abort_request(list(keys))
        for key in keys:
            self._forget(key)

    def _complete(self, key: str, output: Any, tokens: Tokens) -> Completion:
        """Make the completion of a request that has ended."""
        # The tokens since the last change are of the current version.
        versions = self._versions.get(key, [])
        versions = versions + [self.version] * (len(tokens.ids) - len(versions))
        # A request that vLLM gives up may have no token.
        start_version = versions[0] if versions else self.version
        reason = output.outputs[0].finish_reason
        prompt_logprobs = None
        if output.prompt_logprobs is not None:
            prompt_logprobs = [float(logprob) for logprob in output.prompt_logprobs.logprobs]
        self._forget(key)
        return Completion(
            ids=tokens.ids,
            logprobs=tokens.logprobs,
            finish_reason=reason if reason in ("stop", "length") else "abort",
            start_version=start_version,
            end_version=self.version,
            versions=[] if start_version == self.version else versions,
            prompt_logprobs=prompt_logprobs,
        )

    def _forget(self, key: str) -> None:
        self._versions.pop(key, None)
        self._streamed.pop(key, None)


def _check_sleep_mode(action: str, remedy: str) -> None:
    """Check that this kind of device has vLLM's sleep mode. Raises UserError where it has not."""
    from vllm.platforms import current_platform

    if not current_platform.is_sleep_mode_available():
        raise UserError(action, current_platform.device_type, remedy)
