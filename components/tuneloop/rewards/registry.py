"""Find rewards by their names, and read which of them judge a row, and with what weights.

`scoring` looks up all rewards before anything is scored, so that an unknown one is refused first,
and that the processes that judge, which are forked, have them imported. `data/tables.py` and the
stages use it through `rewards/scoring.py`, which exports its functions.
"""

import contextlib
import functools
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from tuneloop.core import plugins
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.rewards.outcomes import Row

LARGEST = sys.float_info.max
"""The largest weight of a reward."""


@dataclass(frozen=True)
class Reward:
    """A reward function, and what its module declares. `find_reward` reads each declaration by its
    name, and docs/extending.md lists them for authors of rewards. ``COSTLY`` is one that is read by
    `data/tables.py: is_costly` alone.

    Attributes:
        name: by which a ``reward_spec`` calls it.
        function: takes the completion, the answer and the metadata; returns a score, a score with
            parts, or None where it cannot judge.
        low, high: the closed interval that it promises to stay in (``RANGE``).
        needs_episode: whether it judges an episode with an environment only (``NEEDS_EPISODE``), so
            that it cannot check a gold answer by itself.
        trusted: whether no completion can make it hang, crash or take memory (``TRUSTED``).
        write_answers: writes completions that state a gold answer (the right answer of a row), and
            earn the largest score. `rewards/proof.py` checks a data set by them.
        source: the xxh3-64 of the file that has the function; a resumed run uses a score again only
            if it is the same. It does not cover modules that the file imports. Empty where there is
            no file.
    """

    name: str
    function: Callable[[str, str, JsonObject], float | tuple[float, dict[str, float]] | None]
    low: float
    high: float
    needs_episode: bool
    trusted: bool
    write_answers: Callable[[str, JsonObject], list[str]] | None
    source: str


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a reward.

    Attributes:
        row_number: of `row` among all rows that are scored, from 0.
        row: what is judged.
        reward: what judges it.
        weight: of the reward in the row's ``reward_spec``.
    """

    row_number: int
    row: Row
    reward: Reward
    weight: float


@functools.lru_cache(maxsize=256)
def find_reward(name: str) -> Reward:
    """Find the reward called `name`.

    Raises:
        UserError: it is unknown, cannot be imported, or is not a reward.
    """
    try:
        plugin = plugins.load_variant("rewards", name)
    except ImportError as error:
        remedy = f"needs {error.name or error}; pip install 'tuneloop[rewards]'"
        raise UserError("rewards", name, remedy) from error
    function = plugin if callable(plugin) else getattr(plugin, "score", None)
    if not callable(function):
        raise UserError("rewards", name, "has no function score(completion, answer, metadata)")
    module = sys.modules.get(getattr(function, "__module__", ""))

    def read_declaration(attribute: str, default: Any) -> Any:
        return getattr(function, attribute, getattr(module, attribute, default))

    low, high = read_declaration("RANGE", (0.0, 1.0))
    return Reward(
        name=name,
        function=function,
        low=float(low),
        high=float(high),
        needs_episode=bool(read_declaration("NEEDS_EPISODE", False)),
        # Only the plugin's own TRUSTED counts: a wrapper of it, or another function of its module,
        # need not be trusted.
        trusted=bool(getattr(plugin, "TRUSTED", False)),
        write_answers=getattr(module, "write_answers", None),
        source=_hash_source(function),
    )


def _hash_source(function: Callable[..., Any]) -> str:
    with contextlib.suppress(TypeError, OSError):
        return xxhash.xxh3_64_hexdigest(Path(inspect.getfile(function)).read_bytes())
    return ""


@functools.lru_cache(maxsize=1024)
def parse_spec(text: str) -> Mapping[str, float]:
    """Parse a ``reward_spec``, a JSON object of finite weights by the names of rewards.

    Raises:
        UserError: it is none, or names no reward. Whether the rewards exist is not looked at.
    """
    try:
        spec = json.loads(text)
    except (TypeError, ValueError):
        spec = None
    if not isinstance(spec, dict) or not spec:
        raise UserError("rewards", text, 'must name at least one reward: {"exact": 1.0}')
    for name, weight in spec.items():
        # JSON has integers that no float holds, and Python's parser reads NaN, which is not equal
        # to anything.
        if type(weight) not in (int, float) or not -LARGEST <= weight <= LARGEST:
            raise UserError(f"rewards.{name}", weight, "must be a finite number")
    return {name: float(weight) for name, weight in spec.items()}


def compute_full_marks(spec: Mapping[str, float]) -> float:
    """Compute the most that can be earned under `spec`.

    That is each reward at the end of its range that its weight favours. `rewards/proof.py` demands
    it of gold answers, and `stages/reward.py` counts the completions that earn it as solved.
    """
    marks: list[float] = []
    for name, weight in spec.items():
        reward = find_reward(name)
        marks.append(weight * (reward.high if weight > 0 else reward.low))
    return math.fsum(marks)
