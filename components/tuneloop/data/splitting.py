"""Which splits a row belongs to: by its form, its prompt, and the numbers of rows that are wanted.

Whole conversations and demonstrations go to `sft`, prompts with answers to `train`, pairs to
`preference`; held-out rows come first. All rows of a prompt are on one side: what is held out is
never trained. Rows that are equal in all that a split keeps are taken once.

`data_prep` drives `Router.route` once. The splits that rows get follow from their order alone, so
that a retry gives the same files. `tests/unit/stages/test_data_splits.py` holds these rules.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from tuneloop.data import BadRow, BadValue, Example, Examples, ExampleStream, Prompt, Splits
from tuneloop.data.budgets import Budget
from tuneloop.data.columns import add_system, as_messages
from tuneloop.data.readers.strict_json import check_encodable
from tuneloop.data.sizes import HELD_OUT, SPLITS, Size, Split

PROMPT_SPLITS = ("train", "eval")
"""Splits with prompts for RL and its evaluation; `data/tables.py` counts these to find data that
the default reward cannot score."""
DEMONSTRATION_SPLITS = ("sft", "sft_eval")
"""Splits with demonstrations. `Router._is_new` takes any split that is in neither list for
pairs."""


@dataclass(frozen=True)
class Form:
    """How prompts become text.

    Attributes:
        chat: whether a plain prompt becomes the user's message (``data.chat``).
        system: the system message of every chat that has none (``data.system``); None: none is
            added.
    """

    chat: bool = False
    system: str | None = None

    def render(self, prompt: Prompt, is_plain: bool = False) -> tuple[str, bool]:
        """Return the text of the column ``prompt``, and whether it is a chat.

        Args:
            is_plain: whether text stays text, also where `chat` is set."""
        if isinstance(prompt, str) and (is_plain or not self.chat):
            return prompt, False
        messages = as_messages(prompt)
        if self.system is not None and messages[0]["role"] != "system":
            messages = add_system(messages, self.system)
        return dump_json(messages), True


@dataclass(frozen=True)
class RoutedRow:
    """An example with the splits that get it, and what of it becomes columns of text.

    Attributes:
        prompt: text, or JSON of messages where `is_chat`.
        conversation: JSON of messages; None where the prompt is what is learned from.
        tools: JSON of their schemas; None where there are none.
    """

    example: Example
    splits: tuple[Split, ...]
    prompt: str
    is_chat: bool
    conversation: str | None
    tools: str | None


@dataclass
class Counts:
    """What became of the rows that were read. A count that is added is seen by nobody unless
    `data/preparation.py: report_rows` states it.

    Attributes:
        read: rows that the streams gave, bad ones included, which may be a share of them.
        taken: rows by split.
        repeated: rows that are equal to one before them.
        conflicting: rows with the prompt of an earlier one and another answer.
        held_back: rows whose prompt is in a split that cannot have them.
        unused: rows beyond the numbers that were asked for, or of a form that no split takes.
        fitting: rows by the splits that they fit by their form, whether these take them or not.
        nulls: rows of which null fields of nested columns were left out.
    """

    read: int = 0
    taken: Counter[Split] = field(default_factory=Counter)
    repeated: int = 0
    conflicting: int = 0
    held_back: int = 0
    unused: int = 0
    nulls: int = 0
    fitting: Counter[Split] = field(default_factory=Counter)


class Router:
    """Reads the streams of a source, and says of each row which splits it belongs to.

    `_list_fitting` decides by the form of a row, `_choose` by its prompt and by the room in splits,
    `_is_new` by what the splits have already. `stages/data_prep.py` reads `counts`, `sizes` and
    `total`.
    """

    def __init__(
        self, splits: Splits, sizes: Mapping[Split, Size], form: Form, bad_rows: Budget
    ) -> None:
        self.sizes = sizes
        self.form = form
        self.bad_rows = bad_rows
        self.counts = Counts()
        self.total = splits.rows
        # How many rows there are in all is not known beside tables of their own.
        self._checked_early = None if splits.separate else splits.rows
        self._separate = splits.separate
        self._streams = _open_streams(splits)
        # Digests, of 16 bytes each, so that the rows themselves need not be kept: of a prompt → the
        # splits that its rows may go to, as bits; of what a split keeps of its rows; and of a
        # prompt → its answer.
        self._homes: dict[int, int] = {}
        self._contents: set[int] = set()
        self._answers: dict[int, int] = {}
        # Bare answers are demonstrations only where the user wants some, or wants nothing else.
        self._takes_answers = bool(sizes["sft"].number) or sizes["train"].number == 0

    def route(self) -> Iterator[RoutedRow]:
        """Yield all rows that a split gets, as they are read."""
        for split in self._list_order():
            stream = self._streams[split]
            served = [other for other in SPLITS if self._streams[other] is stream]
            while self._has_room(split):
                example = next(stream, None)
                if example is None:
                    break
                self.counts.read += 1
                if isinstance(example, BadRow):
                    self._leave_out(example)
                    continue
                try:
                    routed = self._route_example(example, split, served)
                except BadValue as error:
                    self._leave_out(BadRow(name_row(example), str(error)))
                    continue
                if routed is not None:
                    yield routed

    def _leave_out(self, bad: BadRow) -> None:
        """Count a row that cannot be used. Raises UserError as soon as there are too many."""
        self.bad_rows.add(bad.row, bad.reason)
        self.bad_rows.check_early(self._checked_early)

    def _list_order(self) -> list[Split]:
        """List the splits in the order in which they take rows.

        Held-out tables of the user's come first, whatever their size: the other splits must know
        their prompts before they take rows of other tables."""
        order = [split for split in HELD_OUT if split in self._separate]
        order += [split for split in SPLITS if self.sizes[split].number]
        # Splits that take all rows come last: they would leave none to those with a number.
        order += [split for split in SPLITS if self.sizes[split].number is None]
        return list(dict.fromkeys(order))

    def _has_room(self, split: Split) -> bool:
        number = self.sizes[split].number
        return number is None or self.counts.taken[split] < number

    def _route_example(
        self, example: Example, current: Split, served: list[Split]
    ) -> RoutedRow | None:
        """Choose the splits of an example that was read for the split `current`, from a stream that
        all splits in `served` share. Return None where no split takes it."""
        fitting = self._list_fitting(example)
        self.counts.fitting.update(fitting)
        fitting = [split for split in fitting if split in served]
        if not fitting:
            self.counts.unused += 1
            return None
        prompt, is_chat = self.form.render(example.prompt, example.is_plain)
        conversation = None
        if example.conversation is not None:
            conversation, _ = self.form.render(example.conversation)
        tools = None if example.tools is None else dump_json(example.tools)
        check_row(example, prompt)
        key = _hash(_get_key(example, prompt, is_chat), tools or "")
        chosen = self._choose(key, fitting, current)
        if not chosen:
            return None
        conflicting_before = self.counts.conflicting
        new = tuple(split for split in chosen if self._is_new(split, example, prompt, tools))
        if not new:
            # With another answer it was counted as conflicting.
            self.counts.repeated += self.counts.conflicting == conflicting_before
            return None
        bits = [1 << SPLITS.index(split) for split in chosen]
        self._homes.setdefault(key, sum(bits))
        self.counts.taken.update(new)
        self.counts.nulls += example.nulls > 0
        return RoutedRow(
            example=example,
            splits=new,
            prompt=prompt,
            is_chat=is_chat,
            conversation=conversation,
            tools=tools,
        )

    def _list_fitting(self, example: Example) -> list[Split]:
        """List the splits that take an example of this form. A split that is added is listed here,
        or it never gets a row."""
        is_whole = example.is_conversation
        is_pair = example.rejected is not None
        demonstrations = (example.conversation, example.demonstration, example.solution)
        has_demonstration = is_whole or demonstrations != (None, None, None)
        has_answer = example.answer is not None
        fitting: list[Split] = []
        if not is_whole and (has_answer or not (has_demonstration or is_pair)):
            fitting += ["train", "eval"]
        can_demonstrate = has_demonstration or (has_answer and self._takes_answers)
        # The better side of a pair is a demonstration only where demonstrations were asked for.
        if can_demonstrate and (not is_pair or self.sizes["sft"].number):
            fitting += ["sft", "sft_eval"]
        # A source that makes its rows may make a pair of equals: there is nothing to prefer.
        if is_pair and example.completion not in (None, example.rejected):
            fitting += ["preference", "preference_eval"]
        return fitting

    def _choose(self, key: int, fitting: list[Split], current: Split) -> list[Split]:
        """Choose the splits of a row among those that it fits.

        Args:
            key: digest of its prompt.
            fitting: splits that its form fits, and that share the stream it comes from.
            current: the split for which the stream is read.

        Returns:
            Empty where no split takes it; the row is counted then.
        """
        # All rows of a prompt go where its first one went: what is held out is never trained.
        home = self._homes.get(key)
        if home is not None:
            at_home = [split for split in fitting if home >> SPLITS.index(split) & 1]
            if not at_home:
                self.counts.held_back += 1
                return []
            chosen = [split for split in at_home if self._has_room(split) or self._may_grow(split)]
            if not chosen:
                self.counts.unused += 1
            return chosen
        free = [split for split in fitting if self._has_room(split)]
        limited = [split for split in free if self.sizes[split].number is not None]
        if current in limited:
            return [current]
        if limited:
            # Held-out splits are filled first, from wherever their rows come.
            held_out = [split for split in limited if split in HELD_OUT]
            return [min(held_out or limited, key=SPLITS.index)]
        # Splits that take all rows share them: prompts with solutions are demonstrations, too.
        if not free:
            self.counts.unused += 1
        return free

    def _may_grow(self, split: Split) -> bool:
        """Return whether a held-out split takes further rows of its prompts beyond its number."""
        return split in HELD_OUT and not self.sizes[split].is_exact

    def _is_new(self, split: Split, example: Example, prompt: str, tools: str | None) -> bool:
        """Return whether a split has no row yet that is equal in all that it keeps of this one.

        Metadata and rewards are not compared: rows that differ in these alone count as repeated. A
        column of `data/tables.py: SCHEMAS` by which rows of a split differ has to be hashed here.
        """
        completion = example.completion or ""
        if split in PROMPT_SPLITS:
            content = _hash("prompt", prompt, tools or "")
            answer = _hash(example.answer or "")
            # Of two answers to one prompt, nothing says which is right: the first one is taken.
            self.counts.conflicting += self._answers.setdefault(content, answer) != answer
        elif split in DEMONSTRATION_SPLITS:
            conversation = dump_json(example.conversation) if example.conversation else ""
            content = _hash("demonstration", prompt, tools or "", conversation, completion)
        else:
            content = _hash("pair", prompt, tools or "", completion, example.rejected or "")
        if content in self._contents:
            return False
        self._contents.add(content)
        return True


def check_row(example: Example, prompt: str) -> None:
    """Check what no split can keep. Raises BadValue with the reason."""
    # Messages were checked where they were parsed.
    if isinstance(example.prompt, str) and not prompt.strip():
        raise BadValue("has an empty prompt")
    texts = (example.answer, example.solution, example.demonstration, example.rejected)
    if any(text is not None and not text.strip() for text in texts):
        raise BadValue("has an empty answer or completion")
    check_encodable([prompt, *texts, example.tools, example.conversation])
    try:
        json.dumps(example.metadata, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadValue(f"its metadata is not JSON ({error})") from error


def name_row(example: Example) -> str:
    """Name a row as the user's file does; a row that a source made, by its prompt."""
    if example.row is not None:
        return example.row
    text = example.prompt if isinstance(example.prompt, str) else dump_json(example.prompt)
    return repr(text[:60])


