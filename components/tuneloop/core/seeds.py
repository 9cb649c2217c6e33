"""Randomness is derived, never carried: every stream has a name, so resuming needs no generator state."""

import hashlib
import math
from collections.abc import Callable

import xxhash


def derive_seed(seed: int, purpose: str, *index: int | str) -> int:
    """Derive a 63-bit seed for the stream (`seed`, `purpose`, `index` …), by SHA-256 over its name.

    >>> derive_seed(0, "rollout", 3, 17) == derive_seed(0, "rollout", 3, 17)
    True
    """
    name = "/".join(map(str, (seed, purpose, *index)))
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def draw_indices(count: int, start: int, size: int, seed: Callable[[int], int]) -> list[int]:
    """Draw the indices `start` … `start + size - 1` of the endless stream of epochs over `count`; `seed` is an epoch's.

    >>> sorted(draw_indices(6, 0, 3, abs) + draw_indices(6, 3, 3, abs))
    [0, 1, 2, 3, 4, 5]
    """
    places = (divmod(place, count) for place in range(start, start + size))
    return [permute_index(offset, count, seed(epoch)) for epoch, offset in places]


def permute_index(index: int, count: int, seed: int) -> int:
    """Return what stands at place `index` of a random order of 0 … `count` - 1, in constant time and memory.

    It is the generalized Feistel network of Black and Rogaway ("Ciphers with Arbitrary Finite Domains", CT-RSA 2002),
    repeated until the result is below `count`; xxh3-64 under `seed` makes it a shuffle, not a cipher."""
    columns = -(-count // (rows := math.isqrt(count - 1) + 1))
    while True:
        left = index % rows
        right = index // rows
        for turn in range(8):  # an even number, so that rows are rows again
            mixed = left + xxhash.xxh3_64_intdigest(b"%d/%d" % (turn, right), seed)
            left = right
            right = mixed % (columns if turn % 2 else rows)
        index = left + rows * right
        if index < count:
            return index
