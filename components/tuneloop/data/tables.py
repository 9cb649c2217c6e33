"""Rows on their way through `data_prep`: table by table, examined here or by Ray, into Parquet."""

import functools
import itertools
import json
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tuneloop.core import plugins
from tuneloop.core.errors import Retryable, UserError
from tuneloop.data.sizes import SPLITS, Split
from tuneloop.data.splitting import PROMPT_SPLITS, RoutedRow, get_completion, name_row
from tuneloop.rewards.proof import prove_answers
from tuneloop.rewards.scoring import find_reward, parse_spec

Examine = Callable[..., pa.Table]
Preparation = Literal["here", "ray"]
ROWS = 1024
"""Rows in a table, which is a row group of Parquet: this many are in memory at once."""
WINDOW = 64
"""Tables in one Ray Data job."""
SAMPLED = 32
"""Gold answers that are judged by a reward whose calls cost (``COSTLY``)."""
TEXTS = (
    "row",
    "name",
    "splits",
    "prompt",
    "tools",
    "answer",
    "reward",
    "judges",
    "metadata",
    "solution",
    "completion",
    "rejected",
    "conversation",
)
SCHEMA = pa.schema([*((name, pa.string()) for name in TEXTS), ("chat", pa.bool_())])
EXAMINED = pa.schema([*SCHEMA, ("trouble", pa.string()), ("host", pa.string())])

ASKED = {
    "id": pa.string(),
    "prompt": pa.string(),
    "chat": pa.bool_(),
    "tools": pa.string(),
    "row": pa.string(),
}
PROMPTS = pa.schema(
    {
        **ASKED,
        "answer": pa.string(),
        "reward": pa.string(),
        "metadata": pa.string(),
    }
)
DEMONSTRATIONS = pa.schema({**ASKED, "completion": pa.string()})
PAIRS = pa.schema({**ASKED, "chosen": pa.string(), "rejected": pa.string()})
SCHEMAS: dict[Split, pa.Schema] = {
    "eval": PROMPTS,
    "sft_eval": DEMONSTRATIONS,
    "sft": DEMONSTRATIONS,
    "preference_eval": PAIRS,
    "preference": PAIRS,
    "train": PROMPTS,
}
DEFAULT_REWARDS: Mapping[str, float] = {"exact": 1.0}
"""What judges rows where neither the user nor the source says it."""
ALWAYS_WRITTEN = ("eval", "sft", "train")
"""Splits that have a file also where they have no rows."""


class RowBuilder:
    """Makes rows of `SCHEMA` of examples.

    Attributes:
        rewards: what the user wants all rows to be judged by; None: what fits a row by its source.
        reward_args: metadata that all rows get.
        prompts: rows that are prompts for RL or its evaluation.
        hopeless: those of them without an answer that the default reward would compare with.
    """

    def __init__(self, rewards: Mapping[str, float] | None, reward_args: Mapping[str, Any]) -> None:
        self.rewards = rewards
        self.reward_args = reward_args
        self.specs: Counter[str] = Counter()
        self.prompts = 0
        self.hopeless = 0
        self._sampled: Counter[str] = Counter()

    def build(self, routed: RoutedRow) -> dict[str, Any]:
        """Build the row of an example."""
        example = routed.example
        rewards = self.rewards or example.rewards or DEFAULT_REWARDS
        spec = json.dumps(dict(rewards), sort_keys=True)
        self.specs[spec] += 1
        if not set(PROMPT_SPLITS).isdisjoint(routed.splits):
            self.prompts += 1
            self.hopeless += rewards is DEFAULT_REWARDS and example.answer is None
        metadata = {**example.metadata, **self.reward_args}
        if example.tools is not None:
            metadata.setdefault("tools", example.tools)
        solution = example.answer if example.solution is None else example.solution
        return {
            "row": example.row,
            "name": name_row(example),
            "splits": " ".join(routed.splits),
            "prompt": routed.prompt,
            "chat": routed.is_chat,
            "tools": routed.tools,
            "answer": example.answer,
            "reward": spec,
            "judges": self._choose_judges(rewards, example.answer is not None),
            "metadata": json.dumps(metadata, sort_keys=True, ensure_ascii=False, allow_nan=False),
            "solution": solution,
            "completion": get_completion(example),
            "rejected": example.rejected,
            "conversation": routed.conversation,
        }

    def _choose_judges(self, rewards: Mapping[str, float], has_answer: bool) -> str | None:
        """Choose the rewards that prove a gold answer: not those that need an episode, and of those
        whose calls cost only for the first rows. None: there is nothing to prove."""
        if not has_answer:
            return None
        judges: dict[str, float] = {}
        for name, weight in rewards.items():
            if find_reward(name).needs_episode:
                continue
            if is_costly(name):
                self._sampled[name] += 1
                if self._sampled[name] > SAMPLED:
                    continue
            judges[name] = weight
        return json.dumps(judges, sort_keys=True) if judges else None


@functools.cache
def is_costly(name: str) -> bool:
    """Return whether calls of a reward cost: its module says ``COSTLY = True``."""
    plugin = plugins.load_variant("rewards", name)
    module = sys.modules.get(getattr(plugin, "__module__", ""))
    return bool(getattr(plugin, "COSTLY", getattr(module, "COSTLY", False)))


def build_tables(rows: Iterable[Mapping[str, Any]]) -> Iterator[pa.Table]:
    """Yield `rows` as tables of `SCHEMA`."""
    rows = iter(rows)
    while part := list(itertools.islice(rows, ROWS)):
        yield pa.Table.from_pylist(part, schema=SCHEMA)


