"""Rows on their way through `data_prep`: table by table, examined here or by Ray, into Parquet.

Between `RowBuilder` and `SplitWriter` a row is a row of `SCHEMA`. The files that are written have
the columns of `SCHEMAS`, which every later stage reads.

A column that is added to the files is written by `RowBuilder.build`, and has to be in `SCHEMA` and
`SCHEMAS`: pyarrow drops a key that its schema does not have, without a word. Readers name their
columns: `inference/generate.py: COLUMNS` for prompts, `training/corpora.py: tokenize_split` for the
others. Earlier artifacts lack it, so it belongs into `formats/rows.py: OPTIONAL_COLUMNS`; what
rewards need of it goes into rollouts by `formats/rollouts.py: make_rows` and the `SCHEMA` there.
`tests/unit/stages/test_data_prep.py` and `test_data_splits.py` test this file.
"""

import functools
import itertools
import json
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tuneloop.core import plugins
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.data.sizes import SPLITS, Split
from tuneloop.data.splitting import PROMPT_SPLITS, RoutedRow, name_row
from tuneloop.rewards.proof import prove_answers
from tuneloop.rewards.scoring import find_reward, parse_spec

Examine = Callable[..., pa.Table]
"""Adds to a table of `SCHEMA` the columns that `examine_answers` adds."""
Preparation = Literal["here", "ray"]
"""Where tables are examined: an option of `stages/data_prep.py`; ``ray`` is
`data/ray_tables.py`."""
ROWS = 1024
"""Rows in a table, which is a row group of Parquet: this many are in memory at once. Another number
gives other bytes, and so other digests of artifacts."""
SAMPLED = 32
"""How many gold answers of a data set are judged by a reward whose calls cost (``COSTLY``).
docs/data.md states the number."""
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
"""Columns of `SCHEMA` that are text. Of these ``splits`` has names with spaces between them, and
``judges`` and ``reward`` are specs as `rewards/registry.py: parse_spec` reads them."""
TEXT = pa.string()
SCHEMA = pa.schema(dict.fromkeys(TEXTS, TEXT) | {"chat": pa.bool_()})
"""A row that is not examined yet, for any split."""

PROMPT_COLUMNS = {"id": TEXT, "prompt": TEXT, "chat": pa.bool_(), "tools": TEXT, "row": TEXT}
PROMPTS = pa.schema(PROMPT_COLUMNS | {"answer": TEXT, "reward": TEXT, "metadata": TEXT})
DEMONSTRATIONS = pa.schema(PROMPT_COLUMNS | {"completion": TEXT})
PAIRS = pa.schema(PROMPT_COLUMNS | {"chosen": TEXT, "rejected": TEXT})
SCHEMAS: dict[Split, pa.Schema] = {
    "eval": PROMPTS,
    "sft_eval": DEMONSTRATIONS,
    "sft": DEMONSTRATIONS,
    "preference_eval": PAIRS,
    "preference": PAIRS,
    "train": PROMPTS,
}
"""Split → the columns of its file. `training/fetch.py` and `training/backends/trl.py` know them by
name, too."""
DEFAULT_REWARDS: Mapping[str, float] = {"exact": 1.0}
"""What judges rows where neither the user nor the source says it. `RowBuilder.build` compares by
identity, so that prompts without answers are refused only where nobody asked for these rewards."""
ALWAYS_WRITTEN = ("eval", "sft", "train")
"""Splits that have a file even if they have no rows: `stages/data_prep.py` returns the numbers of
their rows as its results."""


class RowBuilder:
    """Makes rows of `SCHEMA` of examples.

    Attributes:
        rewards: what the user wants all rows to be judged by; None: what fits a row by its source.
        reward_args: metadata that all rows get. A key replaces the row's own value, and is not
            merged with it.
        specs: how many rows each spec of rewards judges.
        prompts: rows that are prompts for RL or its evaluation.
        hopeless: those of them without an answer, where the default reward needs one to compare
            with.
    """

    def __init__(self, rewards: Mapping[str, float] | None, reward_args: JsonMapping) -> None:
        self.rewards = rewards
        self.reward_args = reward_args
        # Rows by their rewards: a source may have rows of several kinds.
        self.specs: Counter[str] = Counter()
        self.prompts = 0
        self.hopeless = 0
        self._sampled: Counter[str] = Counter()

    def build(self, routed: RoutedRow) -> JsonObject:
        """Build the row of an example, with a value for each column of `SCHEMA`; a missing one is
        null."""
        example = routed.example
        rewards = self.rewards or example.rewards or DEFAULT_REWARDS
        spec = json.dumps(dict(rewards), sort_keys=True)
        self.specs[spec] += 1
        if not set(PROMPT_SPLITS).isdisjoint(routed.splits):
            self.prompts += 1
            self.hopeless += rewards is DEFAULT_REWARDS and example.answer is None
        metadata = example.metadata | dict(self.reward_args)
        # The reward `tool_calls` reads them. Tools in the row's own metadata come first.
        if example.tools is not None:
            metadata.setdefault("tools", example.tools)
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
            "solution": example.full_solution,
            "completion": example.completion,
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
                # Reference answers of a data set are right or wrong together, by their form.
                self._sampled[name] += 1
                if self._sampled[name] > SAMPLED:
                    continue
            judges[name] = weight
        return json.dumps(judges, sort_keys=True) if judges else None


