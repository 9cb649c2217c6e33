"""Messages for what a configuration refuses: one line that names the setting, its value and what is
possible.

`config/loading.py` (`Pipeline.validate`) calls `explain_refusal`. A key that is renamed goes into
`MOVED`; also look for the old one in `config/foreign_names.py` and `config/commented_yaml.py:
FIRST`. `tests/unit/config/test_config.py` has a line for most messages.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tuneloop.config.engines import Engine
from tuneloop.config.foreign_names import OPTIONS, list_equivalents
from tuneloop.config.sections import (
    KIND,
    PLUGIN,
    ChosenKind,
    Location,
    find_keys,
    is_optional,
    list_classes,
    list_variants,
    locate_setting,
    read_kind,
    read_section,
)
from tuneloop.core.component import convert_validation_error
from tuneloop.core.errors import UserError, suggest_name
from tuneloop.core.json_types import JsonMapping

SERVERS_URL = "--set engine=endpoint --set engine.rollout_endpoint_url=URL"
REFIT = "--set engine=endpoint --set engine.weights.kind=refit --set engine.weights.fleet=ADDRESS"
MOVED = {
    "engine.name": "is now engine.kind",
    "engine.pull": "is now engine.weights: --set engine.weights=pull, or load",
    "engine.encoding": "is now engine.weights.encoding",
    "engine.fleet_has_base": "is now engine.weights.fleet_has_base",
    "engine.fleet": f"is now engine.weights.fleet, of servers of yours alone: {REFIT}",
    "engine.url": f"is set for servers of yours: {SERVERS_URL}",
    "engine.endpoint": f"is a kind of engine: {SERVERS_URL}",
    "kfp.volumes": "is now cluster.pod.volumes: --set 'cluster.pod.volumes={PATH: pvc/CLAIM}'",
    "kfp.image_pull_secrets": "is now cluster.pod.image_pull_secrets",
    "engine.max_model_len": "is an option of the engine's own: --set engine.args.max_model_len=TOKENS",
    "data.preference": "is for the pipeline dpo, which trains on pairs",
    "data.preference_eval": "is for the pipeline dpo, which trains on pairs",
    "reference.max_length": "is now preference.max_length, for the reference, too",
    "update.algorithm_args": "is now update.algorithm: --set update.algorithm.beta=0.05",
    "preference.algorithm_args": "is now preference.algorithm: --set preference.algorithm.beta=0.2",
}
"""Whole key that is unknown → where to set what people mean by it. An entry is never asked for
while a section has the key."""
REMOVED = {
    "expected_world_size": "is the pipeline's own: set processes, and nodes",
    "publish_weights": "is the pipeline's own: set engine.weights.fleet_has_base",
    "weight_encoding": "is now engine.weights.encoding",
}
"""Last part of an unknown key, in whatever section → what a user sets in place of it. These are
parameters that a pipeline gives (`config/pipeline.py: SET_BY_PIPELINE`)."""
SECTION_ERRORS = ("model_type", "model_attributes_type")
"""Types of pydantic's errors for a value in place of a section."""
UNKNOWN_VARIANT = "unknown; known:"
"""Begins the refusal of a name that is none of a family's, as `core/plugins.py: _explain_names`
writes it: `name_kinds_of_section` recognizes the message by this text."""


def explain_refusal(
    config: type[BaseModel], error: ValidationError, values: JsonMapping
) -> UserError:
    """Explain the first problem of a configuration by its own keys, without the classes that
    pydantic names beside them.

    Args:
        config: the class of the configuration.
        error: what it raised.
        values: what it was given.
    """
    # The other errors may follow from the first.
    first = error.errors()[0]
    location = locate_setting(config, first["loc"], values)
    if first["type"] == "union_tag_invalid":
        # Its location is the section, and its value the whole of it.
        return explain_unknown_kind(location, first)
    if first["type"] == "extra_forbidden":
        return explain_unknown_key(config, location, first["input"], values)
    if first["type"] in SECTION_ERRORS:
        return explain_plain_value(location, first["input"])
    if first["type"] == "string_pattern_mismatch" and location.section:
        # The key of a list or of a mapping has no field.
        field = location.section.model_fields.get(location.keys[-1])
        if field and field.description:
            remedy = f"is not valid; expected: {field.description}"
            return UserError(location.setting, first["input"], remedy)
    refusal = convert_validation_error(error)
    written = ".".join(str(part) for part in first["loc"] if part != "[key]")
    inner = refusal.field.removeprefix(written)
    setting = location.setting.removesuffix(".[key]")
    remedy = refusal.remedy
    if location.chosen and location.setting == location.chosen[-1].setting:
        remedy = name_kinds_of_section(location.chosen[-1], remedy)
    return UserError(f"{setting}{inner}", refusal.value, remedy)


def name_kinds_of_section(chosen: ChosenKind, remedy: str) -> str:
    """Return the remedy for an unknown kind, with the kinds of the section in place of all variants
    of the family: a stage takes only those of its own objective."""
    if not remedy.startswith(UNKNOWN_VARIANT):
        return remedy
    # The tag of third parties' kinds is nothing that a user writes.
    kinds = sorted(kind for kind in chosen.variants if kind != PLUGIN)
    return f"{UNKNOWN_VARIANT} {', '.join(kinds)}, or a dotted path pkg.mod:attr"


