"""Prompts, demonstrations and pairs from any source, held-out parts apart, every gold answer
checked."""

import functools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Annotated, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AfterValidator, Field

from tuneloop.core import plugins
from tuneloop.core.component import UNTRACKED, Results, Stage, component
from tuneloop.core.errors import UserError
from tuneloop.data import Splits
from tuneloop.data.budgets import Budget, Policy
from tuneloop.data.ray_tables import ray_data
from tuneloop.data.requirements import check_required
from tuneloop.data.sizes import SPLITS, Size, Split, choose_sizes, count_wanted
from tuneloop.data.sources import (
    FILES,
    check_arguments,
    check_columns,
    check_layout,
    check_mixture,
    check_source,
    digest_source_of,
    find_source_of,
    load_source,
)
from tuneloop.data.splitting import Counts, Form, Router
from tuneloop.data.tables import (
    DEFAULT_REWARDS,
    Examine,
    Preparation,
    RowBuilder,
    SplitWriter,
    build_tables,
    examine_answers,
    open_writers,
    select_split,
)
from tuneloop.formats.chat_forms import Reasoning
from tuneloop.formats.conversations import History
from tuneloop.formats.too_long import TooLong
from tuneloop.rewards.scoring import parse_spec

SHOWN_ORDER: tuple[Split, ...] = (
    "train",
    "eval",
    "sft",
    "sft_eval",
    "preference",
    "preference_eval",
)


Rows = Annotated[int | None, Field(ge=0)]


