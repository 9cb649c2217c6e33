"""Prompts, demonstrations and pairs from any source, held-out parts apart, every gold answer checked."""

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, validate_call

from tuneloop.core import plugins
from tuneloop.core.component import UNTRACKED, Results, Stage, component, convert_validation_error
from tuneloop.core.errors import UserError
from tuneloop.data import Splits
from tuneloop.data.budgets import Budget, Policy
from tuneloop.data.columns import Columns
from tuneloop.data.files import Part
from tuneloop.data.layouts import find_layout
from tuneloop.data.readers.opening import is_place
from tuneloop.data.sizes import SPLITS, Size, Split, choose_sizes, count_wanted
from tuneloop.data.splitting import Counts, Form, Router
from tuneloop.data.tables import (
    Examine,
    Preparation,
    RowBuilder,
    build_tables,
    examine_answers,
    open_writers,
    ray_data,
    select_split,
)
from tuneloop.formats.chat_forms import Reasoning
from tuneloop.formats.conversations import History
from tuneloop.formats.too_long import TooLong
from tuneloop.rewards.scoring import parse_spec

FILES = "files"
"""The source that a path, a glob, a folder or a name on the hub stands for."""
SHOWN_ORDER: tuple[Split, ...] = (
    "train",
    "eval",
    "sft",
    "sft_eval",
    "preference",
    "preference_eval",
)


def find_source(
    source: str, arguments: Mapping[str, Any], **of_files: Any
) -> tuple[str, dict[str, Any]]:
    """Return the source that a setting names, and its arguments: a path stands for `FILES`. Raises
    UserError: a setting of files beside another source."""
    chosen = {name: value for name, value in of_files.items() if value}
    name = source
    own = dict(arguments)
    if chosen.get("mixture"):
        name = FILES
    elif not is_source_name(source):
        name = FILES
        own["path"] = source
    if chosen and name != FILES:
        setting = next(iter(chosen))
        remedy = f"is for files; {source} makes its own rows"
        raise UserError(f"data.{setting}", chosen[setting], remedy)
    return name, {**own, **chosen}


def is_source_name(source: str) -> bool:
    """Return whether a text names a source, by a short name or a dotted path, and no place."""
    if source in plugins.list_variants("data"):
        return True
    return ":" in source and "/" not in source and not is_place(source)


def source_digest(params: Any) -> dict[str, str]:
    """Return the digest of the files that a source reads, to identify their contents; empty if it
    reads none."""
    try:
        source, arguments = _find_source_of(params)
        module = plugins.load_variant("data", source)
    except (ImportError, UserError):
        # The stage says so, if it runs.
        return {}
    digest = getattr(module, "digest_source", None)
    value = digest(arguments) if digest else None
    return {"source_digest": value} if value else {}


def _find_source_of(params: Any) -> tuple[str, dict[str, Any]]:
    return find_source(
        params.source,
        params.source_args,
        layout=params.layout,
        columns=params.columns,
        mixture=params.mixture,
    )


def _find_loader(source: str, arguments: Mapping[str, Any], prefix: str) -> Callable[..., Splits]:
    """Find the loader of a source, and check the names of its arguments; `prefix` begins their
    errors."""
    load: Callable[..., Splits] = plugins.load_variant("data", source, "load_splits")
    for name, parameter in plugins.check_variant_args(
        source, load, arguments, first=2, prefix=prefix
    ).items():
        if parameter.default is parameter.empty and name not in arguments:
            raise UserError(f"{prefix}{name}", None, f"is required by {source}")
    return load


def _check_source(source: str) -> str:
    """Refuse what is neither a source nor a place."""
    if source and not is_source_name(source) and not is_place(source):
        known = ", ".join(plugins.list_variants("data"))
        remedy = f"unknown; known: {known}, a dotted path pkg.mod:attr, a file, a glob or a folder"
        raise ValueError(remedy)
    return source


