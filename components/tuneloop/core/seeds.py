"""Randomness is derived, never carried: every stream has a name, so resuming needs no generator state."""

import hashlib
import math

import xxhash


def derive_seed(seed: int, purpose: str, *index: int | str) -> int:
    """Derive a 63-bit seed for the stream (`seed`, `purpose`, `index` …), by SHA-256 over its name.

    >>> derive_seed(0, "rollout", 3, 17) == derive_seed(0, "rollout", 3, 17)
    True
    """
    name = "/".join(map(str, (seed, purpose, *index)))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def permute_index(index: int, count: int, seed: int) -> int:
    """Return what stands at place `index` of a random order of 0 … `count` - 1, in constant time and memory.

    It is the generalized Feistel network of Black and Rogaway ("Ciphers with Arbitrary Finite Domains", CT-RSA 2002),
    walked until it leaves with less than `count`; xxh3-64 under `seed` makes it a shuffle, not a cipher.
    """
    columns = -(-count // (rows := math.isqrt(count - 1) + 1))
    while True:
        left, right = index % rows, index // rows
        for turn in range(8):  # an even number, so that rows are rows again
            mixed = left + xxhash.xxh3_64_intdigest(b"%d/%d" % (turn, right), seed)
            left, right = right, mixed % (columns if turn % 2 else rows)
        index = left + rows * right
        if index < count:
            return index
