"""The settings of a pipeline with what people have to know of each, section by section.

A section that is one of several classes, by its key `kind`, is described as one: each of its
settings comes once, with the kinds that have it and with the text and the default of each kind.

`tuneloop schema` prints it as YAML (`config/commented_yaml.py`). The form of Kubeflow Pipelines
goes by it, too (`kfp/form.py`, `kfp/configure.py`): it has only settings that are described here,
with these texts. (`tuneloop schema --json` is pydantic's own schema, with the whole docstrings of
the classes.)

The tests are in `tests/unit/config/test_commented_yaml.py`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tuneloop.config.followed import PLAIN_SECTIONS, SECTION_SUFFIX
from tuneloop.config.loop import INHERITED, LoopPipelineConfig
from tuneloop.config.rules import RULES
from tuneloop.config.sections import (
    KIND,
    PLUGIN,
    find_section,
    get_summary,
    is_optional,
    list_variants,
    read_kind,
)

TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a mapping",
}
"""Types of values, as people call them. A field of another type is described by its default alone,
and cannot be a parameter on KFP (`list_types`)."""


@dataclass(frozen=True)
class Setting:
    """A setting that `--set` takes.

    Attributes:
        key: its whole key, as in ``rollout.max_tokens``.
        default: its default as YAML of one line; empty for one that has to be set.
        text: what it means: the description of its field.
        notes: what limits its values, and what its default follows.
        origin: the key of the setting that it has its value from, unless it is set itself.
    """

    key: str
    default: str
    text: str
    notes: tuple[str, ...] = ()
    origin: str = ""

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def meaning(self) -> str:
        """The text and the notes in one line."""
        if self.origin:
            return f"as {self.origin}, unless it is set here"
        parts = [self.text] if self.text else []
        parts += self.notes
        return "; ".join(parts)


@dataclass(frozen=True)
class Section:
    """A section of a configuration.

    Attributes:
        key: its whole key; empty for the whole configuration.
        text: what it is for: the description of its field, or the first sentence of its class's
            docstring.
        items: its settings and the sections inside.
        optional_default: the default of a section that may be null, as YAML; None for a section
            that is always there.
        twin: the key of a section before it that has the same settings and defaults; empty where
            none has.
    """

    key: str
    text: str
    items: tuple["Setting | Section", ...]
    optional_default: str | None = None
    twin: str = ""

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def sections(self) -> list["Section"]:
        return [item for item in self.items if isinstance(item, Section)]

    @property
    def settings(self) -> list[Setting]:
        """The settings of the section itself."""
        return [item for item in self.items if isinstance(item, Setting)]

    def list_settings(self) -> Iterator[Setting]:
        """Yield all settings, those of sections inside among them."""
        if self.optional_default is not None:
            yield Setting(self.key, self.optional_default, self.text)
        for item in self.items:
            if isinstance(item, Setting):
                yield item
            else:
                yield from item.list_settings()

    def find(self, key: str) -> "Setting | Section | None":
        """Return the setting or the section with the whole key `key`."""
        for item in self.items:
            if item.key == key:
                return item
            if isinstance(item, Section) and key.startswith(f"{item.key}."):
                return item.find(key)
        return None


def describe_settings(config: type[BaseModel]) -> Section:
    """Describe all settings of a pipeline's configuration."""
    described = describe_class(config, "")
    if not issubclass(config, LoopPipelineConfig):
        return described
    return replace(described, items=tuple(map(note_inheritance, described.items)))


def note_inheritance(item: Setting | Section) -> Setting | Section:
    """Return the section `evaluate` with the origins of settings that it has from other sections,
    by `INHERITED`; any other setting or section as it is."""
    if not isinstance(item, Section) or item.key != "evaluate":
        return item
    items = [
        replace(inner, origin=INHERITED.get(inner.name, ""))
        if isinstance(inner, Setting)
        else inner
        for inner in item.items
    ]
    return replace(item, items=tuple(items))


