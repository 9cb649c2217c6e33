"""vLLM, in process or behind the URL of a `tuneloop.inference.server`.

In process, the engine core runs in the calling process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``): it starts ten times
faster and uses all cores. vllm is imported only when weights are loaded here; a server's client does not need it.

With the argument ``deterministic``, completions are a function of the weights, the sampling and the requests of one
call, provided that the conditions in docs/training.md are equal. These requests make one batch, in their order, which
shares no step and no prefix cache with another call. vLLM uses batch-invariant kernels where they exist.
"""

import ast
import difflib
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.processor import check_processor
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.inference.capabilities import Capabilities
from tuneloop.inference.engines import Done, Engine, Sampling, TensorProof
from tuneloop.inference.engines._client import Client
from tuneloop.inference.engines._readback import read_back, reload_weights, reset_prefix_cache
from tuneloop.inference.engines._replicas import Replicas
from tuneloop.inference.engines._start_errors import explain_start_error
from tuneloop.inference.engines._tensors import Readback, digest_model
from tuneloop.sharing.snapshot import check_snapshots, resume_processes, suspend_process

CAPABILITIES = Capabilities(serves=True, pulls=True, sleeps=True, deterministic=True, replicas=True)
DETERMINISTIC, SNAPSHOT = OWN = "deterministic", "snapshot"
"""The engine arguments that are tuneloop's own."""
OURS = ("model", "tokenizer", "skip_tokenizer_init", "logprobs_mode", "seed", "load_format")
"""Engine arguments that tuneloop sets: with other values a rollout would not be what its manifest says."""
VOLATILE = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")
"""Fields of a model's configuration that may differ between versions of one policy."""
PROBE = 16
"""After each change, one column in so many is read back from the layers that are packed."""
INSTALL = "vLLM is not installed; pip install 'tuneloop[rollout]' (without a GPU: docs/install.md), or use transformers"


@dataclass(frozen=True)
class Tokens:
    """The newest tokens of a request that is streamed, and the version that made them."""

    ids: list[int]
    logprobs: list[float]
    version: int


Answer = Completion | Tokens
"""What a step yields for a request: its completion at the end; before that, if it is streamed, its new tokens."""


def open_engine(endpoint: str | None, args: JsonMapping, timeout_s: float) -> Engine:
    """Open a client of the servers at `endpoint` (URLs separated by commas), else an engine in this process. `args` are
    vLLM's ``EngineArgs`` by name, and `OWN`: a server has its own and is not sent these, but its `Client` heeds
    ``enable_sleep_mode``, `OWN` and `timeout_s`. Raises UserError: ours, or several servers if ``deterministic``."""
    sleeps = any(map(args.get, ("enable_sleep_mode", SNAPSHOT)))
    deterministic = bool(args.get(DETERMINISTIC))
    if endpoint and "," in endpoint:
        if deterministic:
            remedy = "several servers divide a batch by which of them are up: deterministic needs a single one"
            raise UserError("--endpoint", endpoint, remedy)
        return Replicas([Client(url.strip(), timeout_s) for url in endpoint.split(",")])
    return (
        Client(endpoint, timeout_s, sleeps=sleeps, deterministic=deterministic)
        if endpoint
        else Vllm(args)
    )


def check_engine_args(args: JsonMapping, prefix: str = "--engine-args ") -> None:
    """Refuse what tuneloop sets itself. Raises UserError: with `prefix` and the argument's name as the field."""
    for name in args.keys() & set(OURS):
        raise UserError(f"{prefix}{name}", args[name], "is set by tuneloop; leave it out")
    for name in OWN:
        if not isinstance(value := args.get(name, False), bool):
            raise UserError(f"{prefix}{name}", value, "must be true or false")


def check_here(args: JsonMapping, prefix: str) -> None:
    """Raise as `check_engine_args` for arguments not in the installed vLLM's source, as importing it takes seconds."""
    spec = importlib.util.find_spec("vllm")
    if not args or spec is None or spec.origin is None:
        return
    path = Path(spec.origin).with_name("engine") / "arg_utils.py"
    classes = [
        n
        for n in ast.parse(path.read_bytes()).body
        if isinstance(n, ast.ClassDef) and n.name == "EngineArgs"
    ]
    known = [
        ast.unparse(n.target) for each in classes for n in each.body if isinstance(n, ast.AnnAssign)
    ]
    for name in args.keys() - {*known, *OWN}:
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"did you mean {near[0]}?" if near else "see its EngineArgs"
        raise UserError(f"{prefix}{name}", args[name], f"vLLM has no such option; {remedy}")


