"""Prompts, demonstrations and pairs from any source, held-out parts apart, every gold answer
checked.

The stage only orders the parts: sources (`data/sources.py`), the split of each row
(`data/splitting.py`), gold answers (`data/tables.py`), and what is refused (`data/preparation.py`).
A parameter that is added needs a default, or is refused where an earlier release has committed
(`core/component.py`). One that later stages are to read is a fact as well, and has to be named in
`formats/facts.py: PromptFacts` and `stages/tokenize_data.py`.

What names a source is part of the output's identity (`data/sources.py: digest_source_of`), and is
read before a run, too (`planning/limits.py: list_data_sources`). Tests:
`tests/unit/stages/test_data_prep.py`, `test_data_splits.py`, and `tests/unit/data`.
"""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Annotated, Any

import pyarrow as pa
from pydantic import AfterValidator, Field

from tuneloop.core import plugins
from tuneloop.core.component import UNTRACKED, Options, Results, Stage, component
from tuneloop.core.errors import UserError
from tuneloop.data import Splits
from tuneloop.data.budgets import Budget, Policy
from tuneloop.data.preparation import Tally, check_rewards, check_sizes, log_counts, report_rows
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
from tuneloop.data.splitting import Form, Router
from tuneloop.data.tables import (
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
from tuneloop.formats.too_long import DROP_AT_MOST, TooLong
from tuneloop.rewards.scoring import parse_spec


class DataOptions(Options):
    """What is read, how many rows go where, and what becomes of those that cannot be used."""

    source: Annotated[str, AfterValidator(check_source)] = Field(
        "digits",
        description="a file, a glob, a folder, a data set of the hub; or digits, functions, "
        "reasoning_gym, or a dotted path",
    )
    layout: Annotated[str | None, AfterValidator(check_layout)] = Field(
        None, description="of a file: what its columns are (docs/data.md); default: recognised"
    )
    columns: Annotated[dict[str, Any], AfterValidator(check_columns)] = Field(
        {}, description="of a file: prompt, answer, completion, … → column, or path in a column"
    )
    mixture: Annotated[list[dict[str, Any]], AfterValidator(check_mixture)] = Field(
        [], description="several files: source, weight, layout and columns of each"
    )
    source_args: Annotated[dict[str, Any], AfterValidator(check_arguments)] = Field(
        {}, description="the source's own arguments", validate_default=True
    )
    train: int | None = Field(
        None, ge=0, description="most training prompts, taken after the others; default: all"
    )
    eval: int | None = Field(
        None, ge=0, description="held-out prompts; default: 5 % of the rows, at most 256"
    )
    sft: int | None = Field(None, ge=0, description="demonstrations; default: all")
    sft_eval: int | None = Field(
        None, ge=0, description="held-out demonstrations; default: 5 % of the rows, at most 256"
    )
    preference: int | None = Field(
        None, ge=0, description="pairs of a chosen and a rejected completion; default: all"
    )
    preference_eval: int | None = Field(
        None, ge=0, description="held-out pairs; default: 5 % of the rows, at most 256"
    )
    rewards: dict[Annotated[str, plugins.validate_variant("rewards")], float] | None = Field(
        None, description="reward → weight; default: what fits the layout, or else exact"
    )
    reward_args: dict[str, Any] = Field({}, description="reward → value of its metadata")
    bad_rows: Policy = Field(
        "drop", description="rows that cannot be used: drop them, or refuse the data"
    )
    wrong_answers: Policy = Field(
        "drop", description="rows whose gold answer their reward rejects: drop, or refuse"
    )
    drop_at_most: float = Field(
        DROP_AT_MOST, ge=0, le=1, description="share of the rows that may be dropped so"
    )
    chat: bool = Field(False, description="make a plain prompt the user message of a chat")
    system: str | None = Field(None, description="system message of every chat")
    history: History = Field(
        "as-rendered",
        description="turns of a conversation: learned together where the chat template shows "
        "them alike, or each as a row of its own",
    )
    reasoning: Reasoning = Field(
        "keep", description="reasoning in demonstrations: learn it, or leave it out"
    )
    too_long: TooLong = Field(
        "drop",
        description="rows with more tokens than fit: drop them up to the share drop_at_most of "
        "a split (one at least), cut demonstrations off, or refuse the data",
    )
    timeout_s: float = Field(5.0, gt=0, description="seconds that one call of a reward may take")
    # A pipeline gives it. A split that one requires has an entry in
    # `data/requirements.py: REQUIREMENTS`.
    required: list[Split] = Field(
        [],
        description="splits that later stages cannot do without: data that has no row for "
        "one is refused",
        json_schema_extra=UNTRACKED,
    )
    preparation: Preparation = Field(
        "here",
        description="ray: examine rows with Ray Data, on a cluster if there is one",
        json_schema_extra=UNTRACKED,
    )

    @property
    def wanted(self) -> dict[Split, int | None]:
        """Split → the rows that the user wants in it, in the order in which splits take theirs.

        These are all of `data/sizes.py: SPLITS`. Those of `config/pipeline.py: PAIRS` are settings
        of the pipeline ``dpo`` alone.
        """
        return {
            "eval": self.eval,
            "sft_eval": self.sft_eval,
            "sft": self.sft,
            "preference_eval": self.preference_eval,
            "preference": self.preference,
            "train": self.train,
        }


@component(
    "prompts",
    image="base",
    results={"train": int, "eval": int, "sft": int},
    identity=digest_source_of,
)
def data_prep(stage: Stage, *, options: DataOptions, seed: int = 0) -> Results:
    """Read a source, split it, and prove that every gold answer earns full marks.

    Rows go where their form belongs: prompts with answers to `train`, demonstrations and whole
    conversations to `sft`, pairs to `preference`, and of each a part is held out. All rows of a
    prompt are on one side. Each example's solution is scored by the same rewards as the policy.
    Examples without an answer cannot be checked, and ``facts.unchecked`` counts them. Rows that
    cannot be used, and gold answers that are rejected, are dropped up to the share `drop_at_most`;
    ``facts.dropped`` has their number and the first ten. Raises UserError at an unknown source,
    argument, column or reward, too few examples, or more bad rows than that.
    """
    # A reward that does not exist is an error before the source is read, which may take long.
    if options.rewards is not None:
        parse_spec(json.dumps(options.rewards, sort_keys=True))
    if options.system is not None and not options.chat:
        raise UserError("data_prep.system", options.system, "needs --chat true")
    # Later stages read these from the data, so that all of them treat rows alike.
    stage.facts.update(
        history=options.history,
        reasoning=options.reasoning,
        too_long=options.too_long,
        drop_at_most=options.drop_at_most,
    )
    splits, sizes = open_source(stage, options.wanted)
    for line in splits.lines:
        stage.log(line)
    bad_rows = Budget(
        "data.bad_rows", "cannot be used", "rows", options.bad_rows, options.drop_at_most
    )
    wrong_answers = Budget(
        "data.wrong_answers",
        "earn less than full marks from their own reward",
        "gold answers",
        options.wrong_answers,
        options.drop_at_most,
    )
    router = Router(splits, sizes, Form(options.chat, options.system), bad_rows)
    builder = RowBuilder(options.rewards, options.reward_args)
    tally = Tally(wrong_answers)
    writers = write_rows(stage, options, router, builder, tally)
    # Bad rows are checked first: they may be why a split has too few.
    bad_rows.check(router.counts.read)
    check_required(options.required, splits, router.counts, options.source)
    check_sizes(splits, sizes, router.counts, options.source)
    check_rewards(splits, sizes, router.counts, builder)
    tally.check_answers(is_default_reward=options.rewards is None)
    # Only now is it decided which splits have a file: one of pairs has none without rows.
    for writer in writers.values():
        writer.close()
    rows_by_split = {
        split: writers[split].rows for split in SPLITS if (stage.out / f"{split}.parquet").exists()
    }
    report_rows(
        stage, options.source, splits, router.counts, (bad_rows, wrong_answers), tally, builder
    )
    if options.preparation == "ray":
        stage.notes["examined"] = dict(tally.hosts)
    stage.facts.update(rows=rows_by_split)
    source = "the mixture" if options.mixture else options.source
    log_counts(stage, rows_by_split, options.train, source)
    return {split: rows_by_split[split] for split in ("train", "eval", "sft")}


def write_rows(
    stage: Stage, options: DataOptions, router: Router, builder: RowBuilder, tally: Tally
) -> dict[Split, SplitWriter]:
    """Read all rows, prove their gold answers, and give each to the writers of its splits.

    Args:
        options: say how rows are examined, and how long that may take.
        router: reads the source, and decides which rows go where.
        builder: makes a row of a table of each example.
        tally: counts what was proved.

    Returns:
        The writers, which are still open: the counts decide which splits get a file.

    Raises:
        UserError: the source cannot be read, or too many rows cannot be used.
        Interrupted: on SIGTERM.
    """
    judge = functools.partial(examine_answers, timeout_s=options.timeout_s)
    expected = sum(size.number or 0 for size in router.sizes.values())
    bar = stage.progress(router.total or expected, "rows")

    def examine_here(tables: Iterable[pa.Table], function: Examine) -> Iterator[pa.Table]:
        # A table may take minutes, so SIGTERM has to end the stage within it.
        return map(functools.partial(function, progress=lambda _: stage.check_stop()), tables)

    has_ray = options.preparation == "ray"
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
    stage: Stage, counts: Mapping[Split, int | None]
) -> tuple[Splits, dict[Split, Size]]:
    """Open the source of a stage's parameters, and choose how many rows each split gets.

    Args:
        counts: split → the rows that the user wants in it; None: as many as fit.

    Raises:
        UserError: the source is unknown, or does not take its arguments.
    """
    source, arguments = find_source_of(vars(stage.params))
    splits = load_source(source, arguments, count_wanted(counts), stage.seed("data"))
    # Only a generator has as many rows as are asked for.
    is_endless = splits.rows is None and source != FILES
    return splits, choose_sizes(counts, splits.rows, splits.separate, is_endless)


if __name__ == "__main__":
    data_prep.main()
