"""Randomness is derived, never carried: every stream has a name, so resuming needs no generator state."""

import hashlib


def derive_seed(seed: int, purpose: str, *index: int | str) -> int:
    """Derive a 63-bit seed for the stream (`seed`, `purpose`, `index` …), by SHA-256 over its name.

    >>> derive_seed(0, "rollout", 3, 17) == derive_seed(0, "rollout", 3, 17)
    True
    """
    name = "/".join(map(str, (seed, purpose, *index)))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