def dump_json(value: Any) -> str:
    """Return JSON text with every character as itself."""
    return json.dumps(value, ensure_ascii=False)


def _open_streams(splits: Splits) -> dict[Split, ExampleStream]:
    """Return the stream of each split; splits that share an iterable share its iterator."""
    pairs = splits.train if splits.preference is None else splits.preference
    sources: dict[Split, Examples] = {
        "eval": splits.eval,
        "sft_eval": splits.sft if splits.sft_eval is None else splits.sft_eval,
        "sft": splits.sft,
        "preference_eval": pairs if splits.preference_eval is None else splits.preference_eval,
        "preference": pairs,
        "train": splits.train,
    }
    iterators = {id(source): iter(source) for source in sources.values()}
    return {split: iterators[id(source)] for split, source in sources.items()}


def _get_key(example: Example, prompt: str, is_chat: bool) -> str:
    """Return the text by which rows have the same prompt. Of a whole conversation that is all
    before its last message. A chat of a single message has the key of the bare text."""
    if example.key is not None:
        return example.key
    if not is_chat:
        return prompt
    messages = json.loads(prompt)
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if len(messages) == 1:
        return str(messages[0]["content"])
    return dump_json(messages)


def _hash(*parts: str) -> int:
    """Digest texts to 128 bits: among a billion rows no two are equal by chance."""
    state = xxhash.xxh3_128()
    for part in parts:
        # With its length, as the same text cut elsewhere is another row.
        data = part.encode("utf-8", "surrogatepass")
        state.update(f"{len(data)}:".encode())
        state.update(data)
    return state.intdigest()
