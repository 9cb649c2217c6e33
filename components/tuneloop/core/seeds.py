"""Randomness is derived, never carried: every stream has a name, so resuming needs no generator
state.

A stage asks `Stage.seed`, which adds its own seed and iteration. Changing how a seed is derived, or
the name of a stream, changes the bits of every run that is resumed or replayed, and the canary of a
model without text (`formats/canary.py: derive_ids`). docs/architecture.md lists the streams.
"""

import hashlib
import math
from collections.abc import Callable

import xxhash

ROUNDS = 8
"""Rounds of the Feistel network: an even number, after which rows are rows again."""


def derive_seed(seed: int, purpose: str, *index: int | str) -> int:
    """Derive a 63-bit seed for the stream (`seed`, `purpose`, `index` …), by SHA-256 of its name.

    >>> derive_seed(0, "rollout", 3, 17) == derive_seed(0, "rollout", 3, 17)
    True
    """
    parts: list[int | str] = [seed, purpose]
    parts += index
    name = "/".join(map(str, parts))
    digest = hashlib.sha256(name.encode()).digest()
    # NumPy and torch take signed 64-bit seeds, so one bit is dropped.
    return int.from_bytes(digest[:8], "big") >> 1


def draw_indices(
    count: int, start: int, size: int, seed_of_epoch: Callable[[int], int]
) -> list[int]:
    """Draw the indices `start` … `start + size - 1` of an endless stream of epochs over `count`.

    Args:
        seed_of_epoch: returns the seed of an epoch, from its number, from 0.

    >>> sorted(draw_indices(6, 0, 3, abs) + draw_indices(6, 3, 3, abs))
    [0, 1, 2, 3, 4, 5]
    """
    indices: list[int] = []
    for position in range(start, start + size):
        epoch, offset = divmod(position, count)
        indices.append(permute_index(offset, count, seed_of_epoch(epoch)))
    return indices


def permute_index(index: int, count: int, seed: int) -> int:
    """Return what stands at position `index` of a random order of 0 … `count` - 1.

    It takes constant time and memory, by the generalized Feistel network of Black and Rogaway
    ("Ciphers with Arbitrary Finite Domains", CT-RSA 2002), which is repeated until the result is
    below `count`. xxh3-64 under `seed` is its round function: enough for a shuffle, not for a
    cipher. `stages/rollout.py` orders prompts by it, `training/epochs.py` rows.
    """
    rows = math.isqrt(count - 1) + 1
    columns = (count + rows - 1) // rows
    while True:
        # The cell of a grid, whose two coordinates are the halves of the network's block.
        row = index % rows
        column = index // rows
        for round_number in range(ROUNDS):
            mixed = row + xxhash.xxh3_64_intdigest(b"%d/%d" % (round_number, column), seed)
            row = column
            column = mixed % (columns if round_number % 2 else rows)
        # Rows and columns were exchanged an even number of times.
        index = row + rows * column
        # The grid has up to rows + 1 cells more than there are indices.
        if index < count:
            return index
