"""What a pipeline needs of its data, and what helps where the data does not have it.

A pipeline of `pipelines/` states what it cannot do without as the parameter `required` of
`stages/data_prep.py`, which accepts every split. One that a pipeline requires needs an entry in
`REQUIREMENTS`: without it, data that has no row for the split ends the stage with a KeyError.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tuneloop.core.errors import UserError
from tuneloop.data import Splits
from tuneloop.data.sizes import Split
from tuneloop.data.splitting import Counts


@dataclass(frozen=True)
class Requirement:
    """Rows of one form, in the words of an error.

    Attributes:
        rows: what they are, in the plural.
        columns: how a user names the columns that make a row one of them.
        command: what a user can run with rows of this form alone.
            `tests/unit/data/test_requirements.py` gives each pipeline rows of every form.
    """

    rows: str
    columns: str
    command: str


REQUIREMENTS: dict[Split, Requirement] = {
    "train": Requirement(
        rows="prompts to sample completions of",
        columns="the columns of prompts and answers (data.columns.prompt, data.columns.answer; "
        "without answers data.rewards, too)",
        command="tuneloop run grpo",
    ),
    "sft": Requirement(
        rows="demonstrations to learn from",
        columns="the columns of prompts and completions (data.columns.prompt, "
        "data.columns.completion) or of conversations (data.columns.messages)",
        command="tuneloop run sft",
    ),
    "preference": Requirement(
        rows="pairs of a better and a worse completion",
        columns="their columns (data.columns.chosen, data.columns.rejected)",
        command="tuneloop run dpo --set sft=null",
    ),
}


def check_required(required: Sequence[Split], splits: Splits, counts: Counts, source: str) -> None:
    """Check that each split that later stages cannot do without has a row. Raises UserError: it
    says what was recognised, and what can be done with these rows."""
    for split in required:
        if counts.taken[split]:
            continue
        requirement = REQUIREMENTS[split]
        # What was taken for what is the usual reason why rows are not those that a user expected.
        recognised = f" ({'; '.join(splits.lines)})" if splits.lines else ""
        if counts.fitting[split]:
            remedy = (
                f"no {requirement.rows} are left for the split {split!r}{recognised}: ask for more "
                f"(data.{split}), hold out fewer (data.{split}_eval), or give it more data"
            )
            raise UserError("data", source, remedy)
        remedy = f"has no {requirement.rows}{recognised}: name {requirement.columns}"
        # Rows of another form may be no mistake: another pipeline trains on them.
        for other, alternative in REQUIREMENTS.items():
            if counts.fitting[other]:
                remedy += f"; its rows are {alternative.rows}, which are for "
                remedy += f"`{alternative.command}`"
        raise UserError("data", source, remedy)
