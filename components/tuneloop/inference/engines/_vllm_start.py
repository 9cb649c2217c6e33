"""Start vLLM's engine in this process, with the arguments that suit the machine.

With ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` the engine core runs in the calling process: it starts ten
times faster than in one of its own, and uses all cores.

`inference/engines/vllm.py` calls it. The tests are `tests/local/test_vllm.py` and
`tests/local/test_architectures.py`.
"""

import json
import os
from pathlib import Path
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.processor import check_processor
from tuneloop.inference.engines._start_errors import explain_start_error

INSTALL = (
    "vLLM is not installed; pip install 'tuneloop[rollout]' (without a GPU: docs/install.md), "
    "or use transformers"
)


def quiet_vllm() -> None:
    """Set vLLM's variables to keep its core in this process and to log errors only.

    Variables that are set already are kept. Call it before vLLM is imported, which reads them:
    `local/warm.py` does before its process imports vLLM.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def start_engine(model: Path, args: JsonMapping, deterministic: bool) -> Any:
    """Start vLLM's ``LLMEngine`` on a model directory, its core in this process.

    Raises:
        UserError: vLLM is not installed, refuses an argument, or can never serve the model here.
    """
    quiet_vllm()
    try:
        from vllm.platforms import current_platform

        # vLLM's batch-invariant kernels need compute capability 9.
        has_kernels = current_platform.is_cuda() and current_platform.has_device_capability(90)
        if deterministic and has_kernels:
            # Some modules read it when they are imported.
            os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")
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

    options: JsonObject = {"disable_log_stats": True, "use_tqdm_on_load": False}
    if current_platform.is_cpu():
        check_processor()
        inspect_here(model)
        options |= _choose_cpu_defaults(model)
    options |= args
    if options.get("enforce_eager"):
        # vLLM would compile parts of its sampler even so, for seconds.
        import torch._dynamo

        torch._dynamo.config.disable = True
    options |= {"skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs"}
    engine_args = EngineArgs(model=str(model), **options)
    # The context only chooses defaults: those of vLLM's own offline class are for throughput.
    config = engine_args.create_engine_config(UsageContext.LLM_CLASS)
    quiet = engine_args.disable_log_stats
    return LLMEngine.from_vllm_config(config, UsageContext.LLM_CLASS, disable_log_stats=quiet)


def describe_kernels() -> JsonObject:
    """Describe what decides the bits of a batch, on the thread that computes it."""
    import torch
    from vllm import envs
    from vllm.platforms import current_platform

    is_gpu = current_platform.is_cuda_alike()
    return {
        "device": torch.cuda.get_device_name()
        if is_gpu
        else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "batch_invariant": envs.VLLM_BATCH_INVARIANT,
    }


def inspect_here(model: Path) -> None:
    """Have vLLM look at a model's class in this process.

    Where no file below ``VLLM_CACHE_ROOT`` describes the class, vLLM would import itself in another
    process (15 s of computing) to leave CUDA uninitialized here, which is needless on a CPU.
    """
    from vllm import ModelRegistry

    for name in json.loads((model / "config.json").read_text()).get("architectures") or ():
        registered = ModelRegistry.models.get(name)
        # Only a class that is not loaded yet has both.
        if hasattr(registered, "load_model_cls") and hasattr(registered, "module_name"):
            ModelRegistry.register_model(name, registered.load_model_cls())


def _choose_cpu_defaults(model: Path) -> JsonObject:
    """Choose the engine arguments for a CPU, which the user's replace."""
    import torch
    from vllm.engine.arg_utils import EngineArgs

    # bfloat16 without instructions for it was measured at less than half of float32's speed.
    capabilities = torch.cpu.get_capabilities()
    has_bfloat16 = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    defaults: JsonObject = {
        # Compiling takes longer than a small loop.
        "enforce_eager": True,
        # A prompt cut into chunks ends vLLM 0.32 on a CPU if its request has a seed ("CPU Generator
        # does not use offset").
        "enable_chunked_prefill": False,
        "dtype": "auto" if has_bfloat16 else "float32",
    }
    config = EngineArgs(model=str(model), skip_tokenizer_init=True).create_model_config()
    if config.has_inner_state:
        # Layers with a recurrent state share a prefix only between chunks.
        defaults["enable_prefix_caching"] = False
    if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        # vLLM's default would take most of the memory. `argo/memory_estimate.py: CPU_POOL` is the
        # same number: a pod's memory is estimated with it.
        defaults["kv_cache_memory_bytes"] = 1 << 30
    return defaults
