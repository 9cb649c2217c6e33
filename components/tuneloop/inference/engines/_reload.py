"""Change the weights of a vLLM engine that runs, in place."""

from pathlib import Path
from typing import Any


def reload_weights(engine: Any, model: Path) -> None:
    """Change a running vLLM engine to the weights below `model`, in place, between two of its steps.

    vLLM's own reload leaves the prefix cache, which holds keys and values of the old weights: it is dropped, and
    requests that run are computed again from their tokens.
    """
    engine.collective_rpc(_reload, args=(str(model),))
    reset_prefix_cache(engine)


def reset_prefix_cache(engine: Any) -> None:
    """Drop all cached keys and values; requests that run compute theirs again."""
    if not engine.reset_prefix_cache(reset_running_requests=True):
        raise RuntimeError("vLLM did not drop its prefix cache")


def _reload(worker: Any, model: str) -> None:
    """Reload in vLLM's worker, and do what that leaves undone on a CPU, where layers multiply by packed weights."""
    for module in worker.get_model().modules():
        # The reload puts experts unpacked where the kernel wants them packed, wherever it finds a kernel made.
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if hasattr(getattr(kernel, "fused_experts", None), "isa"):
            module.quant_method.moe_kernel = None
    worker.reload_weights(weights_path=model)
    _repack_head(worker)


def _repack_head(worker: Any) -> None:
    """Renew the packed copy that an output head tied to the embedding multiplies by: vLLM's reload passes it over."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in worker.get_model().modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