class Vllm:
    """`Engine` over vLLM's engine in this process. `generate` and `score` are for one caller; a server drives
    `begin_batch`, `submit`, `step` and `abort` from the thread that owns the engine. `determinism`: of a deterministic
    engine with weights, what decides the bits: ``device``, ``threads``, ``batch_invariant``. `suspended`: processes of
    an engine with ``snapshot`` that is asleep, in which calls of CUDA wait. `files`: the model directory that was
    loaded last. `tensor_proof`: what a server found when it read back the tensors after that."""

    name = "vllm"

    def __init__(self, args: JsonMapping) -> None:
        check_engine_args(args)
        self.args = {name: value for name, value in args.items() if name not in OWN}
        self.deterministic, self.snapshot = (bool(args.get(name)) for name in OWN)
        if self.snapshot:
            several = any(
                args.get(f"{way}_parallel_size", 1) != 1 for way in ("tensor", "pipeline")
            )
            check_snapshots(f"--engine-args {SNAPSHOT}", several)
        self.sleeps = not self.snapshot or bool(args.get("enable_sleep_mode"))
        self.suspended = list[int]()
        self.determinism: JsonObject = {}
        self.engine: Any = None
        self.context = 0
        self.version = -1
        self.digest = ""
        self.dtype = ""
        self.files: Path | None = None
        self.tensor_proof: TensorProof | None = None
        self._opaque: frozenset[str] = frozenset()
        self._spans: dict[str, list[int]] = {}
        self._streamed: dict[str, Tokens] = {}

    def load(self, policy: Artifact, *, force: bool = False) -> None:
        """Serve `policy`. Raises UserError: vLLM is absent or refuses an argument, or runs another architecture."""
        wanted = policy.manifest.facts["version"], policy.manifest.digest
        if (self.version, self.digest) != wanted or force:
            self.change(policy.part("model"), *wanted)

    def change(self, model: Path, version: int, digest: str) -> None:
        """Start on, or change in place to, the weights in a model directory. Raises UserError: a model of another
        shape. Running requests go on with the new weights: their cached keys and values are computed again, and their
        completions say which version made which token."""
        config: JsonObject = json.loads((model / "config.json").read_text())
        shape = {key: value for key, value in config.items() if key not in VOLATILE}
        if self.engine is None:
            self.engine = _start(model, self.args, self.deterministic)
            self._try_first_step(model)
            self.determinism = _describe_kernels() if self.deterministic else {}
            self.shape, self.context = shape, self.engine.model_config.max_model_len
            self.dtype = str(self.engine.model_config.dtype).removeprefix("torch.")
            # What differs right after vLLM's own first load of these files, it keeps in another form.
            self._opaque = frozenset(read_back(self.engine, model, PROBE).different)
        elif shape != self.shape:
            raise UserError(
                "policy", str(model), "is a model of another shape; start another engine for it"
            )
        else:
            # neither version is served during the change
            before = self.version
            self.version = -1
            self.digest = ""
            for state in self.engine.output_processor.request_states.values():
                spans = self._spans.setdefault(
                    state.external_req_id, []
                )  # the version that made each token
                spans += [before] * (state.detokenizer.num_output_tokens() - len(spans))
            reload_weights(self.engine, model)
        self.files = model
        self.tensor_proof = None
        self.version = version
        self.digest = digest

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

    def _try_first_step(self, model: Path) -> None:
        """Compute two tokens, since some kernels refuse a model only then. Raises UserError: it will never do."""
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

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, done: Done
    ) -> list[list[Completion]]:
        keys = [[f"{i}-{j}" for j in range(len(r.seeds))] for i, r in enumerate(requests)]
        completions: dict[str, Completion] = {}
        left = [len(names) for names in keys]
        self.begin_batch()
        try:
            for request, names in zip(requests, keys):
                for key, seed in zip(names, request.seeds):
                    self.submit(key, request.prompt_ids, seed, sampling)
            while len(completions) < sum(map(len, keys)):
                for key, completion in self.step():
                    completions[key] = cast(Completion, completion)
                    left[int(key.partition("-")[0])] -= 1
                done(left.count(0))
        finally:
            self.abort([key for names in keys for key in names if key not in completions])
        return [[completions[key] for key in names] for names in keys]

    def score(self, ids: Sequence[int]) -> list[float]:
        self.begin_batch()
        self.submit("score", ids, 0, Sampling(0.0, 1, ()), prompt_logprobs=True)
        while not (finished := list(self.step())):
            pass
        return cast(Completion, finished[0][1]).prompt_logprobs or []

    def close(self) -> None:
        """End the engine, and vLLM's state of this process with it: other engines in the process end, too."""
        if self.engine is not None:
            self.engine.engine_core.shutdown()
        self.engine = None
        self.version = -1
        self.digest = ""
        self.files = self.tensor_proof = None

    def flush(self) -> None:
        """Drop all cached keys and values; does nothing in a deterministic engine, which does so before each batch."""
        if self.engine is not None and not self.deterministic:
            reset_prefix_cache(self.engine)

    def begin_batch(self) -> None:
        """If deterministic, drop the prefix cache, so that no earlier request matters; nothing may be running."""
        if self.deterministic:
            reset_prefix_cache(self.engine)

    def poison(self) -> None:
        """Serve nothing until the next change succeeds."""
        self.version = -1
        self.digest = ""
        self.tensor_proof = None

    def sleep(self, level: int) -> None:
        """Release the device's memory; no request may be running. Level 1 keeps weights on the host, 2 drops them;
        ``snapshot`` keeps the rest. Raises SnapshotFailed; UserError if device or engine do not support it."""
        if self.sleeps and not self.suspended:
            from vllm.platforms import current_platform

            if not current_platform.is_sleep_mode_available():
                remedy = "vLLM's sleep mode gives back memory of CUDA and ROCm devices only; stop the server instead"
                raise UserError("sleep", current_platform.device_type, remedy)
            if not self.engine.model_config.enable_sleep_mode:
                raise UserError(
                    "sleep",
                    level,
                    "start the engine with --engine-args '{\"enable_sleep_mode\": true}'",
                )
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
            from vllm.platforms import current_platform

            if not current_platform.is_sleep_mode_available():
                raise UserError(
                    "wake_up", current_platform.device_type, "this device has no sleep mode"
                )
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
        """Queue one completion under the caller's name `key`. `prompt_logprobs`: score the prompt, too, from the
        weights and never from the prefix cache. `stream`: yield tokens as they are made. Raises ValueError: vLLM
        refuses it (too long), the prompt is empty, or an id is not in the vocabulary."""
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # stop tokens are given above, not by a file beside the weights
            seed=seed,
            logprobs=0,
            prompt_logprobs=0 if prompt_logprobs else None,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
        )
        vocabulary = self.engine.model_config.get_vocab_size()
        if (
            not prompt_ids or min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary
        ):  # vLLM would crash on it
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
        core = self.engine and self.engine.engine_core.engine_core
        running, waiting = core.scheduler.get_request_counts() if core else (0, 0)
        return running, waiting

    def step(self) -> Iterator[tuple[str, Answer]]:
        """Run one forward pass over the queued requests; yield the names and answers of finished or streamed ones."""
        for out in self.engine.step():
            key = out.request_id
            output = out.outputs[0]
            new = Tokens(
                list(output.token_ids), list(map(float, output.logprobs.logprobs)), self.version
            )
            if key in self._streamed:
                whole = self._streamed[key]
                whole.ids.extend(new.ids)
                whole.logprobs.extend(new.logprobs)
                yield key, new
                new = whole
            if out.finished:
                yield key, self._completion(key, out, new)

    def abort(self, keys: Sequence[str]) -> None:
        """Drop the requests queued under these names; unknown names are ignored."""
        if keys and self.engine is not None:
            self.engine.abort_request(list(keys))
        for key in keys:
            self._forget(key)

    def _completion(self, key: str, out: Any, tokens: Tokens) -> Completion:
        versions = self._spans.get(key, [])
        versions = [*versions, *[self.version] * (len(tokens.ids) - len(versions))]
        scored = (
            None if out.prompt_logprobs is None else list(map(float, out.prompt_logprobs.logprobs))
        )
        self._forget(key)
        end: Any = out.outputs[0].finish_reason or "abort"
        mixed = versions if versions[0] != versions[-1] else []
        return Completion(
            tokens.ids, tokens.logprobs, end, versions[0], versions[-1], mixed, scored
        )

    def _forget(self, key: str) -> None:
        self._spans.pop(key, None)
        self._streamed.pop(key, None)


