"""Sources of prompts: one file a source, each with ``load_splits(n, seed, *, …) -> Splits``.

`n` is how many examples will be asked for in all splits together, `seed` decides their order; what follows are the
source's own typed arguments, given to `data_prep` as ``source_args``. A source that reads files also has
``digest_source(source_args) -> str | None``: equal for equal bytes, so that a run never goes on with data that changed.
How rows are split and their answers checked belongs to the stage `data_prep`."""

import random
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from tuneloop.core.errors import UserError

NOT_VARIANTS = ("tables",)


@dataclass(frozen=True)
class Example:
    """One prompt and what is known of its answer.

    Attributes:
        prompt: text, or chat messages (``role``, ``content``). Messages that end with the assistant's are a whole
            conversation: SFT learns every turn of the assistant, and RL nothing from it.
        answer: the gold answer, as rewards get it; None where there is none, so that nothing can be checked.
        solution: a completion that must earn full marks; None: the answer itself.
        demonstration: a completion for SFT to imitate, and the chosen one of a pair; None: the solution.
        metadata: JSON, for the rewards; what is meant for one reward stands under its name.
    """

    prompt: str | list[dict[str, Any]]
    answer: str | None
    solution: str | None = None
    demonstration: str | None = None
    rejected: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Splits:
    """Examples for each split. Each is read as far as is needed, `eval` first, then `sft`, then pairs, then `train`:
    splits that share one iterator share nothing else. Pairs come from `train` where `preference` is None."""

    train: Iterable[Example]
    eval: Iterable[Example]
    sft: Iterable[Example]
    preference: Iterable[Example] | None = None

    @classmethod
    def of(cls, stream: Iterable[Example]) -> "Splits":
        """Cut all splits from one stream."""
        stream = iter(stream)
        return cls(train=stream, eval=stream, sft=stream)

    @classmethod
    def of_tables(
        cls, places: Mapping[str, str | None], read: Callable[[str, str], Iterator[Example]]
    ) -> "Splits":
        """Read each split from a table of its own where it has a place; `eval` and `sft` else share that of `train`."""
        own = {split: read(split, place) for split, place in places.items() if place}
        return cls(
            own["train"],
            own.get("eval", own["train"]),
            own.get("sft", own["train"]),
            own.get("preference"),
        )


class Columns(BaseModel, frozen=True, extra="forbid"):
    """Which columns of a table hold what. Completions of pairs may be text, or (TRL) one message of the assistant.

    Attributes:
        input: text that follows an instruction after an empty line, where it is not empty (Alpaca).
        answer: text or a number; None: prompts only, or with a `completion` demonstrations only.
        completion: a worked solution that ends in the answer, or the chosen one of a pair; None: there is none.
        rejected: the worse completion of a pair; None: there are no pairs.
        answer_regex: cuts the answer out of its column: the first group of the first match (GSM8K: ``#### (.+)``).
    """

    prompt: str = "prompt"
    input: str | None = None
    answer: str | None = "answer"
    completion: str | None = None
    rejected: str | None = None
    metadata: tuple[str, ...] = ()
    answer_regex: str | None = None

    def examples(
        self, rows: Sequence[Mapping[str, Any]], where: str, seed: int | None
    ) -> Iterator[Example]:
        """Make examples of `rows`, in an order that `seed` decides (None: as they are). Raises UserError: no rows, a
        column that is missing, or a value that is not a prompt or answer."""
        if not len(rows):
            raise UserError("data", where, "is empty; point it at a table with at least one row")
        own = [
            (role, getattr(self, role))
            for role in ("prompt", "input", "answer", "completion", "rejected")
        ]
        for role, column in [*own, *(("metadata", column) for column in self.metadata)]:
            if column is not None and column not in rows[0]:
                known = ", ".join(rows[0])
                raise UserError(
                    f"source_args.columns.{role}",
                    column,
                    f"no such column in {where}; it has: {known}",
                )
        order = array("q", range(len(rows)))
        if seed is not None:
            random.Random(seed).shuffle(order)
        return (self._example(rows[index], f"{where} row {index}") for index in order)

    def _example(self, row: Mapping[str, Any], where: str) -> Example:
        prompt = row.get(self.prompt)
        if not prompt or not (isinstance(prompt, str) or _is_chat(prompt)):
            raise UserError(
                where, prompt, f"column {self.prompt!r} must hold text or chat messages"
            )
        if self.input and row.get(self.input):
            prompt = f"{prompt}\n\n{row[self.input]}"
        answer = None
        if self.answer is not None:
            answer = row.get(self.answer)
            if isinstance(answer, bool) or not isinstance(answer, str | int | float):
                raise UserError(where, answer, f"column {self.answer!r} must hold text or a number")
            answer = str(answer)
            if self.answer_regex is not None:
                found = re.search(self.answer_regex, answer)
                if found is None or not found.groups():
                    remedy = f"source_args.columns.answer_regex {self.answer_regex!r} finds no group in it"
                    raise UserError(where, answer, remedy)
                answer = found.group(1)
        completion, rejected = (
            _text(row, column, where) for column in (self.completion, self.rejected)
        )
        metadata = {column: row.get(column) for column in self.metadata}
        if answer is None:
            return Example(
                prompt, None, demonstration=completion, rejected=rejected, metadata=metadata
            )
        return Example(prompt, answer, completion, rejected=rejected, metadata=metadata)


def _is_chat(value: Any) -> bool:
    messages = value if isinstance(value, list) else []
    return bool(messages) and all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
    )


def _text(row: Mapping[str, Any], column: str | None, where: str) -> str | None:
    if column is None:
        return None
    value: Any = row.get(column)
    if _is_chat(value) and len(value) == 1 and value[0]["role"] == "assistant":
        value = value[0]["content"]
    if not isinstance(value, str):
        raise UserError(
            where, value, f"column {column!r} must hold text, or one message of the assistant's"
        )
    return value
