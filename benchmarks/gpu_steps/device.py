"""The machine: its packages, and the ceilings that rates are compared with."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import subprocess

from benchmarks.gpu_steps.records import Step, find_device, measure_seconds

PACKAGES = ("torch", "triton", "transformers", "trl", "vllm", "flash-attn", "liger-kernel")


def describe_machine(step: Step) -> None:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    device = "cpu"
    if find_device() == "cuda":
        device = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    step.record(device=device, python=platform.python_version(), versions=versions)


def measure_ceilings(step: Step) -> None:
    import torch

    device = find_device()
    size = 256 if step.small else 8192
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    right = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    seconds = [measure_seconds(lambda: left @ right)[0] for _ in range(12)]
    product = statistics.median(seconds[2:])
    source = torch.randn((1 << 16) if step.small else (1 << 30), device=device)
    target = torch.empty_like(source)
    copies = [measure_seconds(lambda: target.copy_(source))[0] for _ in range(6)]
    copy = statistics.median(copies[2:])
    step.record(
        matrix_product_tflops=2 * size**3 / product / 1e12,
        copy_tb_per_s=2 * source.nbytes / copy / 1e12,
    )


def run(step: Step) -> None:
    describe_machine(step)
    measure_ceilings(step)
