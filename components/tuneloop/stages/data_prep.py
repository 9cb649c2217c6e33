"""Prompts for training and evaluation and demonstrations for SFT, from any source, every gold answer checked."""

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Annotated, Any, Literal

import pyarrow as pa
import xxhash
from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, validate_call

from tuneloop.core import plugins
from tuneloop.core.component import UNTRACKED, Results, Stage, component, convert_validation_error
from tuneloop.core.errors import UserError
from tuneloop.core.progress import Progress
from tuneloop.data import Example, Splits
from tuneloop.data.tables import (
    Examine,
    Preparation,
    build_tables,
    examine_answers,
    ray_data,
    write_tables,
)
from tuneloop.formats.chat_forms import Reasoning
from tuneloop.formats.conversations import History
from tuneloop.formats.too_long import TooLong
from tuneloop.rewards.scoring import compute_full_marks, find_reward, parse_spec

Split = Literal["train", "eval", "sft", "preference", "preference_eval"]

ASKED = {"id": pa.string(), "prompt": pa.string(), "chat": pa.bool_()}
PROMPTS = pa.schema({**ASKED, **dict.fromkeys(("answer", "reward", "metadata"), pa.string())})
DEMONSTRATIONS = pa.schema({**ASKED, "completion": pa.string()})
PAIRS = pa.schema({**ASKED, "chosen": pa.string(), "rejected": pa.string()})
SCHEMAS: dict[Split, pa.Schema] = {
    "eval": PROMPTS,
    "sft": DEMONSTRATIONS,
    "preference_eval": PAIRS,
    "preference": PAIRS,
    "train": PROMPTS,
}
"""The splits, in the order in which they take rows from a source that they share."""


def source_digest(params: Any) -> dict[str, str]:
    """Return the digest of the files that a source reads, to identify their contents; empty if it reads none."""
    try:
        digest = getattr(plugins.load_variant("data", params.source), "digest_source", None)
    except (ImportError, UserError):  # the stage says so, if it runs
        return {}
    found = digest(params.source_args) if digest else None
    return {"source_digest": found} if found else {}


def _find(source: str, arguments: Mapping[str, Any], prefix: str) -> Callable[..., Splits]:
    """Find the loader of a source, and check the names of its arguments; `prefix` begins their errors."""
    load: Callable[..., Splits] = plugins.load_variant("data", source, "load_splits")
    for name, parameter in plugins.check_variant_args(
        source, load, arguments, first=2, prefix=prefix
    ).items():
        if parameter.default is parameter.empty and name not in arguments:
            raise UserError(f"{prefix}{name}", None, f"is required by {source}")
    return load