def _check_arguments(written: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """Refuse wrong arguments before anything runs, if the source ships with tuneloop and its packages
    are installed."""
    arguments = written
    # None: refused already.
    source = info.data.get("source")
    if source is not None and not is_source_name(source):
        arguments = {**arguments, "path": source}
        source = FILES
    if source == FILES and not (arguments.get("path") or info.data.get("mixture")):
        raise UserError("path", None, "is required: a file, a glob, a folder or hf://…")
    if source in plugins.list_shipped_variants("data"):
        with suppress(ImportError):
            load = _find_loader(source, arguments, "")
            try:
                validate_call(functools.wraps(load)(lambda *_, **__: None))(0, 0, **arguments)
            except ValidationError as error:
                raise convert_validation_error(error) from None
    return written


def _check_layout(layout: str | None) -> str | None:
    if layout is not None:
        find_layout(layout)
    return layout


def _check_columns(columns: dict[str, Any]) -> dict[str, Any]:
    try:
        Columns(**columns)
    except ValidationError as error:
        raise convert_validation_error(error) from None
    return columns


def _check_mixture(mixture: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for number, part in enumerate(mixture):
        try:
            Part(**part)
        except ValidationError as error:
            raise convert_validation_error(error, f"{number}.") from None
    return mixture


Rows = Annotated[int | None, Field(ge=0)]


@component(
    "prompts", image="base", results={"train": int, "eval": int, "sft": int}, identity=source_digest
)
def data_prep(
    stage: Stage,
    *,
    source: Annotated[
        str,
        AfterValidator(_check_source),
        Field(
            description="a file, a glob, a folder, a data set of the hub; or digits, functions, "
            "reasoning_gym, or a dotted path"
        ),
    ] = "digits",
    layout: Annotated[
        str | None,
        AfterValidator(_check_layout),
        Field(description="of a file: what its columns are (docs/data.md); default: recognised"),
    ] = None,
    columns: Annotated[
        dict[str, Any],
        AfterValidator(_check_columns),
        Field(description="of a file: prompt, answer, completion, … → column, or path in a column"),
    ] = {},  # noqa: B006
    mixture: Annotated[
        list[dict[str, Any]],
        AfterValidator(_check_mixture),
        Field(description="several files: source, weight, layout and columns of each"),
    ] = [],  # noqa: B006
    source_args: Annotated[
        dict[str, Any],
        AfterValidator(_check_arguments),
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
            description="turns of a conversation: learned together where the chat template shows them alike, "
            "or each as a row of its own"
        ),
    ] = "as-rendered",
    reasoning: Annotated[
        Reasoning, Field(description="reasoning in demonstrations: learn it, or leave it out")
    ] = "keep",
    too_long: Annotated[
        TooLong,
        Field(
            description="rows with more tokens than fit: drop them up to the share drop_at_most, cut "
            "demonstrations off, or refuse the data"
        ),
    ] = "drop",
    timeout_s: Annotated[
        float, Field(gt=0, description="seconds that one call of a reward may take")
    ] = 5.0,
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
    judge = functools.partial(examine_answers, timeout_s=timeout_s)
    expected = sum(size.number or 0 for size in sizes.values())
    bar = stage.progress(splits.rows or expected, "rows")

    def examine_here(tables: Iterable[pa.Table], function: Examine) -> Iterator[pa.Table]:
        return map(functools.partial(function, progress=lambda _: stage.check_stop()), tables)

    writers = open_writers(stage.out)
    with (
        stage.timed("prepare"),
        ray_data() if preparation == "ray" else nullcontext(examine_here) as mapped,
    ):
        rows = map(builder.build, router.route())
        for table in mapped(build_tables(rows), judge):
            stage.check_stop()
            proved = tally.add(table)
            for split, writer in writers.items():
                writer.add(select_split(proved, split))
            bar.update(tally.examined)
    bad.check(router.counts.read)
    _check_sizes(splits, sizes, router.counts, source)
    wrong.check(tally.examined - tally.unchecked)
    for writer in writers.values():
        writer.close()
    counts = {
        split: writers[split].rows for split in SPLITS if (stage.out / f"{split}.parquet").exists()
    }
    _report(stage, source, splits, router.counts, (bad, wrong), tally, builder)
    if preparation == "ray":
        stage.notes["examined"] = dict(tally.hosts)
    stage.facts.update(rows=counts)
    short = ""
    if train is not None and counts["train"] < train:
        short = f" of {train} asked for: {_name_source(source, mixture)} has no more"
    shown = {split: str(counts[split]) for split in sorted(counts, key=SHOWN_ORDER.index)}
    shown["train"] += short
    stage.log(", ".join(f"{split} {number}" for split, number in shown.items()))
    return {split: counts[split] for split in ("train", "eval", "sft")}


def open_source(
    stage: Stage, wanted: Mapping[Split, int | None]
) -> tuple[Splits, dict[Split, Size]]:
    """Open the source of a stage's parameters, and choose how many rows each split gets."""
    source, arguments = _find_source_of(stage.params)
    splits = load_source(source, arguments, count_wanted(wanted), stage.seed("data"))
    is_endless = splits.rows is None and source != FILES
    return splits, choose_sizes(wanted, splits.rows, splits.own, is_endless)


def load_source(source: str, arguments: Mapping[str, Any], n: int, seed: int) -> Splits:
    """Load the splits of a source, its arguments checked against the types that it declares. Raises
    UserError: an unknown source or argument, a wrong type, a package that is not installed."""
    try:
        load = _find_loader(source, arguments, "source_args.")
    except ImportError as error:
        extra = "rewards" if source == "reasoning_gym" else "train"
        remedy = f"needs {error.name or error}; pip install 'tuneloop[{extra}]'"
        raise UserError("data_prep.source", source, remedy) from error
    try:
        splits: Splits = validate_call(load)(n, seed, **arguments)
    except ValidationError as error:
        raise convert_validation_error(error, "source_args.") from None
    return splits


def _name_source(source: str, mixture: list[dict[str, Any]]) -> str:
    return "the mixture" if mixture else source


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
