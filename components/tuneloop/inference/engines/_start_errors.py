"""Which errors of a vLLM engine that starts are lasting.

They are a package or an architecture that it lacks, and a kernel that refuses the model's shape. A
server that meets one of these ends with exit code 2, as starting it again would meet it again. What
may pass, such as too little memory or a device that is away, is left to be retried.

`inference/engines/_vllm_start.py` asks it of errors of the start, `inference/engines/vllm.py` of
those of the first step. `tests/local/test_architectures.py` has models that vLLM refuses.
"""

import json
import re
from pathlib import Path

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping

PASSING = re.compile(
    r"memory|alloc|CUDA|HIP|NCCL|cuBLAS|cuDNN|device|connect|address|socket|timed? ?out|"
    r"background process|root cause",
    re.IGNORECASE,
)
"""Words of a RuntimeError whose cause may be gone at the next start, or is in another process.

A word that is too common makes a server start again until its attempts are used up, where the
user's mistake should be named; a word that is missing ends a run at a passing fault.
"""
OTHER_ENGINE = "take the engine transformers, or another vLLM"


def explain_start_error(error: Exception, model: Path, args: JsonMapping) -> UserError | None:
    """Explain an error of starting vLLM on a model directory, or of its first step.

    None for an error that may pass.
    """
    if isinstance(error, UserError):
        return error
    reason = " ".join(str(error).split())[:300]
    architecture = _read_architecture(model)
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        remedy = (
            f"needs the package {package} for {architecture}: "
            f"pip install {package}, or {OTHER_ENGINE}"
        )
        return UserError("engine", "vllm", remedy)
    if "architectures" in reason and "not supported" in reason:
        return UserError("engine", "vllm", f"does not have {architecture}; {OTHER_ENGINE}")
    if isinstance(error, OSError | MemoryError) or _may_pass(error, reason):
        return None
    if isinstance(error, TypeError | ValueError) or "validation error" in reason:
        return UserError("--engine-args", dict(args), f"vLLM refuses: {reason}")
    remedy = f"cannot serve {architecture} here ({type(error).__name__}: {reason}); {OTHER_ENGINE}"
    return UserError("engine", "vllm", remedy)


def _may_pass(error: Exception, reason: str) -> bool:
    # torch's OutOfMemoryError is a RuntimeError, too.
    return isinstance(error, RuntimeError) and bool(PASSING.search(reason))


def _read_architecture(model: Path) -> str:
    architectures = json.loads((model / "config.json").read_text()).get("architectures")
    return ", ".join(architectures or ["this model"])