def examine_answers(
    table: pa.Table, timeout_s: float, progress: Callable[[int], None] | None = None
) -> pa.Table:
    """Return `table` with ``host``, where it was examined, and ``trouble``: what is wrong with a gold
    answer according to the row's judges; null if nothing is. `progress`: see `score_all`."""
    rows = table.to_pylist()
    troubles: list[str | None] = [None] * len(rows)
    # Rows of a mixture have different judges; those of one data set usually share them.
    places_by_judges: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        if row["judges"] is not None:
            places_by_judges.setdefault(row["judges"], []).append(place)
    for judges, places in places_by_judges.items():
        judged = [rows[place] for place in places]
        for place, trouble in zip(
            places, prove_answers(judged, parse_spec(judges), timeout_s, progress)
        ):
            troubles[place] = trouble
    columns = {name: table[name] for name in SCHEMA.names}
    columns["trouble"] = pa.array(troubles, pa.string())
    columns["host"] = pa.array([socket.gethostname()] * len(rows), pa.string())
    return pa.table(columns, schema=EXAMINED)


class SplitWriter:
    """Writes the rows of one split to Parquet, a row group of `ROWS` rows at a time, and names them
    ``SPLIT-000000`` in that order."""

    def __init__(self, folder: Path, split: Split) -> None:
        self.split = split
        self.schema = SCHEMAS[split]
        self.path = folder / f"{split}.parquet"
        self.rows = 0
        self._pending: list[pa.Table] = []
        self._pending_rows = 0
        self._file: pq.ParquetWriter | None = None

    def add(self, table: pa.Table) -> None:
        """Add examined rows."""
        self._pending.append(self._convert(table))
        self._pending_rows += table.num_rows
        self.rows += table.num_rows
        while self._pending_rows >= ROWS:
            whole = pa.concat_tables(self._pending)
            self._write(whole.slice(0, ROWS))
            self._pending = [whole.slice(ROWS)]
            self._pending_rows -= ROWS

    def close(self) -> None:
        """Write what is left. Of pairs and held-out demonstrations there is no file without rows."""
        if self._pending_rows:
            self._write(pa.concat_tables(self._pending))
        if self._file is None and self.split in ALWAYS_WRITTEN:
            self._write(self.schema.empty_table())
        if self._file is not None:
            self._file.close()

    def _convert(self, table: pa.Table) -> pa.Table:
        names = [f"{self.split}-{self.rows + number:06d}" for number in range(table.num_rows)]
        columns = {name: table[name] for name in table.column_names}
        columns["id"] = pa.array(names, pa.string())
        columns["answer"] = columns["answer"].fill_null("")
        columns["chosen"] = columns["completion"]
        if self.schema is DEMONSTRATIONS:
            # A whole conversation is the prompt itself, and nothing is left to complete.
            has_own = pc.is_valid(columns["conversation"])
            nothing = pa.scalar(None, pa.string())
            columns["prompt"] = pc.coalesce(columns["conversation"], columns["prompt"])
            columns["completion"] = pc.if_else(has_own, nothing, columns["completion"])
        return pa.table({name: columns[name] for name in self.schema.names}, schema=self.schema)

    def _write(self, table: pa.Table) -> None:
        if self._file is None:
            self._file = pq.ParquetWriter(self.path, self.schema)
        if table.num_rows:
            self._file.write_table(table.combine_chunks())


def select_split(table: pa.Table, split: Split) -> pa.Table:
    """Select the rows of one split."""
    pattern = rf"(^| ){split}( |$)"
    return table.filter(pc.match_substring_regex(table["splits"], pattern))


def open_writers(folder: Path) -> dict[Split, SplitWriter]:
    """Open a writer for each split."""
    return {split: SplitWriter(folder, split) for split in SPLITS}


@contextmanager
def ray_data() -> Iterator[Callable[[Iterable[pa.Table], Examine], Iterator[pa.Table]]]:
    """Yield a `map` of tables, in order, by Ray Data: on the cluster that ``RAY_ADDRESS`` names (in a RayJob, its own),
    else on this machine. Raises UserError: Ray is not installed; Retryable: the cluster does not answer, or fails."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UserError(
            "data_prep.preparation", "ray", f"needs {error.name}; pip install 'tuneloop[ray]'"
        ) from error
    address = os.environ.get("RAY_ADDRESS", "local")
    heard = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(
            address, log_to_driver=False, include_dashboard=False if address == "local" else None
        )
    except ConnectionError as error:
        raise Retryable(f"data_prep: Ray at {address} does not answer ({error})") from error
    except Exception as error:
        if (
            type(error) is not Exception
        ):  # which is what Ray raises where its own processes are not up after 30 s
            raise
        raise Retryable(f"data_prep: Ray did not start ({error})") from error
    with suppress(ValueError):  # not the main thread: Ray changed no handlers
        for number, handler in heard.items():
            signal.signal(number, handler)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False

    def mapped(given: Iterable[pa.Table], function: Examine) -> Iterator[pa.Table]:
        given = iter(given)
        while window := list(itertools.islice(given, WINDOW)):
            data = ray.data.from_arrow(window).map_batches(
                function, batch_size=None, batch_format="pyarrow"
            )
            yield from data.iter_batches(
                batch_size=ROWS, batch_format="pyarrow"
            )  # as they came, whatever its blocks

    try:
        yield mapped
    except ray.exceptions.RayTaskError:  # what the function raised
        raise
    except ray.exceptions.RayError as error:
        raise Retryable(f"data_prep: Ray: {str(error).splitlines()[0]}") from error
    finally:
        ray.shutdown()
