"""Which columns of a table hold what, where the user says so: ``data.columns``.

`data/files.py` takes it as an argument of the source, and `data/layout_tables.py` applies it after
the layout: what the user names comes before what was recognised. Layouts name their own columns by
the same class (`data/layouts/__init__.py: Layout.roles`), and share the functions below.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, field_validator, model_validator

from tuneloop.core.errors import UserError, suggest_name
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.data import BadValue, Example, Prompt
from tuneloop.data.messages import (
    get_text,
    is_messages,
    parse_messages,
    parse_text,
    parse_tools,
    parse_turns,
)
from tuneloop.data.readers.strict_json import describe_type, parse_json
from tuneloop.formats.chat_forms import Message

MISSING = object()
"""Stands for the value of a column that a row does not have; null is None."""


class Settings(BaseModel, frozen=True, extra="forbid"):
    """Settings that refuse an unknown key with the nearest one that is known: `Columns`, and
    `data/files.py: Part`."""

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        for key in values if isinstance(values, Mapping) else ():
            if key not in cls.model_fields:
                remedy = f"unknown key; {suggest_name(str(key), cls.model_fields)}"
                raise UserError(str(key), values[key], remedy)
        return values


class Columns(Settings):
    """Which columns hold what. A name may be a path into a column: ``reward_model.ground_truth``;
    where a column holds JSON text, the path goes on in it.

    A field that is added takes effect in `apply` alone. If it is no path, as `answer_regex`, it has
    to be excluded in `list_paths`, which says which columns must exist and which count as read. The
    roles are listed in docs/data.md and in the description of ``columns`` of `stages/data_prep.py`.

    Attributes:
        prompt: text or messages; whole conversations, too.
        messages: another name for `prompt`, which comes first where both are set.
        input: text that follows an instruction after an empty line, where it is not empty (Alpaca).
        system: text of a system message.
        answer: text or a number; None: there are no answers.
        completion: a worked solution that ends in the answer, or a demonstration; None: there is
            none. Text, or (TRL) one message of the assistant.
        chosen: the better completion of a pair; ignored where `completion` is set.
        rejected: the worse completion of a pair; None: there are no pairs.
        tools: a list of schemas, or its JSON text.
        metadata: columns for the rewards, or the names that rewards read → columns.
        answer_regex: cuts the answer out of its column: the first group of the first match
            (GSM8K: ``#### (.+)``).
    """

    prompt: str | None = None
    messages: str | None = None
    input: str | None = None
    system: str | None = None
    answer: str | None = None
    completion: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    tools: str | None = None
    metadata: tuple[str, ...] | dict[str, str] = ()
    answer_regex: str | None = None

    @field_validator("answer_regex")
    @classmethod
    def _check_regex(cls, pattern: str | None) -> str | None:
        try:
            groups = 1 if pattern is None else re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"is no regular expression ({error})") from error
        # Without a group the whole match would be meant, and of `#### (.+)` its mark, too.
        if not groups:
            raise ValueError("has no group: put the part that is the answer in parentheses")
        return pattern

    def list_paths(self) -> dict[str, str]:
        """Return role (`prompt`, `metadata.NAME`, …) → path of its column, for all that are set."""
        paths = self.model_dump(exclude={"metadata", "answer_regex"}, exclude_none=True)
        for name, path in self.metadata_paths.items():
            paths[f"metadata.{name}"] = path
        return paths

    @property
    def metadata_paths(self) -> dict[str, str]:
        """The names that rewards read → the paths of their columns."""
        if isinstance(self.metadata, dict):
            return self.metadata
        return {path: path for path in self.metadata}

    @property
    def is_whole(self) -> bool:
        """Whether they say what the prompt is, so that no layout is needed."""
        return bool(self.prompt or self.messages)

    def check(self, rows: Iterable[JsonMapping], source: str) -> None:
        """Check that each of these columns is in at least one row. Rows are read until all columns
        have been seen. Raises UserError that lists the columns that there are."""
        missing = self.list_paths()
        names: set[str] = set()
        # JSON rows need not have all columns: one is missing only where no row has it.
        for values in rows:
            names.update(values)
            missing = {role: path for role, path in missing.items() if not has_path(values, path)}
            if not missing:
                return
        for role, path in missing.items():
            remedy = f"no such column in {source}; it has: {', '.join(sorted(names))}"
            raise UserError(f"data.columns.{role}", path, remedy)

    def apply(self, example: Example, values: JsonMapping) -> Example:
        """Return `example` with what these columns say of a row.

        The order of the steps counts: `system` needs the prompt, and `completion` is a solution
        only if there is an answer by then.

        Args:
            example: what the layout has read; empty (``Example("", None)``) without a layout.
            values: the row by column.

        Raises:
            BadValue: a value is not what its column is to hold.
        """
        prompt_path = self.prompt or self.messages
        if prompt_path:
            prompt = read_prompt(values, prompt_path)
            context = _read_optional_text(values, self.input)
            if context:
                prompt = f"{_require_text(prompt, prompt_path)}\n\n{context}"
            example = replace(example, prompt=prompt, is_plain=False)
        instructions = _read_optional_text(values, self.system)
        if instructions:
            messages = as_messages(example.prompt)
            # A conversation that has a system message keeps its own.
            if messages[0]["role"] != "system":
                example = replace(example, prompt=add_system(messages, instructions))
        # `answer: null` drops the answers that the layout has read; a key that is not set keeps
        # them.
        if "answer" in self.model_fields_set:
            answer = None
            if self.answer is not None:
                answer = self._cut_answer(read_answer(get_path(values, self.answer), self.answer))
            example = replace(example, answer=answer, solution=None)
        completion_path = self.completion or self.chosen
        if completion_path:
            completion = read_completion(values, completion_path)
            # `Example.solution` is checked to earn the full reward of the answer; without an answer
            # nothing can be checked.
            solution = None if example.answer is None else completion
            example = replace(example, demonstration=completion, solution=solution)
        if self.rejected:
            rejected = read_completion(values, self.rejected)
            if rejected == example.demonstration:
                raise BadValue("chosen and rejected are equal: there is nothing to prefer")
            example = replace(example, rejected=rejected)
        if self.tools:
            tools = get_path(values, self.tools)
            example = replace(example, tools=None if tools is MISSING else parse_tools(tools))
        metadata: JsonObject = {}
        for name, path in self.metadata_paths.items():
            value = get_path(values, path)
            metadata[name] = None if value is MISSING else value
        return replace(example, metadata=example.metadata | metadata)

    def _cut_answer(self, answer: str) -> str:
        if self.answer_regex is None:
            return answer
        match = re.search(self.answer_regex, answer)
        if match is None or match.group(1) is None:
            remedy = f"data.columns.answer_regex {self.answer_regex!r} finds no group in it"
            raise BadValue(f"column {self.answer!r}: {remedy}")
        return match.group(1)


def get_path(values: Any, path: str, above: str = "") -> Any:
    """Return the value at a dotted path, `MISSING` where there is none. A column whose own name has
    a dot comes first, and JSON text on the way is parsed.

    Args:
        values: a row, or a value in it.
        path: below `values`.
        above: the path of `values` in its row, with a dot at its end; for messages.

    Raises:
        BadValue: a text on the way is not JSON; it names the column.
    """
    if isinstance(values, Mapping) and path in values:
        return values[path]
    name, dot, remainder = path.partition(".")
    # A number is an index of a list, from its end where it is negative.
    if isinstance(values, list) and name.lstrip("-").isdigit():
        index = int(name)
        has_index = -len(values) <= index < len(values)
        value = values[index] if has_index else MISSING
    elif isinstance(values, Mapping):
        value = values.get(name, MISSING)
    else:
        value = MISSING
    if not dot or value is MISSING:
        return value
    if isinstance(value, str):
        value = parse_text(value, f"column {f'{above}{name}'!r}")
    return get_path(value, remainder, f"{above}{name}.")


def has_path(values: Any, path: str) -> bool:
    """Return whether there is a value at a path; JSON text on the way that is damaged has none."""
    try:
        return get_path(values, path) is not MISSING
    except ValueError:
        return False


def read_prompt(values: JsonMapping, path: str) -> Prompt:
    """Return the prompt at a path: text, or messages of one form. Raises BadValue: it is neither,
    or empty."""
    value = get_path(values, path)
    # Any list is meant as messages: `parse_messages` names the item that is not one.
    has_items = isinstance(value, list) and len(value) > 0
    if has_items or (isinstance(value, str) and _is_messages_text(value)):
        return parse_messages(value, path)
    return _require_text(value, path)


def read_answer(value: Any, column: str) -> str:
    """Return an answer as text; whole numbers have no decimal point. Raises BadValue: it is neither
    text nor a number, or it is empty."""
    # Parquet has numbers of a column with nulls as floats. From 1e15 on they have not all digits.
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise BadValue(f"column {column!r} has {value}, which is no number")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadValue(f"column {column!r} must hold text or a number, not {_describe(value)}")
    answer = str(value)
    if not answer.strip():
        raise BadValue(f"column {column!r} is empty")
    return answer


def read_completion(values: JsonMapping, path: str) -> str:
    """Return the completion at a path: text, or one message of the assistant's. Raises BadValue: it
    is neither, or empty."""
    value = get_path(values, path)
    if is_messages(value) and len(value) == 1:
        (message,) = parse_turns(value, path)
        if message["role"] == "assistant" and "tool_calls" not in message:
            return get_text(message)
    if not isinstance(value, str):
        kind = "text, or one message of the assistant's"
        raise BadValue(f"column {path!r} must hold {kind}, not {_describe(value)}")
    return _require_text(value, path)


def as_messages(prompt: Prompt) -> list[Message]:
    """Return a prompt as messages: text is a message of the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def add_system(messages: list[Message], text: str) -> list[Message]:
    """Return messages after a system message with a text."""
    return [{"role": "system", "content": text}, *messages]


def split_conversation(messages: list[Message]) -> tuple[list[Message], Message]:
    """Split a whole conversation into its prompt and the last message of the assistant's. Raises
    BadValue: it ends with another's."""
    *prompt, reply = messages
    if reply["role"] != "assistant":
        raise BadValue(f"ends with the {reply['role']}'s message, not the assistant's")
    return prompt, reply


def _read_optional_text(values: JsonMapping, path: str | None) -> str:
    """Return the text of a column that may be missing or blank; empty where it is. Raises BadValue:
    it holds something else."""
    value = MISSING if path is None else get_path(values, path)
    if value is MISSING or value is None:
        return ""
    if not isinstance(value, str):
        raise BadValue(f"column {path!r} must hold text, not {_describe(value)}")
    return value if value.strip() else ""


def _require_text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise BadValue(f"column {column!r} must hold text or chat messages, not {_describe(value)}")
    if not value.strip():
        raise BadValue(f"column {column!r} is empty")
    return value


def _is_messages_text(text: str) -> bool:
    """Return whether text is a JSON list of messages (Hermes, Toucan)."""
    # Most prompts are no JSON, and parsing each of them would take a while.
    if not text.lstrip().startswith("[{") or ('"role"' not in text and '"from"' not in text):
        return False
    try:
        return is_messages(parse_json(text))
    except BadValue:
        return False


def _describe(value: Any) -> str:
    if value is MISSING:
        return "nothing: the row has no such column"
    return describe_type(value)