def describe_class(section: type[BaseModel], key: str, text: str = "") -> Section:
    """Describe the section `key`, whose class is `section`."""
    prefix = f"{key}." if key else ""
    items: list[Setting | Section] = []
    keys_by_default: dict[str, str] = {}
    for name, info in section.model_fields.items():
        inner = find_section(info)
        variants = list_variants(info)
        if variants:
            items.append(describe_variants(f"{prefix}{name}", info, variants))
        elif inner is None:
            rules = list(list_rule_notes(section, key, name, info))
            description = find_description(section, name)
            items.append(describe_field(f"{prefix}{name}", info, description, rules))
        else:
            summary = info.description or get_summary(inner)
            described = describe_class(inner, f"{prefix}{name}", summary)
            # `repr` names the class, too.
            default = repr(info.get_default(call_default_factory=True))
            # Roles of pods have the same settings; they are described once.
            twin = keys_by_default.setdefault(default, described.key)
            if not is_optional(info) and twin != described.key:
                described = replace(described, twin=twin)
            elif is_optional(info):
                is_null = info.get_default(call_default_factory=True) is None
                described = replace(described, optional_default="null" if is_null else "{}")
            items.append(described)
    return Section(key, text or get_summary(section), tuple(items))


def find_description(section: type[BaseModel], name: str) -> str:
    """Return the description of a field: its own, or that of the class which it is inherited
    from."""
    # A subclass may state a field again with another default and without a description.
    for ancestor in section.__mro__:
        info = getattr(ancestor, "model_fields", {}).get(name)
        if info is not None and info.description:
            return str(info.description)
    return ""


def describe_field(key: str, info: FieldInfo, text: str, rules: Sequence[str]) -> Setting:
    """Describe a field that is no section, with `rules` that its default follows."""
    notes = list_limits(info)
    notes += rules
    # Null does not show what a value looks like.
    if info.get_default(call_default_factory=True) is None and not info.is_required():
        types = [TYPE_NAMES[kind] for kind in list_types(info.annotation)]
        notes.insert(0, " or ".join(types))
    # Most texts name the choices with what each means.
    choices = [str(choice) for choice in list_choices(info.annotation)]
    if not all(choice in text for choice in choices):
        notes.insert(0, f"one of {', '.join(choices)}")
    return Setting(key, format_default(info), text, tuple(filter(None, notes)))


def list_types(annotation: Any) -> list[type]:
    """Return the types in an annotation that have a name of `TYPE_NAMES`."""
    origin = get_origin(annotation) or annotation
    if origin in TYPE_NAMES:
        return [origin]
    if origin is Literal:
        return []
    types: list[type] = []
    for part in get_args(annotation):
        types += list_types(part)
    return list(dict.fromkeys(types))


def list_choices(annotation: Any) -> list[object]:
    """Return the values of an annotation that is a `Literal`, or has one inside."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (dict, list):
        return []
    choices: list[object] = []
    for part in get_args(annotation):
        choices += list_choices(part)
    return choices


def list_limits(info: FieldInfo) -> list[str]:
    """Return what a field's number may be, in words. Only ge, gt, le and lt are described, and no
    pattern of a text: what else limits a value belongs into the field's description."""
    limits: list[str] = []
    for mark in info.metadata:
        # Numbers below 0 mean nothing for most settings, so that it is not said of them.
        if isinstance(mark, Ge) and mark.ge != 0:
            limits.append(f"at least {mark.ge}")
        elif isinstance(mark, Gt):
            limits.append(f"above {mark.gt}")
        elif isinstance(mark, Le):
            limits.append(f"at most {mark.le}")
        elif isinstance(mark, Lt):
            limits.append(f"below {mark.lt}")
    return limits


def list_rule_notes(
    section: type[BaseModel], key: str, name: str, info: FieldInfo
) -> Iterator[str]:
    """Yield what the default of a field follows, by the table of `tuneloop.config.rules`.

    Args:
        section: the class that has the field.
        key: the key of its section.
        name: the name of the field.
        info: the field.
    """
    # Rules name stages; these sections are of no stage and are named themselves.
    plain = key if key in PLAIN_SECTIONS else ""
    stage = section.__name__.removesuffix(SECTION_SUFFIX)
    for rule in RULES:
        if rule.setting != name or not {stage, plain} & set(rule.stages):
            continue
        # Another default is that of a pipeline's author, and stands.
        if info.get_default(call_default_factory=True) in rule.demo:
            models = "any model" if rule.for_demo else "a pretrained model"
            yield f"default for {models}: {rule.summary}"


