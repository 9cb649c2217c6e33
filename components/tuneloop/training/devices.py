"""Peak rates of devices by the vendor's data sheets, looked up by words of CUDA's device names.

`Trainer.efficiency` computes the MFU from it, and `planning/arithmetic.py` the hours of a plan. A
device that is missing has neither. Its key here is also the name for ``--device`` of `tuneloop
plan`. docs/commands.md and `tests/unit/planning/test_arithmetic.py` list the names.
"""

from typing import NamedTuple


class Device(NamedTuple):
    """Dense bfloat16 operations per second, and memory bandwidth in bytes per second."""

    flops: float
    bandwidth: float


DEVICES = {
    "B200": Device(2250e12, 8e12),  # NVIDIA's of DGX B200, an eighth
    "H200": Device(989e12, 4.8e12),  # of H200, as SXM
    "H100": Device(989e12, 3.35e12),  # of H100, as SXM
    "H100 PCIe": Device(756e12, 2e12),  # of H100, as PCIe
    "A100": Device(312e12, 2.039e12),  # of A100, as SXM with 80 GB
    "L40S": Device(362e12, 0.864e12),
    "L4": Device(121e12, 0.3e12),
}


def find_device(name: str) -> Device | None:
    """Find a device by CUDA's name; None if it is unknown, another variant of a known one, or a MIG
    partition.
    """
    words = set(name.replace("-", " ").split())
    # An NVL card has other rates, and a partition has a part of them.
    if words & {"NVL", "MIG"}:
        return None
    matches = [device for device in DEVICES if words.issuperset(device.split())]
    # "H100 PCIe" also matches "H100": the longer name says more.
    return DEVICES[max(matches, key=len)] if matches else None
