"""Sources of prompts: one file a source, each with ``load(n, seed, *, …) -> Splits``.

`n` is how many examples will be asked for in all splits together, `seed` decides their order; what follows are the
source's own typed arguments, given to `data_prep` as ``source_args``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from tuneloop.errors import UserError


@dataclass(frozen=True)
class Example:
    """One prompt and what is known of its answer.

    Attributes:
        prompt: text, or chat messages (``role``, ``content``).
        answer: the gold answer, as rewards get it.
        solution: a completion that must earn full marks; None: the answer itself.
        demonstration: a completion for SFT to imitate; None: the solution.
        metadata: JSON, for the rewards; what is meant for one reward stands under its name.
    """

    prompt: str | list[dict[str, Any]]
    answer: str
    solution: str | None = None
    demonstration: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Splits:
    """Examples for each split. Each is read as far as is needed, `eval` first, then `sft`, then `train`: splits that
    share one iterator share nothing else."""

    train: Iterable[Example]
    eval: Iterable[Example]
    sft: Iterable[Example]

    @classmethod
    def of(cls, stream: Iterable[Example]) -> Splits:
        """All splits cut from one stream."""
        stream = iter(stream)
        return cls(train=stream, eval=stream, sft=stream)


class Columns(BaseModel):
    """Which columns of a table hold what.

    Attributes:
        prompt: text or a list of chat messages.
        answer: text or a number.
        completion: a worked solution that ends in the answer; None: there is none.
        metadata: columns that the rewards want to see.
        answer_regex: cuts the answer out of its column: the first group of the first match (GSM8K: ``#### (.+)``).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompt: str = "prompt"
    answer: str = "answer"
    completion: str | None = None
    metadata: tuple[str, ...] = ()
    answer_regex: str | None = None

    def examples(self, rows: Sequence[Mapping[str, Any]], where: str, seed: int | None) -> Iterator[Example]:
        """`rows` as examples, in an order that `seed` decides (None: as they are).

        Args:
            rows: the table.
            where: names it in errors.
            seed: of the order.

        Raises:
            UserError: no rows, a column that is missing, or a value that is no prompt or answer.
        """
        if not len(rows):
            raise UserError("data", where, "is empty; point it at a table with at least one row")
        for role, column in self._columns():
            if column not in rows[0]:
                known = ", ".join(rows[0])
                raise UserError(f"source_args.columns.{role}", column, f"no such column in {where}; it has: {known}")
        order = list(range(len(rows)))
        if seed is not None:
            random.Random(seed).shuffle(order)
        return (self._example(rows[index], f"{where} row {index}") for index in order)

    def _columns(self) -> Iterator[tuple[str, str]]:
        yield from (("prompt", self.prompt), ("answer", self.answer))
        if self.completion:
            yield "completion", self.completion
        yield from (("metadata", column) for column in self.metadata)

    def _example(self, row: Mapping[str, Any], where: str) -> Example:
        prompt, answer = row.get(self.prompt), row.get(self.answer)
        if not prompt or not (isinstance(prompt, str) or _is_chat(prompt)):
            raise UserError(where, prompt, f"column {self.prompt!r} must hold text or chat messages")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise UserError(where, answer, f"column {self.answer!r} must hold text or a number")
        solution = row.get(self.completion) if self.completion else None
        if self.completion and not isinstance(solution, str):
            raise UserError(where, solution, f"column {self.completion!r} must hold text")
        metadata = {column: row.get(column) for column in self.metadata}
        return Example(prompt, self._cut(str(answer), where), solution, metadata=metadata)

    def _cut(self, answer: str, where: str) -> str:
        if self.answer_regex is None:
            return answer
        found = re.search(self.answer_regex, answer)
        if found is None or not found.groups():
            raise UserError(
                where, answer, f"source_args.columns.answer_regex {self.answer_regex!r} finds no group in it"
            )
        return found.group(1)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
