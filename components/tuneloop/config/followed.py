"""Defaults that follow the base model and the machine, where a configuration leaves settings out.

The defaults that stages declare are those of the demo, whose model is made here and has less than a
million parameters. For any other base model the table `RULES` (`tuneloop.config.rules`) replaces
them before the configuration is checked, so that everything rendered from it has concrete values.
What a user sets stands, and so does a default of a pipeline's author that differs from the
demo's.

`config/rules.py` has the table, and this module applies one rule of it to a draft. All this comes
before the configuration is validated: values may be of any type, and sections are found by the
names of their classes (`is_section_of`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tuneloop.config.machine import Machine
from tuneloop.config.model_facts import ModelFacts
from tuneloop.config.sections import (
    PLUGIN,
    PluginSection,
    find_section,
    list_classes,
    list_variants,
    read_kind,
)
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.inference.capabilities import Capabilities, find_capabilities

SECTION_SUFFIX = "_settings"
"""Ends the name of a section's class, after the name of its stage (`Component.settings`)."""
PLAIN_SECTIONS = ("engine", "loop")
"""Sections that configure no stage, whose keys rules name in place of a stage. A rule for another
section without a stage finds nothing unless it is listed here. (``trainer`` has a class like a
stage's.)"""
ENGINE_CONTEXT = "engine.args.max_model_len"
"""The setting that `config/rules.py: _limit_context` adds to arguments of the user's: the only one
that is chosen inside of another setting, so `Draft.get_engine_args` puts it there."""


@dataclass(frozen=True)
class Choice:
    """The value that a rule chooses, and why."""

    value: Any
    reason: str


@dataclass(frozen=True)
class Followed:
    """A setting that was left out, the value that it gets, and why."""

    setting: str
    value: Any
    reason: str


def is_section_of(stage: str, info: FieldInfo) -> bool:
    """Return whether a field is a section that configures `stage`: a class that
    `Component.settings` has made, or one that was made from it under the same name."""
    name = f"{stage}{SECTION_SUFFIX}"
    return any(section.__name__ == name for section in list_classes(info))


@dataclass
class Draft:
    """A configuration in the making: what a user has set, and what was chosen so far.

    Attributes:
        config: the pipeline's configuration class, whose defaults fill what is in neither.
        values: what the user has set, by section; not checked yet, so any type may be anywhere.
        facts: what is known of the base model.
        machine: what the stages compute on.
        chosen: setting → what the rules so far have chosen for it.
    """

    config: type[BaseModel]
    values: JsonMapping
    facts: ModelFacts
    machine: Machine
    chosen: dict[str, Followed] = field(default_factory=dict)

    def find_sections(self, stage: str) -> list[str]:
        """Return the sections that configure `stage`; of ``engine`` and ``loop`` these
        themselves."""
        if stage in PLAIN_SECTIONS:
            return [stage] if stage in self.config.model_fields else []
        return [
            name
            for name, info in self.config.model_fields.items()
            if is_section_of(stage, info) and not self.is_left_out(name)
        ]

    def is_left_out(self, section: str) -> bool:
        """Return whether a section is null, as set or as chosen."""
        # What a user has set counts more than what a rule chose.
        if section in self.values:
            return self.values[section] is None
        return section in self.chosen and self.chosen[section].value is None

    def is_set(self, section: str, name: str) -> bool:
        """Return whether the user has set a field of a section."""
        values = self.values.get(section)
        return isinstance(values, Mapping) and name in values

    def find_class(self, section: str) -> type[BaseModel] | None:
        """Return the class of a section; of several the one of the kind that is set, or the
        default."""
        info = self.config.model_fields.get(section)
        if info is None:
            return None
        variants = list_variants(info)
        if not variants:
            return find_section(info)
        kind = self.find_kind(section)
        plugin = variants.get(PLUGIN)
        if kind not in variants and plugin and issubclass(plugin, PluginSection):
            return plugin.choose_class(kind)
        return variants.get(kind) or plugin

    def find_kind(self, section: str) -> str:
        """Return the kind of a section that is one of several classes; empty for any other."""
        info = self.config.model_fields.get(section)
        # A section of one class has no kind.
        default = read_kind(info.get_default(call_default_factory=True)) if info else ""
        return read_kind(self.values.get(section), default)

    def find_engine(self) -> Capabilities:
        """Return the capabilities of the engine that is set, or of the default; for a pipeline
        without an engine those of one in the stage's process."""
        return find_capabilities(self.find_kind("engine"))

    def read_default(self, section: str, name: str) -> Any:
        """Return the default that a section's class declares; None where it has no such field."""
        section_class = self.find_class(section)
        if section_class is None or name not in section_class.model_fields:
            return None
        return section_class.model_fields[name].get_default(call_default_factory=True)

    def get(self, section: str, name: str) -> Any:
        """Return a field of a section: as set, else as chosen, else its default."""
        if self.is_set(section, name):
            return self.values[section][name]
        followed = self.chosen.get(f"{section}.{name}")
        if followed:
            return followed.value
        return self.read_default(section, name)

    def find_holder(self, section: str, name: str) -> str:
        """Return the section that has the setting `name` of a stage that trains: `section` if it
        has a field of this name, else ``trainer``."""
        return section if self.has_field(section, name) else "trainer"

    def get_count(self, section: str, name: str) -> int | None:
        """Return a field that counts something; None where it is no whole number above 0."""
        value = self.get(section, name)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        return value if is_count else None

    def has_field(self, section: str, name: str) -> bool:
        """Return whether a section has a field."""
        section_class = self.find_class(section)
        return section_class is not None and name in section_class.model_fields

    def get_engine_args(self) -> JsonMapping:
        """Return the engine's own arguments as set or chosen; empty where there are none."""
        # What a user has set may still be of any type.
        value = self.get("engine", "args")
        args = dict(value) if isinstance(value, Mapping) else {}
        followed = self.chosen.get(ENGINE_CONTEXT)
        if followed:
            # It is chosen by itself, beside the arguments that the user has set.
            args["max_model_len"] = followed.value
        return args


