"""Sources of prompts: one file a source, each with ``load_splits(n, seed, *, …) -> Splits``.

`n` is how many examples will be asked for in all splits together, and `seed` decides their order.
The source's own typed arguments follow: `data_prep` gets them as ``source_args``. A source that
reads files also has ``digest_source(source_args) -> str | None``: equal for equal bytes, so that a
run never goes on with data that changed. It is found in a module alone: a source that is named by a
dotted path to its function has none (`data/sources.py: digest_source_of`). All rows of a source
that says how many it has are taken by default. A source that does not say it makes as many as are
asked for; its default numbers are in `data/sizes.py: MADE_TO_ORDER`.

How rows are split and their answers checked belongs to the stage `data_prep`. `readers` open files,
`layouts` say what their columns mean, `messages` makes chats of one form, and `splitting` decides
which split a row belongs to.

A file here is a source that users may name, unless it is in `NOT_VARIANTS`: a module of helpers has
to be added there. A source that needs a library of an extra names the extra in
`data/sources.py: load_source`.

A split that is added needs a row in each table by split: here in `Splits`; all of `data/sizes.py`;
in `data/splitting.py` `Router._list_fitting` and `_open_streams`; `data/tables.py: SCHEMAS`; the
options of `stages/data_prep.py`; and, of those that read it, `training/corpora.py: SIDES`,
`training/pairs.py: SPLITS`, `inference/held_out.py: REFERENCES` and `config/pipeline.py: PAIRS`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.formats.chat_forms import Message

NOT_VARIANTS = (
    "budgets",
    "columns",
    "layout_tables",
    "layouts",
    "messages",
    "preparation",
    "ray_tables",
    "readers",
    "requirements",
    "sizes",
    "sources",
    "splitting",
    "tables",
)
"""Modules of this package that are no sources; `core/plugins.py: list_shipped_variants` reads
it."""

Prompt = str | list[Message]
"""Text, or chat messages (``role``, ``content``)."""


class BadValue(ValueError):
    """Raised for a row that cannot be used as it is; the text says why, without the row's name.

    `data/layout_tables.py`, the readers and `Router.route` turn it into a `BadRow`. A source must
    not raise it from its stream, where nobody catches it: it yields a `BadRow`.
    """


@dataclass(frozen=True)
class BadRow:
    """A row that a source could not use: its name as the user's file has it, and the reason."""

    row: str
    reason: str


@dataclass(frozen=True)
class Example:
    """One prompt and what is known of its answer.

    A field that is added reaches no stage by itself: what is written is a column of
    `data/tables.py: SCHEMAS`, filled by `RowBuilder.build`. `data/splitting.py: check_row` checks
    the texts, and `Router._is_new` says which fields make two rows different.

    Attributes:
        prompt: messages that end with the assistant's are a whole conversation: SFT learns every
            turn of the assistant, and RL nothing from it.
        answer: the gold answer, as rewards get it. Without one (None) nothing can be checked.
        solution: a completion that must earn full marks; None: the answer itself.
        demonstration: a completion for SFT to imitate, and the chosen one of a pair; None: the
            solution.
        rejected: the worse completion of a pair.
        metadata: JSON, for the rewards: settings of a reward under its name (``code``), what a row
            has to be judged by under a key that the reward's module states (``tests``,
            ``choices``). The key ``environment`` is the rollout's
            (`formats/rollouts.py: build_reward_inputs`).
        tools: JSON schemas of the functions that the prompt offers, in OpenAI's form.
        conversation: a whole conversation for SFT, where `prompt` is a prompt with an answer.
        row: the name of the row in the user's file: ``FILE:LINE`` or ``FILE row N``.
        rewards: reward → weight, where the user names none; None:
            `data/tables.py: DEFAULT_REWARDS`.
        is_plain: whether a prompt that is text stays text though ``data.chat`` makes chats of
            others.
        key: text by which rows have the same prompt; None: the prompt itself
            (`data/splitting.py: _get_key`).
        nulls: how many null fields of nested columns were left out of the row.
    """

    prompt: Prompt
    answer: str | None
    solution: str | None = None
    demonstration: str | None = None
    rejected: str | None = None
    metadata: JsonObject = field(default_factory=dict)
    tools: list[JsonObject] | None = None
    conversation: list[Message] | None = None
    row: str | None = None
    rewards: Mapping[str, float] | None = None
    is_plain: bool = False
    key: str | None = None
    nulls: int = 0

    @property
    def is_conversation(self) -> bool:
        """Whether the prompt is a whole conversation."""
        return isinstance(self.prompt, list) and self.prompt[-1]["role"] == "assistant"

    @property
    def full_solution(self) -> str | None:
        """The completion that must earn full marks; None where there is no answer."""
        return self.answer if self.solution is None else self.solution

    @property
    def completion(self) -> str | None:
        """What follows the prompt for SFT, and in the better side of a pair. None: nothing does, or
        the prompt is a whole conversation, which has it already."""
        if self.is_conversation:
            return None
        return self.full_solution if self.demonstration is None else self.demonstration


ReadExample = Example | BadRow
"""What a source makes of a row."""
Examples = Iterable[ReadExample]
ExampleStream = Iterator[ReadExample]


@dataclass(frozen=True)
class Splits:
    """Examples for each split. Each is read as far as is needed, in the order of
    `data/splitting.py: Router._list_order`. Splits that are given one and the same object share its
    iterator, so that each takes the rows after those of the split before it.

    Attributes:
        preference: pairs; None: they come from `train`.
        sft_eval: held-out demonstrations; None: they come from `sft`.
        preference_eval: held-out pairs; None: they come from where `preference` does.
        rows: how many rows `train` has; None: as many as are asked for.
        separate: the splits that have a table of their own, and take all of it by default.
        unread: columns of `train` that nothing is read from; listed by the message of
            `data/preparation.py: check_rewards`.
        lines: what a source has to say of its files, a sentence each; for the log and for the
            message of `data/requirements.py: check_required`.
        facts: entries for the manifest's facts; `runs/prepared_data.py` reads ``recognised``.
    """

    train: Examples
    eval: Examples
    sft: Examples
    preference: Examples | None = None
    sft_eval: Examples | None = None
    preference_eval: Examples | None = None
    rows: int | None = None
    separate: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    facts: JsonMapping = field(default_factory=dict)

    @classmethod
    def of(cls, stream: Examples) -> "Splits":
        """Cut all splits from one stream."""
        # One iterator, so that no row is in two splits: each takes the next rows. The order is that in
        # which `data_prep` reads them.
        stream = iter(stream)
        return cls(train=stream, eval=stream, sft=stream)