def quiet_vllm() -> None:
    """Before vLLM is imported, set its variables to keep its core here and log errors only; set ones are kept."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def _start(model: Path, args: JsonMapping, deterministic: bool) -> Any:
    """Start a vLLM engine on `model`, its core in this process."""
    quiet_vllm()
    try:
        from vllm.platforms import current_platform

        if (
            deterministic
            and current_platform.is_cuda()
            and current_platform.has_device_capability(90)
        ):
            os.environ.setdefault(
                "VLLM_BATCH_INVARIANT", "1"
            )  # some modules read it when they are imported
        import vllm.v1.engine.llm_engine  # noqa: F401
    except ImportError as error:
        raise UserError("engine", "vllm", f"{INSTALL} ({error})") from error
    try:
        return _create_engine(model, args)
    except Exception as error:
        lasting = explain_start_error(error, model, args)
        if lasting is None:
            raise
        raise lasting from error


def _create_engine(model: Path, args: JsonMapping) -> Any:
    """Create vLLM's engine on `model`. Raises whatever vLLM and its model classes raise."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    if current_platform.is_cpu():
        check_processor()
        inspect_here(model)
        args = {**_cpu_defaults(model), **args}
    if args.get("enforce_eager"):  # vLLM would compile parts of its sampler even so, for seconds
        import torch._dynamo

        torch._dynamo.config.disable = True
    fixed = {"skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs"}
    given = {"disable_log_stats": True, "use_tqdm_on_load": False, **args, **fixed}
    # The context only chooses defaults: those of vLLM's own offline class, which are for throughput.
    engine_args = EngineArgs(model=str(model), **given)
    config = engine_args.create_engine_config(UsageContext.LLM_CLASS)
    quiet = engine_args.disable_log_stats
    return LLMEngine.from_vllm_config(config, UsageContext.LLM_CLASS, disable_log_stats=quiet)


