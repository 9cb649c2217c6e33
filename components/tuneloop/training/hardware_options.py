"""Options of a trainer that need something: a GPU, a compiler, a package. Refused by name where that is not there."""

from __future__ import annotations

import importlib.util
import os
import shutil

from tuneloop.core.errors import UserError


def check_hardware_options(
    device: str, world: int, cpu_offload: bool, torch_compile: bool, use_liger_kernel: bool
) -> None:
    """Check that the device and the packages that the options need are there.

    Args:
        device: ``cpu`` or ``cuda``.
        world: processes that train.

    Raises:
        UserError: it is not.
    """
    cuda = device == "cuda"
    if cpu_offload and not cuda:
        raise UserError("--cpu-offload", True, "trains on the CPU: there is no GPU to take anything off; leave it out")
    if cpu_offload and world == 1:
        raise UserError("--cpu-offload", True, "is a policy of FSDP, and one process shards nothing; start several")
    if torch_compile and not cuda and shutil.which(compiler := os.environ.get("CXX", "g++")) is None:
        raise UserError("--torch-compile", True, f"needs a C++ compiler on a CPU: install {compiler}, or leave it out")
    if torch_compile and cuda and importlib.util.find_spec("triton") is None:
        raise UserError("--torch-compile", True, "needs triton on a GPU: install it, or leave it out")
    if use_liger_kernel and not cuda:
        raise UserError("--use-liger-kernel", True, "its kernels run on a GPU only, and this is a CPU; leave it out")
    if use_liger_kernel and importlib.util.find_spec("liger_kernel") is None:
        raise UserError("--use-liger-kernel", True, "needs the package: pip install liger-kernel, or leave it out")