@dataclass(frozen=True)
class Rule:
    """How a setting that was left out follows the model and the machine.

    Attributes:
        stages: whose sections have the setting; ``engine`` and ``loop`` are sections themselves.
        setting: the field.
        demo: the defaults that the rule replaces; another one is of a pipeline's author, and
            stands. So a rule ends without a word where a stage's default is changed and not
            added here: `tests/unit/config/test_followed.py` compares them.
        choose: returns the value for a section, or None to leave the default.
        summary: what it does, as `tuneloop schema` prints it above the setting.
        for_demo: whether it holds for the demo's models, too.
    """

    stages: tuple[str, ...]
    setting: str
    demo: tuple[Any, ...]
    choose: Callable[[Draft, str], Choice | None]
    summary: str
    for_demo: bool = False

    def apply(self, draft: Draft) -> Iterator[Followed]:
        """Yield what the rule chooses for each section that left the setting out."""
        for stage in self.stages:
            for section in draft.find_sections(stage):
                choice = self._choose(draft, section)
                if choice is not None:
                    yield Followed(f"{section}.{self.setting}", choice.value, choice.reason)

    def _choose(self, draft: Draft, section: str) -> Choice | None:
        if draft.facts.is_demo and not self.for_demo:
            return None
        if not draft.has_field(section, self.setting) or draft.is_set(section, self.setting):
            return None
        default = draft.read_default(section, self.setting)
        # A default that is not the demo's was chosen by the pipeline's author.
        if default not in self.demo:
            return None
        choice = self.choose(draft, section)
        return None if choice is None or choice.value == default else choice


def keep_followed(
    config: JsonObject, followed: Iterable[Followed], recorded: JsonObject
) -> JsonObject:
    """Return the configuration to compare with a run's record when the run is started again: the
    recorded one, if the two differ only in settings that follow the model and the machine.

    Args:
        config: all settings, as they are made today.
        followed: those of them that follow.
        recorded: all settings of the run.
    """
    # The machine may be another one than when the run began.
    pinned = config
    for setting in followed:
        *path, name = setting.setting.split(".")
        section: Any = recorded
        for part in path:
            section = section.get(part) if isinstance(section, Mapping) else None
        if isinstance(section, Mapping) and name in section:
            pinned = _merge(pinned, setting.setting.split("."), section[name])
    return recorded if pinned == recorded else config


def merge_followed(values: JsonMapping, followed: Mapping[str, Followed]) -> JsonObject:
    """Return what the user has set together with what was chosen for the rest."""
    merged = dict(values)
    for setting, chosen in followed.items():
        merged = _merge(merged, setting.split("."), chosen.value)
    return merged


def _merge(values: JsonMapping, path: list[str], value: Any) -> JsonObject:
    """Return `values` with a value at `path`; neither they nor their sections are changed."""
    name = path[0]
    merged = dict(values)
    section = values.get(name, {})
    if len(path) == 1:
        merged[name] = value
    # A section that is no mapping is refused when the configuration is checked.
    elif isinstance(section, Mapping):
        merged[name] = _merge(section, path[1:], value)
    return merged
