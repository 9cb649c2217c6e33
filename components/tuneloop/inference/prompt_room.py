"""Prompts that leave too little room for a completion.

Others take their place, the same ones at every attempt of a stage.

The rule for dropped rows is the data's (`formats/too_long.py`). `base_model` counts the same
prompts before anything is trained (`formats/prompt_lengths.py: check_prompts`): both have to count
alike, or a run that it accepted ends here. `inference/generate.py` is the only caller;
`tests/unit/stages/test_too_long.py` has the tests.
"""

from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import dataclass, field

from tuneloop.core.component import Stage
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.core.wording import format_count
from tuneloop.formats.rollouts import Request
from tuneloop.formats.rows import name_row
from tuneloop.formats.too_long import SHOWN, LengthPolicy


@dataclass(frozen=True)
class Spares:
    """What becomes of prompts that do not fit: `stages/rollout.py`, `stages/evaluate.py` and
    `inference/held_out.py` make one each.

    Attributes:
        rows: rows that take their place, in the order in which they are taken. They are a function
            of the seed and the batch.
        rule: what the data says about rows that are too long.
        total: the number of rows of which `rule` limits the dropped share; 0: any number may be
            replaced, as the batch of `rollout` is a sample and `base_model` has checked the whole.
        required: raise an error if the rows run out; otherwise the batch gets smaller.
    """

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
    """Replace, in place, the prompts that are too long by spare rows.

    The batch keeps its size and order; without spare rows it gets smaller, unless they are
    required. Counts and the first rows are left in ``facts.too_long``.

    Args:
        stage: gets the fact, and a line in its log.
        rows: of prompts; `rows`, `groups` and `requests` have one entry a row each.
        groups: the name of each row's group, which stays when its row is replaced.
        requests: of each row.
        spares: what takes the place of a row.
        encode: makes the request of the row at an index anew.
        fixed: the first rows have begun to be completed, and cannot be replaced.
        room: maximum tokens of a prompt.
        problem: of the error.

    Raises:
        UserError: too many prompts are too long.
    """
    long: list[str] = []
    # Backwards, as the deletion of a row moves those behind it.
    for index in reversed(range(len(requests))):
        # A spare row may be too long, too.
        while len(requests[index].prompt_ids) > room:
            length = len(requests[index].prompt_ids)
            name = name_row(rows[index])
            long.append(f"{name} ({format_count(length, 'token')})")
            if index < fixed or spares.rule.action == "refuse":
                raise UserError(f"prompts row {name}", length, problem)
            spare = next(spares.rows, None)
            if spare is None and spares.required:
                raise UserError(f"prompts row {name}", length, problem)
            if spare is None:
                del rows[index]
                del groups[index]
                del requests[index]
                break
            rows[index] = spare
            requests[index] = encode(index)
    if not long:
        return
    if spares.total:
        spares.rule.check_share(len(long), spares.total, long, problem)
    if not requests:
        raise UserError("prompts", format_count(len(long), "row"), problem)
    stage.facts["too_long"] = {"skipped": len(long), "first": long[:SHOWN]}
    examples = "; ".join(long[:3])
    stage.log(
        f"{format_count(len(long), 'prompt')} of more than {format_count(room, 'token')} skipped "
        f"({examples})"
    )
