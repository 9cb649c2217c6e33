"""A chat template as a setting: read from a file, with arguments of its own, and written into a
checkpoint.

Arguments are written before the template as defaults, so that all programs render it alike: all
stages, vLLM, and programs of others that load the export.

`base_model` writes them once; no later stage changes a template. `planning/limits.py` reads a file
of a template before anything starts. Tests: `tests/unit/formats/test_chat_forms.py`, and of dates
`tests/unit/stages/test_template_date.py`.
"""

import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.formats.chat_rendering import (
    CannotRender,
    list_chats,
    list_control_ids,
    open_chat,
)

ANSWER = "Understood"
"""What the assistant says in `SAMPLE`: a word that no template has, by which its turn is found."""
SAMPLE = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": "b"},
]
"""A conversation whose rendering shows how a template ends a turn."""
TODAY = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>[^'"]*)(?P=quote)\s*\)""")
"""What shows today's date in a template, by the function that transformers and vLLM give it."""
DEFAULT = "{{%- if {name} is not defined %}}{{%- set {name} = {value} %}}{{%- endif +%}}"
"""The default of an argument, for `str.format`. `+%}` keeps a newline with which a template
begins."""
HAS_TODAY = re.compile(r"\bstrftime_now is (?P<lacks>not )?defined\b")
DEFAULTING = {"defined", "undefined", "default", "d"}
"""Tests and filters of Jinja that a template applies to a name that may be missing."""
SET_BY_CALLERS = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
}
"""Arguments of a template that the programs which render it give, and no user sets: those that
transformers and vLLM pass by themselves. `list_arguments` offers users all others."""


def set_chat_template(tokenizer: Any, file: str | None, arguments: JsonMapping) -> None:
    """Give a tokenizer the chat template of a file, or keep its own, with `arguments` as defaults.
    Raises UserError: no such file, a template with a mistake in it, or an argument that it does not
    have."""
    if file is not None:
        tokenizer.chat_template = read_template(file)
        _compile(tokenizer.chat_template, "model.chat_template", file)
    if not arguments:
        return
    if not tokenizer.chat_template:
        remedy = "goes with a chat template, which the model has not; "
        remedy += "set model.chat_template to a file"
        raise UserError("model.template_args", dict(arguments), remedy)
    _change_templates(tokenizer, lambda template: write_arguments(template, arguments))


def _change_templates(tokenizer: Any, change: Callable[[str], str]) -> None:
    """Put what `change` makes of a tokenizer's template in its place."""
    template = tokenizer.chat_template
    if isinstance(template, str):
        tokenizer.chat_template = change(template)
    else:
        # Some models have several by name, as Command R one for tools.
        tokenizer.chat_template = {name: change(text) for name, text in template.items()}


def fix_date(tokenizer: Any, date: datetime.date) -> bool:
    """Write `date` into a tokenizer's chat template in place of the day on which it is rendered,
    and return whether the template shows one.

    A run that is resumed on another day has the same prompts so, and every program renders
    alike."""
    template = tokenizer.chat_template
    if not template:
        return False
    _change_templates(tokenizer, lambda text: write_date(text, date))
    return bool(tokenizer.chat_template != template)


def write_date(template: str, date: datetime.date) -> str:
    """Return `template` with `date` in place of its calls of ``strftime_now``, and as if that were
    always defined: programs without it would show a date of the template's own."""
    dated = TODAY.sub(lambda call: json.dumps(date.strftime(call["format"])), template)
    # A format that is computed is left, and with it the test whether there is such a function.
    if "strftime_now" in HAS_TODAY.sub("", dated):
        return dated
    return HAS_TODAY.sub(lambda test: "false" if test["lacks"] else "true", dated)


def read_template(file: str) -> str:
    """Read a chat template. Raises UserError: it cannot be read, or is empty."""
    try:
        template = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        remedy = f"cannot be read: {reason}; give it a file with a Jinja template"
        raise UserError("model.chat_template", file, remedy) from error
    if not template.strip():
        raise UserError("model.chat_template", file, "is empty; give it a Jinja template")
    return template