def _fitting(arguments: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """Refuse wrong arguments before anything runs, if the source ships with tuneloop and its packages are installed."""
    source = info.data.get("source")  # None: refused already
    if source in plugins.list_shipped_variants("data"):
        with suppress(ImportError):
            load = _find(source, arguments, "")
            try:
                validate_call(functools.wraps(load)(lambda *_, **__: None))(0, 0, **arguments)
            except ValidationError as error:
                raise convert_validation_error(error) from None
    return arguments


@component(
    "prompts", image="base", results={"train": int, "eval": int, "sft": int}, identity=source_digest
)
def data_prep(
    stage: Stage,
    *,
    source: Annotated[
        str,
        plugins.validate_variant("data"),
        Field(description="digits, functions, reasoning_gym, jsonl, huggingface, or a dotted path"),
    ] = "digits",
    source_args: Annotated[
        dict[str, Any],
        AfterValidator(_fitting),
        Field(description="the source's own arguments", validate_default=True),
    ] = {},  # noqa: B006
    train: Annotated[
        int, Field(ge=0, description="maximum training prompts, taken after the others")
    ] = 10_000,
    eval: Annotated[int, Field(ge=0, description="held-out prompts")] = 256,
    sft: Annotated[int, Field(ge=0, description="demonstrations")] = 2000,
    preference: Annotated[
        int, Field(ge=0, description="pairs of a chosen and a rejected completion")
    ] = 0,
    preference_eval: Annotated[int, Field(ge=0, description="held-out pairs")] = 0,
    rewards: Annotated[
        dict[Annotated[str, plugins.validate_variant("rewards")], float],
        Field(description="reward → weight"),
    ] = {"exact": 1.0},  # noqa: B006
    reward_args: Annotated[
        dict[str, Any], Field(description="reward → value of its metadata")
    ] = {},  # noqa: B006
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

    No prompt is in two splits, or twice in one: `eval` is filled first, then `sft`, then the pairs, and `train` gets up
    to its number of the rest. Each example's solution is scored by the same rewards as the policy. Examples without an
    answer (only prompts, demonstrations or pairs) cannot be checked, and ``facts.unchecked`` counts them.
    Raises UserError at an unknown source, argument or reward, too few examples, or a gold answer that is rejected.
    """
    parse_spec(json.dumps(rewards, sort_keys=True))
    if system is not None and not chat:
        raise UserError("data_prep.system", system, "needs --chat true")
    stage.facts.update(history=history, reasoning=reasoning, too_long=too_long)
    wanted = dict(zip(SCHEMAS, (eval, sft, preference_eval, preference, train)))
    splits = load_source(source, source_args, sum(wanted.values()), stage.seed("data"))
    pairs = iter(splits.train if splits.preference is None else splits.preference)
    streams = {
        "eval": splits.eval,
        "sft": splits.sft,
        "preference_eval": pairs,
        "preference": pairs,
    }
    judges = {
        name: weight for name, weight in rewards.items() if not find_reward(name).needs_episode
    }
    tally, seen = Tally(judges), set[bytes]()
    judge = functools.partial(examine_answers, rewards=judges, timeout_s=timeout_s)
    bar = stage.progress(sum(wanted.values()), "rows")

    def here(given: Iterable[pa.Table], function: Examine) -> Iterator[pa.Table]:
        return map(functools.partial(function, progress=lambda _: stage.check_stop()), given)

    with (
        stage.timed("prepare"),
        ray_data() if preparation == "ray" else nullcontext(here) as mapped,
    ):
        for name, number in wanted.items():
            rows = _rows(streams.get(name, splits.train), name, number, seen, stage.params)
            tables = _count_rows(stage, name, mapped(build_tables(rows), judge), tally, bar)
            write_tables(
                stage.out / f"{name}.parquet",
                tables,
                SCHEMAS[name],
                optional=SCHEMAS[name] is PAIRS,
            )
            if (found := tally.rows.get(name, 0)) < (min(number, 1) if name == "train" else number):
                ask = (
                    "one is needed"
                    if name == "train"
                    else f"ask for fewer (set data.{name}), or give it more data"
                )
                raise UserError(
                    f"data_prep.{name}",
                    number,
                    f"{source} has only {found} distinct prompts left; {ask}",
                )
    tally.check()
    counts = {name: tally.rows[name] for name in wanted if (stage.out / f"{name}.parquet").exists()}
    unchecked = {"unchecked": tally.unchecked} if tally.unchecked else {}
    if preparation == "ray":
        stage.notes["examined"] = dict(tally.hosts)
    stage.facts.update(rows=counts, source=source, rewards=rewards, **unchecked)
    short = f" of {train} asked for: {source} has no more" if counts["train"] < train else ""
    stage.log(", ".join(f"{name} {number}" for name, number in counts.items()) + short)
    return {name: counts[name] for name in ("train", "eval", "sft")}


def _count_rows(
    stage: Stage, name: Split, examined: Iterable[pa.Table], tally: "Tally", bar: Progress
) -> Iterator[pa.Table]:
    """Count the rows of a split as they are examined, and yield them; a missing answer becomes an empty one."""
    for table in examined:
        stage.check_stop()
        tally.add(name, table)
        yield table.set_column(
            table.column_names.index("answer"), "answer", table["answer"].fill_null("")
        )
        bar.update(tally.rows.total())


def load_source(source: str, arguments: Mapping[str, Any], n: int, seed: int) -> Splits:
    """Load the splits of a source, its arguments checked against the types that it declares. Raises UserError: an
    unknown source or argument, a wrong type, a package that is not installed."""
    try:
        load = _find(source, arguments, "source_args.")
    except ImportError as error:
        extra = "rewards" if source == "reasoning_gym" else "train"
        remedy = f"needs {error.name or error}; pip install 'tuneloop[{extra}]'"
        raise UserError("data_prep.source", source, remedy) from error
    try:
        found: Splits = validate_call(load)(n, seed, **arguments)
    except ValidationError as error:
        raise convert_validation_error(error, "source_args.") from None
    return found


def _rows(
    examples: Iterable[Example], split: Split, number: int, seen: set[bytes], params: Any
) -> Iterator[dict[str, Any]]:
    """Yield up to `number` rows, made as the stage's `params` say, with prompts not in `seen`; read no more."""
    stream, spec = iter(examples), json.dumps(params.rewards, sort_keys=True)
    made = 0
    while made < number and (example := next(stream, None)) is not None:
        prompt = _prompt(example.prompt, params.chat, params.system)
        if (known := xxhash.xxh3_128_digest(prompt.encode("utf-8", "surrogatepass"))) in seen:
            continue
        name = f"{split}-{made:06d}"
        solution = example.answer if example.solution is None else example.solution
        completion = solution if example.demonstration is None else example.demonstration
        if SCHEMAS[split] is PAIRS:
            if completion is None or example.rejected is None:
                remedy = "needs a chosen and a rejected completion; name both"
                raise UserError(f"data_prep.{split}", prompt[:60], remedy)
            if completion == example.rejected:  # nothing to prefer
                continue
        _check_form(split, example, completion)
        seen.add(known)
        yield {
            "id": name,
            "prompt": prompt,
            "chat": params.chat or isinstance(example.prompt, list),
            "answer": example.answer,
            "reward": spec,
            "metadata": _json({**example.metadata, **params.reward_args}, name),
            "solution": solution,
            "completion": completion,
            "chosen": completion,
            "rejected": example.rejected,
        }
        made += 1


def _check_form(split: Split, example: Example, completion: str | None) -> None:
    """Check that a split can use an example of this form."""
    whole = isinstance(example.prompt, list) and example.prompt[-1]["role"] == "assistant"
    if split == "sft" and completion is None and not whole:
        raise UserError(
            "data_prep.sft", example.prompt, "has no completion; name its column, or set sft to 0"
        )
    if whole and (split != "sft" or completion is not None):
        raise UserError(
            f"data_prep.{split}",
            example.prompt,
            "ends with the assistant's message; only sft takes that",
        )


def _prompt(prompt: str | list[dict[str, Any]], chat: bool, system: str | None) -> str:
    if isinstance(prompt, str) and not chat:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return json.dumps(messages, ensure_ascii=False)


def _json(metadata: Mapping[str, Any], name: str) -> str:
    try:
        return json.dumps(metadata, sort_keys=True, ensure_ascii=False)
    except TypeError as error:
        raise UserError(
            f"data_prep {name}", metadata, f"its metadata is not JSON ({error})"
        ) from error


class Tally:
    """Counts of the examined rows: by split and by host, gold answers that `rewards` reject, rows without an answer."""

    def __init__(self, rewards: Mapping[str, float]) -> None:
        self.rewards, self.rows, self.hosts = rewards, Counter[str](), Counter[str]()
        self.unchecked = self.wrong = 0
        self.examples: list[str] = []

    def add(self, split: Split, table: pa.Table) -> None:
        self.rows[split] += table.num_rows
        self.hosts.update(table["host"].to_pylist())
        self.unchecked += table["answer"].null_count if self.rewards else table.num_rows
        troubles = table["trouble"].drop_null().to_pylist()
        self.wrong += len(troubles)
        self.examples += troubles[: 3 - len(self.examples)]

    def check(self) -> None:
        """Check that every gold answer earned full marks. Raises UserError with the first ones that did not."""
        if self.wrong:
            best, of = compute_full_marks(self.rewards), self.rows.total() - self.unchecked
            told = (
                f"{self.wrong} of {of} gold answers earn less than {best:g} from their own reward: "
            )
            remedy = f"{told}{'; '.join(self.examples)}; correct the data or choose another reward"
            raise UserError("data_prep.rewards", dict(self.rewards), remedy)


if __name__ == "__main__":
    data_prep.main()