@component(
    "prompts",
    image="base",
    results={"train": int, "eval": int, "sft": int},
    identity=digest_source_of,
)
def data_prep(
    stage: Stage,
    *,
    source: Annotated[
        str,
        AfterValidator(check_source),
        Field(
            description="a file, a glob, a folder, a data set of the hub; or digits, functions, "
            "reasoning_gym, or a dotted path"
        ),
    ] = "digits",
    layout: Annotated[
        str | None,
        AfterValidator(check_layout),
        Field(description="of a file: what its columns are (docs/data.md); default: recognised"),
    ] = None,
    columns: Annotated[
        dict[str, Any],
        AfterValidator(check_columns),
        Field(description="of a file: prompt, answer, completion, … → column, or path in a column"),
    ] = {},  # noqa: B006
    mixture: Annotated[
        list[dict[str, Any]],
        AfterValidator(check_mixture),
        Field(description="several files: source, weight, layout and columns of each"),
    ] = [],  # noqa: B006
    source_args: Annotated[
        dict[str, Any],
        AfterValidator(check_arguments),
        Field(description="the source's own arguments", validate_default=True),
    ] = {},  # noqa: B006
    train: Annotated[
        Rows, Field(description="most training prompts, taken after the others; default: all")
    ] = None,
    eval: Annotated[
        Rows, Field(description="held-out prompts; default: 5 % of the rows, at most 256")
    ] = None,
    sft: Annotated[Rows, Field(description="demonstrations; default: all")] = None,
    sft_eval: Annotated[
        Rows, Field(description="held-out demonstrations; default: 5 % of the rows, at most 256")
    ] = None,
    preference: Annotated[
        Rows, Field(description="pairs of a chosen and a rejected completion; default: all")
    ] = None,
    preference_eval: Annotated[
        Rows, Field(description="held-out pairs; default: 5 % of the rows, at most 256")
    ] = None,
    rewards: Annotated[
        dict[Annotated[str, plugins.validate_variant("rewards")], float] | None,
        Field(description="reward → weight; default: what fits the layout, or else exact"),
    ] = None,
    reward_args: Annotated[
        dict[str, Any], Field(description="reward → value of its metadata")
    ] = {},  # noqa: B006
    bad_rows: Annotated[
        Policy, Field(description="rows that cannot be used: drop them, or refuse the data")
    ] = "drop",
    wrong_answers: Annotated[
        Policy, Field(description="rows whose gold answer their reward rejects: drop, or refuse")
    ] = "drop",
    drop_at_most: Annotated[
        float, Field(ge=0, le=1, description="share of the rows that may be dropped so")
    ] = 0.01,
    chat: Annotated[
        bool, Field(description="make a plain prompt the user message of a chat")
    ] = False,
    system: Annotated[str | None, Field(description="system message of every chat")] = None,
    history: Annotated[
        History,
        Field(
            description="turns of a conversation: learned together where the chat template shows "
            "them alike, or each as a row of its own"
        ),
    ] = "as-rendered",
    reasoning: Annotated[
        Reasoning, Field(description="reasoning in demonstrations: learn it, or leave it out")
    ] = "keep",
    too_long: Annotated[
        TooLong,
        Field(
            description="rows with more tokens than fit: drop them up to the share drop_at_most of "
            "a split (one at least), cut demonstrations off, or refuse the data"
        ),
    ] = "drop",
    timeout_s: Annotated[
        float, Field(gt=0, description="seconds that one call of a reward may take")
    ] = 5.0,
    required: Annotated[
        list[Split],
        Field(
            description="splits that later stages cannot do without: data that has no row for "
            "one is refused",
            json_schema_extra=UNTRACKED,
        ),
    ] = [],  # noqa: B006
    preparation: Annotated[
        Preparation,
        Field(
            description="ray: examine rows with Ray Data, on a cluster if there is one",
            json_schema_extra=UNTRACKED,
        ),
    ] = "here",
    seed: int = 0,
) -> Results:
    """Read a source, split it, and prove that every gold answer earns full marks.

    Rows go where their form belongs: prompts with answers to `train`, demonstrations and whole
    conversations to `sft`, pairs to `preference`, and of each a part is held out. All rows of a
    prompt are on one side. Each example's solution is scored by the same rewards as the policy.
    Examples without an answer cannot be checked, and ``facts.unchecked`` counts them. Rows that
    cannot be used, and gold answers that are rejected, are dropped up to the share `drop_at_most`;
    ``facts.dropped`` has their number and the first ten. Raises UserError at an unknown source,
    argument, column or reward, too few examples, or more bad rows than that.
    """
    if rewards is not None:
        parse_spec(json.dumps(rewards, sort_keys=True))
    if system is not None and not chat:
        raise UserError("data_prep.system", system, "needs --chat true")
    stage.facts.update(
        history=history,
        reasoning=reasoning,
        too_long=too_long,
        drop_at_most=drop_at_most,
    )
    wanted: dict[Split, int | None] = {
        "eval": eval,
        "sft_eval": sft_eval,
        "sft": sft,
        "preference_eval": preference_eval,
        "preference": preference,
        "train": train,
    }
    splits, sizes = open_source(stage, wanted)
    for line in splits.lines:
        stage.log(line)
    share = drop_at_most
    bad = Budget("data.bad_rows", "cannot be used", "rows", bad_rows, share)
    wrong = Budget(
        "data.wrong_answers",
        "earn less than full marks from their own reward",
        "gold answers",
        wrong_answers,
        share,
    )
    router = Router(splits, sizes, Form(chat, system), bad)
    builder = RowBuilder(rewards, reward_args)
    tally = Tally(wrong)
    writers = write_rows(stage, router, builder, tally)
    bad.check(router.counts.read)
    check_required(required, splits, router.counts, source)
    _check_sizes(splits, sizes, router.counts, source)
    _check_rewards(splits, sizes, router.counts, builder)
    tally.check_answers(is_default_reward=rewards is None)
    for writer in writers.values():
        writer.close()
    counts = {
        split: writers[split].rows for split in SPLITS if (stage.out / f"{split}.parquet").exists()
    }
    _report(stage, source, splits, router.counts, (bad, wrong), tally, builder)
    if preparation == "ray":
        stage.notes["examined"] = dict(tally.hosts)
    stage.facts.update(rows=counts)
    _log_counts(stage, counts, train, "the mixture" if mixture else source)
    return {split: counts[split] for split in ("train", "eval", "sft")}


class PreparationParams(Protocol):
    """The parameters of a stage that say how rows are examined."""

    timeout_s: float
    preparation: Preparation