def explain_unknown_kind(location: Location, error: ErrorDetails) -> UserError:
    """Explain a kind that a section does not have.

    Args:
        location: the section.
        error: pydantic's, whose context has the kind and those that were expected.
    """
    context = error["ctx"]
    kind = context["tag"]
    expected = context["expected_tags"].replace("'", "")
    setting = f"{location.setting}.{KIND}"
    if setting == "engine.weights.kind" and ":" in kind:
        # Before there were kinds, `engine.weights` was the URL of the versions.
        remedy = "is a kind, load or pull; the URL of versions is engine.weights.url"
        return UserError(setting, kind, remedy)
    for chosen in reversed(location.chosen):
        name = location.keys[-1]
        holders = [
            holder
            for holder, section in chosen.variants.items()
            if name in section.model_fields and kind in list_variants(section.model_fields[name])
        ]
        if holders:
            remedy = f"is for {chosen.setting}={' or '.join(holders)}; of {chosen.kind}: {expected}"
            return UserError(setting, kind, remedy)
    return UserError(setting, kind, f"unknown; known: {expected}")


def explain_plain_value(location: Location, value: object) -> UserError:
    """Explain a value in place of a section, with one of its keys as an example."""
    example = f"{location.setting}.KEY=VALUE"
    remedy = "is a section: write its keys, as in"
    info = location.section.model_fields.get(location.keys[-1]) if location.section else None
    if info is None:
        return UserError(location.setting, value, f"{remedy} {example}")
    item = find_example(info)
    if item:
        example = f"{location.setting}.{item}"
    suffix = ", or leave it out with null" if is_optional(info) else ""
    return UserError(location.setting, value, f"{remedy} {example}{suffix}")


def find_example(info: FieldInfo) -> str:
    """Return ``key=default`` of a section's first setting; empty for a field that is none."""
    classes = list_classes(info)
    if not classes:
        return ""
    name, field = next(iter(classes[0].model_fields.items()))
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return f"{name}={default or 'VALUE'}"


def explain_unknown_key(
    config: type[BaseModel], location: Location, value: object, values: JsonMapping
) -> UserError:
    """Explain a key that a section does not have: it moved, or another kind of the section has it,
    or another section, or it is nearly the name of another."""
    moved = MOVED.get(location.setting) or REMOVED.get(location.keys[-1])
    moved = moved or OPTIONS.get(location.setting)
    if moved:
        return UserError(location.setting, value, moved)
    setting, value = find_leaf(location.setting, value)
    key = location.keys[-1]
    for chosen in reversed(location.chosen):
        path = ".".join(location.keys[len(chosen.keys) :])
        kinds = [
            kind for kind, section in chosen.variants.items() if path in find_keys(section, key)
        ]
        # The class of third parties' kinds has a tag that no user writes.
        shipped = [kind for kind in kinds if kind != PLUGIN]
        if kinds:
            holders = " or ".join(shipped) or "your own"
            remedy = f"is a setting of kind {holders}, not of {describe_kind(chosen, values)}"
            return UserError(location.setting, value, remedy)
    equivalents = [key for key in list_equivalents(setting) if has_key(config, key)]
    if equivalents:
        return UserError(setting, value, f"is called {' or '.join(equivalents)} here")
    # It may be a setting of another section.
    keys = find_similar_keys(config, setting)
    section = location.section
    names = list(section.model_fields) if section else []
    if keys:
        remedy = f"unknown key; did you mean {' or '.join(keys)}?"
    elif setting != location.setting:
        remedy = (
            f"unknown key; this pipeline has no section {location.setting}, only {', '.join(names)}"
        )
    else:
        remedy = f"unknown key; {suggest_name(key, names)}"
    if section and issubclass(section, Engine):
        remedy += f" (an option of the engine's own: engine.args.{key})"
    return UserError(setting, value, remedy)


def has_key(config: type[BaseModel], key: str) -> bool:
    """Return whether a configuration has the setting with the whole key `key`."""
    return key in find_keys(config, key.rpartition(".")[2])


def find_leaf(setting: str, value: Any) -> tuple[str, Any]:
    """Return the first setting below an unknown section, and its value: the user wrote that one."""
    while isinstance(value, Mapping) and value:
        key, value = next(iter(value.items()))
        setting = f"{setting}.{key}"
    return setting, value


def find_similar_keys(config: type[BaseModel], setting: str) -> list[str]:
    """Return the keys of other sections that end as `setting` does: of ``sft.lora.r`` those that end
    with ``lora.r``; if there are none, those that end with ``r``."""
    parts = setting.split(".")
    keys = find_keys(config, parts[-1])
    for start in range(len(parts)):
        suffix = ".".join(parts[start:])
        similar = [key for key in keys if key == suffix or key.endswith(f".{suffix}")]
        if similar:
            return similar
    return []


def describe_kind(chosen: ChosenKind, values: JsonMapping) -> str:
    """Describe the kind of a section with the settings that it has."""
    section = read_section(values, chosen.keys)
    # The name of a third party's kind is only in the user's values.
    name = read_kind(section, chosen.kind) if chosen.kind == PLUGIN else chosen.kind
    settings = [key for key in chosen.variants[chosen.kind].model_fields if key != KIND]
    return f"{name}, which has {', '.join(settings) or 'no settings'}"
