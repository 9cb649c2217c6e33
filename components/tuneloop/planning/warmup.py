"""Warm-ups that take the whole training: the learning rate never reaches its value.

It looks at stages for which a user has set the number of steps. Where epochs are set instead, the
number of steps depends on the data, and the warm-up is at most a tenth of it (`WARMUP_PARTS` of
`training/delegation.py`), so there is nothing to find.

`planning/limits.py` prints what is found as a note.
"""

from collections.abc import Iterator

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.wording import format_count


def find_long_warmup(parameters: JsonMapping, section: str) -> Iterator[UserError]:
    """Find a warm-up that leaves no step of training at the full learning rate.

    Args:
        parameters: of a stage that trains.
        section: of its settings.
    """
    warmup_steps = parameters.get("warmup_steps")
    max_steps = parameters.get("max_steps")
    if not isinstance(warmup_steps, int) or not isinstance(max_steps, int):
        return
    # The steps of an epoch follow from the data, and the warm-up from the steps.
    if parameters.get("epochs") is not None:
        return
    # In the section `update` a `max_steps` of 0 is none: the loop decides how many there are.
    if max_steps == 0 or warmup_steps == 0 or warmup_steps < max_steps:
        return
    tenth = max_steps // 10
    choice = f"{section}.warmup_steps={tenth}" + (" (a tenth)" if tenth else "")
    remedy = (
        f"is no less than the {format_count(max_steps, 'step')} of {section}.max_steps, so training ends before "
        f"the learning rate is reached; set {choice}, or more steps"
    )
    yield UserError(f"{section}.warmup_steps", warmup_steps, remedy)