def describe_variants(
    key: str, info: FieldInfo, variants: Mapping[str, type[BaseModel]]
) -> Section:
    """Describe a section that is one of several classes. Settings that only the class of third
    parties' kinds (`PLUGIN`) has are left out."""
    default_section = info.get_default(call_default_factory=True)
    # A section that is left out stands for its first kind.
    default = read_kind(default_section) or next(iter(variants))
    # A default that differs between kinds is that of the kind which a run has by default.
    kinds = sorted(variants, key=lambda kind: kind != default)
    sections = {kind: describe_class(variants[kind], key) for kind in kinds}
    # What a third party's class takes is known to it alone; here it only has what all have.
    shipped = {kind: section for kind, section in sections.items() if kind != PLUGIN}
    merged = merge_sections(shipped)
    meanings: list[str] = []
    # Third parties' kinds have no name here, only a text that says how to write one.
    for kind, section in variants.items():
        text = section.model_fields[KIND].description or ""
        meanings.append(text if kind == PLUGIN else f"{kind}: {text}")
    items: list[Setting | Section] = [Setting(f"{key}.{KIND}", default, "; ".join(meanings))]
    items += [item for item in merged.items if item.name != KIND]
    text = info.description or get_summary(variants[default])
    is_left_out = is_optional(info) and default_section is None
    return Section(key, text, tuple(items), optional_default="null" if is_left_out else None)


def merge_sections(sections: Mapping[str, Section]) -> Section:
    """Merge the descriptions of a section's kinds into one, the default kind first."""
    items_by_name: dict[str, dict[str, Setting | Section]] = {}
    for kind, section in sections.items():
        for item in section.items:
            items_by_name.setdefault(item.name, {})[kind] = item
    items: list[Setting | Section] = []
    for items_by_kind in items_by_name.values():
        settings: dict[str, Setting] = {}
        inner: dict[str, Section] = {}
        for kind, item in items_by_kind.items():
            if isinstance(item, Setting):
                settings[kind] = item
            else:
                inner[kind] = item
        if settings:
            items.append(merge_settings(settings, sections.keys() - settings.keys()))
        elif len(inner) > 1:
            items.append(merge_sections(inner))
        else:
            # Only one kind has this section: its text names the kind.
            items += [name_kinds(section, kind) for kind, section in inner.items()]
    return replace(next(iter(sections.values())), items=tuple(items))


def name_kinds(section: Section, kind: str) -> Section:
    """Return a section that only one kind has, with this kind in its text."""
    return replace(section, text=f"{kind}: {section.text}")


def merge_settings(settings: Mapping[str, Setting], missing: set[str]) -> Setting:
    """Merge the descriptions of a setting that several kinds of a section have.

    Args:
        settings: kind → setting, the default kind first.
        missing: the kinds that do not have it.
    """
    first = next(iter(settings.values()))
    kinds_by_text: dict[str, list[str]] = {}
    kinds_by_default: dict[str, list[str]] = {}
    notes: list[str] = []
    for kind, setting in settings.items():
        kinds_by_text.setdefault(setting.text, []).append(kind)
        kinds_by_default.setdefault(setting.default, []).append(kind)
        notes += setting.notes
    if len(kinds_by_text) == 1 and not missing:
        text = first.text
    else:
        text = "; ".join(f"{', '.join(kinds)}: {text}" for text, kinds in kinds_by_text.items())
    notes += [
        f"default of {', '.join(kinds)}: {default or 'none'}"
        for default, kinds in kinds_by_default.items()
        if default != first.default
    ]
    return Setting(first.key, first.default, text, tuple(dict.fromkeys(notes)))


def format_default(info: FieldInfo) -> str:
    """Format the default of a field as YAML of one line; empty for one that is required."""
    if info.is_required():
        return ""
    value = info.get_default(call_default_factory=True)
    if isinstance(value, list):
        value = [item.model_dump() if isinstance(item, BaseModel) else item for item in value]
    text = yaml.safe_dump(
        value,
        default_flow_style=True,
        sort_keys=False,
        allow_unicode=True,
        width=sys.maxsize,
    )
    # A document that is a scalar ends with a mark of its own.
    return text.removesuffix("...\n").strip()
