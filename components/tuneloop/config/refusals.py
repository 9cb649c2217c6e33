"""What a configuration refuses, in one line that names the setting, its value and what is
possible."""

from pydantic import BaseModel, ValidationError

from tuneloop.config.sections import KIND, PLUGIN, ChosenKind, Location, find_keys, locate_setting
from tuneloop.core.component import convert_validation_error
from tuneloop.core.errors import UserError, suggest_name

MOVED = {
    "engine.name": "engine.kind",
    "engine.pull": "engine.weights: --set engine.weights=pull, or load",
    "engine.encoding": "engine.weights.encoding",
    "engine.fleet_has_base": "engine.weights.fleet_has_base",
    "update.algorithm_args": "update.algorithm: --set update.algorithm.beta=0.05",
    "preference.algorithm_args": "preference.algorithm: --set preference.algorithm.beta=0.2",
    "engine.fleet": "engine.weights.fleet, with --set engine.weights=refit",
}
"""Old key → where it is now, for those that have another name there."""


def explain_refusal(config: type[BaseModel], error: ValidationError) -> UserError:
    """Explain the first problem of a configuration by its own keys, without the classes that
    pydantic names beside them."""
    first = error.errors()[0]
    location = locate_setting(config, first["loc"])
    if first["type"] == "union_tag_invalid":
        # Its location is the section, and its value the whole of it.
        context = first["ctx"]
        expected = context["expected_tags"].replace("'", "")
        setting = f"{location.setting}.{KIND}"
        if setting == "engine.weights.kind" and ":" in context["tag"]:
            # Before there were kinds, `engine.weights` was the URL of the versions.
            remedy = "is a kind, load or pull; the URL of versions is engine.weights.url"
            return UserError(setting, context["tag"], remedy)
        return UserError(setting, context["tag"], f"unknown; known: {expected}")
    if first["type"] == "extra_forbidden":
        return explain_unknown_key(config, location, first["input"])
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
    return UserError(f"{setting}{inner}", refusal.value, refusal.remedy)


def explain_unknown_key(config: type[BaseModel], location: Location, value: object) -> UserError:
    """Explain a key that a section does not have: it moved, or another kind of the section has it,
    or another section, or it is nearly the name of another."""
    key = location.keys[-1]
    if location.setting in MOVED:
        return UserError(location.setting, value, f"is now {MOVED[location.setting]}")
    for chosen in reversed(location.chosen):
        path = ".".join(location.keys[len(chosen.keys) :])
        kinds = [
            kind for kind, section in chosen.variants.items() if path in find_keys(section, key)
        ]
        if kinds:
            remedy = f"is a setting of kind {' or '.join(kinds)}, not of {describe_kind(chosen)}"
            return UserError(location.setting, value, remedy)
    keys = find_keys(config, key)
    known = list(location.section.model_fields) if location.section else []
    remedy = f"did you mean {' or '.join(keys)}?" if keys else suggest_name(key, known)
    return UserError(location.setting, value, f"unknown key; {remedy}")


def describe_kind(chosen: ChosenKind) -> str:
    """Describe the kind of a section with the settings that it has."""
    name = "a plugin" if chosen.kind == PLUGIN else chosen.kind
    settings = [key for key in chosen.variants[chosen.kind].model_fields if key != KIND]
    return f"{name}, which has {', '.join(settings) or 'no settings'}"
