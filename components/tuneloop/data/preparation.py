"""What the stage `data_prep` counts of the rows that it reads, refuses of them, and reports.

The stage calls the checks after all rows are written, in the order that its function has: an
earlier check explains what would fail a later one. A check that is added is called by
`stages/data_prep.py: data_prep`. `Tally` counts while rows are written.
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tuneloop.core.component import Stage
from tuneloop.core.errors import UserError
from tuneloop.core.wording import format_count
from tuneloop.data import Splits
from tuneloop.data.budgets import Budget
from tuneloop.data.sizes import SPLITS, Size, Split, describe_rows
from tuneloop.data.splitting import Counts
from tuneloop.data.tables import DEFAULT_REWARDS, RowBuilder


def log_counts(stage: Stage, counts: Mapping[Split, int], train: int | None, source: str) -> None:
    """Log how many rows each split has, and whether there are fewer prompts than asked for.

    Args:
        train: the number of prompts that the user asked for; None: all.
    """
    line = describe_rows(counts)
    if train is not None and counts["train"] < train:
        line += f" ({format_count(train, 'prompt')} asked for: {source} has no more)"
    stage.log(line)


def check_sizes(splits: Splits, sizes: Mapping[Split, Size], counts: Counts, source: str) -> None:
    """Check that each split has the rows that the user asked for. Raises UserError."""
    for split, size in sizes.items():
        taken = counts.taken[split]
        if size.is_exact and size.number and taken < size.number:
            remedy = f"{source} has only {taken} distinct prompts left"
            remedy += f"; ask for fewer (set data.{split}), or give it more data"
            raise UserError(f"data_prep.{split}", size.number, remedy)
    wanted = sizes["train"].number
    if wanted and not counts.taken["train"]:
        remedy = f"{source} has only 0 distinct prompts left; one is needed"
        raise UserError("data_prep.train", wanted, remedy)
    if not counts.taken.total() and any(size.number is None for size in sizes.values()):
        remedy = "no row of it is of a form that is used; see data.columns (docs/data.md)"
        raise UserError("data_prep.source", source, remedy)


def check_rewards(
    splits: Splits, sizes: Mapping[Split, Size], counts: Counts, builder: RowBuilder
) -> None:
    """Check that the default reward can score at least one prompt. Raises UserError: it can score
    none, and prompts are what the source is for. `RowBuilder.hopeless` counts those it cannot
    score."""
    if not builder.prompts or builder.hopeless < builder.prompts:
        return
    # Beside demonstrations or pairs of the same rows, a few prompts are a by-product.
    others = set(SPLITS) - {"train", "eval"} - splits.separate
    if not sizes["train"].number and any(counts.taken[split] for split in others):
        return
    unread = ""
    if splits.unread:
        unread = f"; columns that nothing is read from: {', '.join(splits.unread)}"
    remedy = (
        "no prompt has an answer, and the default reward compares with one: name the column of the "
        f"answers (data.columns.answer{unread}), or choose a reward that needs none (data.rewards)"
    )
    raise UserError("data.rewards", dict(DEFAULT_REWARDS), remedy)


def report_rows(
    stage: Stage,
    source: str,
    splits: Splits,
    counts: Counts,
    budgets: tuple[Budget, Budget],
    tally: "Tally",
    builder: RowBuilder,
) -> None:
    """Say in the log and in the manifest's facts what was read, and what was left out.

    People read these facts; code reads ``recognised`` alone, and ``rows``, which the stage adds
    (`runs/prepared_data.py`). `tests/unit/stages/test_data_splits.py` compares them.
    """
    specs = [json.loads(spec) for spec, _ in builder.specs.most_common()]
    facts: dict[str, Any] = {"source": source, "rewards": specs[0] if specs else {}}
    if len(specs) > 1:
        facts["rewards_of_rows"] = dict(builder.specs)
    facts |= splits.facts
    if tally.unchecked:
        facts["unchecked"] = tally.unchecked
    dropped: dict[str, Any] = {}
    for budget in budgets:
        if budget.count:
            dropped[budget.setting.removeprefix("data.")] = budget.to_facts()
            stage.log(budget.describe())
    for name, number, reason in (
        ("repeated", counts.repeated, "with what an earlier row has"),
        ("conflicting", counts.conflicting, "with the prompt of an earlier row and another answer"),
        ("held_back", counts.held_back, "with a prompt that is in another split"),
    ):
        if number:
            dropped[name] = number
            stage.log(f"left out {format_count(number, 'row')} {reason}")
    if dropped:
        facts["dropped"] = dropped
    if counts.nulls:
        facts["rows_with_null_fields"] = counts.nulls
        stage.log(f"left null fields of nested columns out of {format_count(counts.nulls, 'row')}")
    if counts.unused:
        facts["unused"] = counts.unused
    stage.facts.update(facts)


class Tally:
    """Counts of the examined rows, and those whose gold answer their rewards reject.

    Attributes:
        wrong: gold answers that earn less than full marks.
        examined: rows of all tables.
        hosts: rows by the machine that examined them.
        unchecked: rows without an answer, or without a reward that could check it.
    """

    def __init__(self, wrong: Budget) -> None:
        self.wrong = wrong
        self.examined = 0
        self.unchecked = 0
        self.hosts: Counter[str] = Counter()

    def check_answers(self, is_default_reward: bool) -> None:
        """Check that no more gold answers are wrong than may be left out. Raises UserError."""
        proved = self.examined - self.unchecked
        if is_default_reward and 2 * self.wrong.count > proved:
            # Where most answers fail, the default reward is more likely to be wrong than they are.
            remedy = 'choose the reward that fits them (such as data.rewards={"numeric": 1.0})'
            self.wrong.advice = remedy
        self.wrong.check(proved)

    def add(self, table: pa.Table) -> pa.Table:
        """Count the rows of a table that `data/tables.py: examine_answers` has returned; return
        those whose gold answer is right, or is not checked."""
        self.examined += table.num_rows
        self.hosts.update(table["host"].to_pylist())
        self.unchecked += table["judges"].null_count
        is_right = pc.is_null(table["trouble"])
        for row in table.filter(pc.invert(is_right)).select(["name", "trouble"]).to_pylist():
            self.wrong.add(row["name"], row["trouble"])
        return table.filter(is_right)