def _describe_kernels() -> JsonObject:
    """Describe what decides the bits of a batch, on the thread that computes it."""
    import torch
    from vllm import envs
    from vllm.platforms import current_platform

    cuda = current_platform.is_cuda_alike()
    device = torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "batch_invariant": envs.VLLM_BATCH_INVARIANT,
    }


def inspect_here(model: Path) -> None:
    """Have vLLM look at a model's class in this process. Else, where no file below ``VLLM_CACHE_ROOT`` describes it,
    vLLM imports itself in another process (15 s of computing) to leave CUDA uninitialized here: needless on a CPU."""
    from vllm import ModelRegistry

    for name in json.loads((model / "config.json").read_text()).get("architectures") or ():
        known = ModelRegistry.models.get(name)
        if hasattr(known, "load_model_cls") and hasattr(known, "module_name"):  # not loaded yet
            ModelRegistry.register_model(name, known.load_model_cls())


def _cpu_defaults(model: Path) -> JsonObject:
    """Return engine arguments for a CPU. vLLM's default cache would take most of the memory, compiling takes longer
    than a small loop, and bfloat16 without instructions for it was measured at less than half of float32's speed. A
    prompt cut into chunks ends vLLM 0.32 on a CPU if its request has a seed ("CPU Generator does not use offset").
    Layers with a recurrent state share a prefix only between chunks, so that such a model has no prefix cache."""
    import torch
    from vllm.engine.arg_utils import EngineArgs

    native = {"avx512_bf16", "amx_bf16", "bf16"} & {
        k for k, has in torch.cpu.get_capabilities().items() if has
    }
    space = {} if os.environ.get("VLLM_CPU_KVCACHE_SPACE") else {"kv_cache_memory_bytes": 1 << 30}
    chosen = {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "dtype": "auto" if native else "float32",
    }
    if EngineArgs(model=str(model), skip_tokenizer_init=True).create_model_config().has_inner_state:
        chosen["enable_prefix_caching"] = False
    return {**chosen, **space}