def write_arguments(template: str, arguments: JsonMapping) -> str:
    """Return `template` with `arguments` as its defaults. Raises UserError: it has no argument of
    that name, or the value cannot be written into it."""
    names = list_arguments(template)
    defaults = ""
    for name, value in arguments.items():
        if name not in names:
            listed = ", ".join(sorted(names)) or "none"
            remedy = f"the chat template has no such argument; it has {listed}"
            raise UserError(f"model.template_args.{name}", value, remedy)
        defaults += DEFAULT.format(name=name, value=write_literal(name, value))
    return defaults + template


def list_arguments(template: str) -> set[str]:
    """List the arguments of a template: the names that it reads, beside messages and tools, and
    does not set itself, and those for which it has a default."""
    from jinja2 import meta, nodes

    environment = _compile(template, "chat template", "").environment
    # Jinja knows what a template reads and never sets. A name with a default is often set in a
    # branch, so it is looked for by its test and its filter.
    tree = environment.parse(template)
    stored: set[str] = set()
    optional: set[str] = set()
    parameters: set[str] = set()
    for node in tree.find_all((nodes.Name, nodes.Test, nodes.Filter)):
        if isinstance(node, nodes.Name):
            if node.ctx == "store":
                stored.add(node.name)
            elif node.ctx == "param":
                parameters.add(node.name)
        elif node.name in DEFAULTING and isinstance(node.node, nodes.Name):
            optional.add(node.node.name)
    # Jinja counts the parameters of a macro among the names that are read.
    names = set(meta.find_undeclared_variables(tree)) - (stored - optional) - parameters
    return names - SET_BY_CALLERS - set(environment.globals)


def write_literal(name: str, value: Any) -> str:
    """Write a JSON value as Jinja has it. Raises UserError for another value."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return json.dumps(value)
    if isinstance(value, list):
        return "[" + ", ".join(write_literal(name, part) for part in value) + "]"
    if isinstance(value, dict):
        parts: list[str] = []
        for key, part in value.items():
            literal = write_literal(name, part)
            parts.append(f"{json.dumps(str(key))}: {literal}")
        return "{" + ", ".join(parts) + "}"
    raise UserError(f"model.template_args.{name}", value, "is not a JSON value")


def find_turn_end(tokenizer: Any, stops: set[int]) -> int | None:
    """Find the control token that ends every turn of the assistant under the chat template, if none
    of `stops` does: Gemma's ``<end_of_turn>`` where only ``<eos>`` is a stop. None: a stop ends
    turns, or nothing of that kind does."""
    if not tokenizer.chat_template:
        return None
    for chat in list_chats(open_chat(tokenizer, SAMPLE, None)):
        try:
            last = chat.render(2, prompt=False)
            between = chat.render(3, prompt=False)
        except CannotRender:
            continue
        if ANSWER in last and ANSWER in between:
            break
    else:
        return None
    last_ids = chat.encode(last.rpartition(ANSWER)[2], start=False)
    between_ids = chat.encode(between.rpartition(ANSWER)[2], start=False)
    # How a turn ends whether another follows or not.
    shared: list[int] = []
    for token, other in zip(last_ids, between_ids):
        if token != other:
            break
        shared.append(token)
    controls = list_control_ids(tokenizer)
    ends = [token for token in shared if token in controls]
    # What ends the last turn alone (Phi-3's EOS, gpt-oss' <|return|>) counts only where nothing
    # ends all turns.
    ends = ends or [token for token in last_ids if token in controls]
    return None if not ends or stops.intersection(ends) else ends[-1]


def _compile(template: str, field: str, value: str) -> Any:
    """Compile a template as transformers does. Raises UserError: it is no Jinja template."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        return _compile_jinja_template(template)
    except TemplateError as error:
        remedy = f"is not a Jinja template: {error}"
        # Only errors of its syntax have a line.
        line = getattr(error, "lineno", None)
        if line:
            remedy += f" (line {line})"
        raise UserError(field, value, remedy) from error
