"""What the vendor's data sheets say of devices, by the names that CUDA has for them."""

from typing import NamedTuple


class Device(NamedTuple):
    """Dense bfloat16 operations a second, and bytes a second of its memory."""

    flops: float
    bandwidth: float


DEVICES = {
    "B200": Device(2250e12, 8e12),  # NVIDIA's of DGX B200, an eighth
    "H200": Device(989e12, 4.8e12),  # of H200, as SXM
    "H100": Device(989e12, 3.35e12),  # of H100, as SXM
    "A100": Device(312e12, 2.039e12),  # of A100, as SXM with 80 GB
    "L40S": Device(362e12, 0.864e12),
    "L4": Device(121e12, 0.3e12),
}