@functools.cache
def is_costly(name: str) -> bool:
    """Return whether calls of a reward cost: its module says ``COSTLY = True``. No reward that
    ships does; docs/extending.md tells authors of theirs."""
    plugin = plugins.load_variant("rewards", name)
    # A reward may be a module, or a function of one.
    module = sys.modules.get(getattr(plugin, "__module__", ""))
    return bool(getattr(plugin, "COSTLY", getattr(module, "COSTLY", False)))


def build_tables(rows: Iterable[JsonMapping]) -> Iterator[pa.Table]:
    """Yield `rows` as tables of `SCHEMA`; keys that it does not have are dropped."""
    rows = iter(rows)
    while part := list(itertools.islice(rows, ROWS)):
        yield pa.Table.from_pylist(part, schema=SCHEMA)


def examine_answers(
    table: pa.Table, timeout_s: float, progress: Callable[[int], None] | None = None
) -> pa.Table:
    """Return `table` with two more columns.

    ``trouble`` is what is wrong with a gold answer according to the row's judges; null if nothing
    is. ``host`` is the machine where it was examined.

    It runs in processes of Ray, too, which get the table and these arguments alone.

    Args:
        table: of `SCHEMA`; `rewards/proof.py: prove_answers` reads ``answer``, ``solution`` and
            ``metadata``.
        timeout_s: seconds that one call of a reward may take.
        progress: see `rewards/scoring.py: score_all`.
    """
    rows = table.to_pylist()
    troubles: list[str | None] = [None] * len(rows)
    # Rows of a mixture have different judges; those of one data set usually share them.
    indices_by_judges: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        if row["judges"] is not None:
            indices_by_judges.setdefault(row["judges"], []).append(index)
    for judges, indices in indices_by_judges.items():
        judged = [rows[index] for index in indices]
        proofs = prove_answers(judged, parse_spec(judges), timeout_s, progress)
        for index, trouble in zip(indices, proofs):
            troubles[index] = trouble
    hosts = [socket.gethostname()] * len(rows)
    table = table.append_column("trouble", pa.array(troubles, TEXT))
    return table.append_column("host", pa.array(hosts, TEXT))


class SplitWriter:
    """Writes the rows of one split to Parquet, a row group of `ROWS` rows at a time, and names them
    ``SPLIT-000000`` in that order."""

    def __init__(self, folder: Path, split: Split) -> None:
        """Open nothing yet: a split without rows may have no file."""
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
        # Row groups are of the same rows however the tables were cut: equal data, equal bytes.
        while self._pending_rows >= ROWS:
            pending = pa.concat_tables(self._pending)
            self._write(pending.slice(0, ROWS))
            self._pending = [pending.slice(ROWS)]
            self._pending_rows -= ROWS

    def close(self) -> None:
        """Write what is pending. A split without rows has a file only if it is in
        `ALWAYS_WRITTEN`."""
        if self._pending_rows:
            self._write(pa.concat_tables(self._pending))
        if self._file is None and self.split in ALWAYS_WRITTEN:
            self._write(self.schema.empty_table())
        if self._file is not None:
            self._file.close()

    def _convert(self, table: pa.Table) -> pa.Table:
        """Return the columns of the split's file, made of examined rows of `SCHEMA`."""
        numbers = range(self.rows, self.rows + table.num_rows)
        names = [f"{self.split}-{number:06d}" for number in numbers]
        columns = {name: table[name] for name in table.column_names}
        columns["id"] = pa.array(names, TEXT)
        columns["answer"] = columns["answer"].fill_null("")
        columns["chosen"] = columns["completion"]
        if self.schema is DEMONSTRATIONS:
            # A whole conversation is the prompt itself, and nothing is left to complete.
            is_whole = pc.is_valid(columns["conversation"])
            nothing = pa.scalar(None, TEXT)
            columns["prompt"] = pc.coalesce(columns["conversation"], columns["prompt"])
            columns["completion"] = pc.if_else(is_whole, nothing, columns["completion"])
        selected = {name: columns[name] for name in self.schema.names}
        return pa.table(selected, schema=self.schema)

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