def write_rows(
    stage: Stage[PreparationParams], router: Router, builder: RowBuilder, tally: "Tally"
) -> dict[Split, SplitWriter]:
    """Read all rows, prove their gold answers, and give each to the writers of its splits."""
    params = stage.params
    judge = functools.partial(examine_answers, timeout_s=params.timeout_s)
    expected = sum(size.number or 0 for size in router.sizes.values())
    bar = stage.progress(router.total or expected, "rows")

    def examine_here(tables: Iterable[pa.Table], function: Examine) -> Iterator[pa.Table]:
        return map(functools.partial(function, progress=lambda _: stage.check_stop()), tables)

    has_ray = params.preparation == "ray"
    writers = open_writers(stage.out)
    with (
        stage.timed("prepare"),
        ray_data() if has_ray else nullcontext(examine_here) as map_tables,
    ):
        rows = map(builder.build, router.route())
        for table in map_tables(build_tables(rows), judge):
            stage.check_stop()
            proved = tally.add(table)
            for split, writer in writers.items():
                writer.add(select_split(proved, split))
            bar.update(tally.examined)
    return writers


def open_source(
    stage: Stage, wanted: Mapping[Split, int | None]
) -> tuple[Splits, dict[Split, Size]]:
    """Open the source of a stage's parameters, and choose how many rows each split gets."""
    source, arguments = find_source_of(stage.params)
    splits = load_source(source, arguments, count_wanted(wanted), stage.seed("data"))
    is_endless = splits.rows is None and source != FILES
    return splits, choose_sizes(wanted, splits.rows, splits.separate, is_endless)


def _log_counts(stage: Stage, counts: Mapping[Split, int], train: int | None, source: str) -> None:
    """Say how many rows each split has, and where prompts are fewer than `train`, why."""
    shown = {split: str(counts[split]) for split in sorted(counts, key=SHOWN_ORDER.index)}
    if train is not None and counts["train"] < train:
        shown["train"] += f" of {train} asked for: {source} has no more"
    stage.log(", ".join(f"{split} {number}" for split, number in shown.items()))


def _check_sizes(splits: Splits, sizes: Mapping[Split, Size], counts: Counts, source: str) -> None:
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


def _check_rewards(
    splits: Splits, sizes: Mapping[Split, Size], counts: Counts, builder: RowBuilder
) -> None:
    """Check that the default reward can score a prompt at all, where prompts are what the source is
    for. Raises UserError."""
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


def _report(
    stage: Stage,
    source: str,
    splits: Splits,
    counts: Counts,
    budgets: tuple[Budget, Budget],
    tally: "Tally",
    builder: RowBuilder,
) -> None:
    """Say in the log and in the facts what was read, and what was left out."""
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
    for name, number, sentence in (
        ("repeated", counts.repeated, "are equal to one before them"),
        ("conflicting", counts.conflicting, "have a prompt before them with another answer"),
        ("held_back", counts.held_back, "have a prompt that is in another split"),
    ):
        if number:
            dropped[name] = number
            stage.log(f"left out {number} rows that {sentence}")
    if dropped:
        facts["dropped"] = dropped
    if counts.nulls:
        facts["rows_with_null_fields"] = counts.nulls
        stage.log(f"left null fields of nested columns out of {counts.nulls} rows")
    if counts.unused:
        facts["unused"] = counts.unused
    stage.facts.update(facts)


class Tally:
    """Counts of the examined rows, and those whose gold answer their rewards reject.

    Attributes:
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
        """Count the rows of a table; return those whose gold answer is right, or is not checked."""
        self.examined += table.num_rows
        self.hosts.update(table["host"].to_pylist())
        self.unchecked += table["judges"].null_count
        is_right = pc.is_null(table["trouble"])
        for row in table.filter(pc.invert(is_right)).select(["name", "trouble"]).to_pylist():
            self.wrong.add(row["name"], row["trouble"])
        return table.filter(is_right)


if __name__ == "__main__":
    data_prep.main()
