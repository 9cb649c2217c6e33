"""A chat template as a setting: read from a file, with arguments of its own, and written into a
checkpoint.

Arguments stand before the template as defaults, so that every program that renders it, ours or
another, does so alike: all stages, vLLM, and whoever loads the export."""

import datetime
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.formats.chat_rendering import (
    CannotRender,
    list_chats,
    list_control_ids,
    open_chat,
)

SAMPLE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Understood"}]
NEXT = {"role": "user", "content": "b"}
TODAY = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>[^'"]*)(?P=quote)\s*\)""")
"""What shows today's date in a template, by the function that transformers and vLLM give it."""
HAS_TODAY = re.compile(r"\bstrftime_now is (?P<lacks>not )?defined\b")
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
"""Arguments of a template that are not the user's to set."""


def set_chat_template(tokenizer: Any, file: str | None, arguments: Mapping[str, Any]) -> None:
    """Give a tokenizer the chat template of a file, or keep its own, with `arguments` as defaults.
    Raises UserError: no such file, a template with a mistake in it, or an argument that it does not
    have."""
    if file is not None:
        tokenizer.chat_template = read_template(file)
        _compile(tokenizer.chat_template, "model.chat_template", file)
    if not arguments:
        return
    if not tokenizer.chat_template:
        remedy = (
            "goes with a chat template, which the model has not; set model.chat_template to a file"
        )
        raise UserError("model.template_args", dict(arguments), remedy)
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = write_arguments(tokenizer.chat_template, arguments)
        return
    tokenizer.chat_template = {
        name: write_arguments(template, arguments)
        for name, template in tokenizer.chat_template.items()
    }


def fix_date(tokenizer: Any, date: datetime.date) -> bool:
    """Write `date` into a tokenizer's chat template in place of the day on which it is rendered, and
    return whether the template shows one.

    A run that is resumed on another day has the same prompts so, and every program renders alike."""
    template = tokenizer.chat_template
    if not template:
        return False
    if isinstance(template, str):
        tokenizer.chat_template = write_date(template, date)
        return bool(tokenizer.chat_template != template)
    tokenizer.chat_template = {name: write_date(text, date) for name, text in template.items()}
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
        raise UserError(
            "model.chat_template",
            file,
            f"cannot be read: {reason}; give it a file with a Jinja template",
        ) from error
    if not template.strip():
        raise UserError("model.chat_template", file, "is empty; give it a Jinja template")
    return template


def write_arguments(template: str, arguments: Mapping[str, Any]) -> str:
    """Return `template` with `arguments` as its defaults. Raises UserError: it has no argument of
    that name, or the value cannot be written into it."""
    known = list_arguments(template)
    for name, value in arguments.items():
        if name not in known:
            remedy = f"the chat template has no such argument; it has {', '.join(sorted(known)) or 'none'}"
            raise UserError(f"model.template_args.{name}", value, remedy)
    # `+%}` keeps a newline with which the template begins.
    defaults = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {write_literal(name, value)} %}}{{%- endif +%}}"
        for name, value in arguments.items()
    ]
    return "".join(defaults) + template


def list_arguments(template: str) -> set[str]:
    """List the arguments of a template: the names that it reads, beside messages and tools, and
    does not set itself, and those for which it has a default."""
    from jinja2 import meta, nodes

    environment = _compile(template, "chat template", "").environment
    tree = environment.parse(template)
    names = set(meta.find_undeclared_variables(tree))
    names -= {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
    optional = [node for node in tree.find_all(nodes.Test) if node.name in ("defined", "undefined")]
    optional += [node for node in tree.find_all(nodes.Filter) if node.name in ("default", "d")]
    names |= {node.node.name for node in optional if isinstance(node.node, nodes.Name)}
    names &= meta.find_undeclared_variables(tree)
    names -= {node.name for node in tree.find_all(nodes.Name) if node.ctx == "param"}
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
        parts = [
            f"{json.dumps(str(key))}: {write_literal(name, part)}" for key, part in value.items()
        ]
        return "{" + ", ".join(parts) + "}"
    raise UserError(f"model.template_args.{name}", value, "is not a JSON value")


def find_turn_end(tokenizer: Any, stops: set[int]) -> int | None:
    """Find the control token that ends every turn of the assistant under the chat template, if none
    of `stops` does: Gemma's ``<end_of_turn>`` where only ``<eos>`` is a stop. None: a stop ends
    turns, or nothing of that kind does."""
    if not tokenizer.chat_template:
        return None
    answer = str(SAMPLE[1]["content"])
    for chat in list_chats(open_chat(tokenizer, [*SAMPLE, NEXT], None)):
        try:
            last = chat.render(2, prompt=False)
            between = chat.render(3, prompt=False)
        except CannotRender:
            continue
        if answer in last and answer in between:
            break
    else:
        return None
    last_ids = chat.encode(last.rpartition(answer)[2], start=False)
    between_ids = chat.encode(between.rpartition(answer)[2], start=False)
    shared: list[int] = []
    for token, other in zip(last_ids, between_ids):
        if token != other:
            break
        shared.append(token)
    controls = list_control_ids(tokenizer)
    # What ends the last turn alone (Phi-3's EOS, gpt-oss' <|return|>) counts only where nothing ends all turns.
    ends = [token for token in shared if token in controls]
    ends = ends or [token for token in last_ids if token in controls]
    return None if not ends or stops.intersection(ends) else ends[-1]


def _compile(template: str, field: str, value: str) -> Any:
    """Compile a template as transformers does. Raises UserError: it is no Jinja template."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        return _compile_jinja_template(template)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        where = f" (line {line})" if line else ""
        raise UserError(field, value, f"is not a Jinja template: {error}{where}") from error
