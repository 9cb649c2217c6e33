"""Prompts that leave too little room for a completion: others take their place, the same ones at
every attempt."""

from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import dataclass, field

from tuneloop.core.component import Stage
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.formats.rollouts import Request
from tuneloop.formats.rows import name_row
from tuneloop.formats.too_long import SHOWN, LengthPolicy


@dataclass(frozen=True)
class Spares:
    """What becomes of prompts that do not fit.

    Attributes:
        rows: rows that take their place, in the order in which they are taken; a function of the
        seed and the batch.
        rule: what the data says about rows that are too long.
        total: rows that a share of dropped ones is computed of; 0: any number may be replaced, as a
            batch is a sample and `base_model` has checked the whole.
        required: rows for lack of which the batch cannot be made; else it is smaller."""

    rows: Iterator[JsonObject] = field(default_factory=lambda: iter(()))
    rule: LengthPolicy = field(default_factory=lambda: LengthPolicy("refuse"))
    total: int = 0
    required: bool = True


def replace_long_prompts(
    stage: Stage,
    rows: MutableSequence[JsonObject],
    groups: MutableSequence[str],
    requests: MutableSequence[Request],
    spares: Spares,
    encode: Callable[[int], Request],
    *,
    fixed: int,
    room: int,
    problem: str,
) -> None:
    """Replace, in place, the prompts of more than `room` tokens by spare rows; `encode` encodes row
    `index` anew.

    The first `fixed` have begun, and cannot be replaced. The batch keeps its size and order;
    without spare rows it gets smaller, unless they are required. Counts and the first rows are left
    in ``facts.too_long``. Raises UserError, with `problem`: too many prompts are too long."""
    long: list[str] = []
    for index in reversed(range(len(requests))):
        while len(requests[index].prompt_ids) > room:
            length = len(requests[index].prompt_ids)
            long.append(f"{name_row(rows[index])} ({length} tokens)")
            if index < fixed or spares.rule.action == "refuse":
                raise UserError(f"prompts row {name_row(rows[index])}", length, problem)
            spare = next(spares.rows, None)
            if spare is None and spares.required:
                raise UserError(f"prompts row {name_row(rows[index])}", length, problem)
            if spare is None:
                del rows[index], groups[index], requests[index]
                break
            rows[index] = spare
            requests[index] = encode(index)
    if not long:
        return
    if spares.total:
        spares.rule.check_share(len(long), spares.total, long, problem)
    if not requests:
        raise UserError("prompts", f"{len(long)} rows", problem)
    stage.facts["too_long"] = {"skipped": len(long), "first": long[:SHOWN]}
    stage.log(f"{len(long)} prompts of more than {room} tokens skipped ({'; '.join(long[:3])})")
