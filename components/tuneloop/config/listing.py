"""The settings of a pipeline, one after another, as people read them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tuneloop.config.sections import KIND, PLUGIN, find_section, list_variants, read_kind


@dataclass(frozen=True)
class Setting:
    """A setting that `--set` takes: its key, its default as YAML, and what it means."""

    key: str
    default: str
    meaning: str


def list_settings(config: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of a configuration class in their order, those of sections among them. A
    setting that several kinds of a section have comes once."""
    for name, info in config.model_fields.items():
        key = f"{prefix}{name}"
        variants = list_variants(info)
        if variants:
            yield from list_variant_settings(info, variants, f"{key}.")
            continue
        section = find_section(info)
        if section is None:
            yield Setting(key, format_default(info), info.description or "")
            continue
        if info.get_default(call_default_factory=True) is None:
            yield Setting(key, "null", info.description or section.__doc__ or "")
        yield from list_settings(section, f"{key}.")


def list_variant_settings(
    info: FieldInfo, variants: Mapping[str, type[BaseModel]], prefix: str
) -> Iterator[Setting]:
    """Yield the settings of a section that is one of several classes: its kind, then those of the
    classes, with the kinds that have them where not all have."""
    default = info.get_default(call_default_factory=True)
    meanings = [
        f"{kind}: {section.model_fields[KIND].description}" for kind, section in variants.items()
    ]
    yield Setting(f"{prefix}{KIND}", read_kind(default), "; ".join(meanings))
    settings: dict[str, Setting] = {}
    kinds_by_key: dict[str, list[str]] = {}
    # A default that differs between kinds is that of the kind which a run has by default.
    for kind in sorted(variants, key=lambda kind: kind != read_kind(default)):
        for setting in list_settings(variants[kind], prefix):
            settings.setdefault(setting.key, setting)
            kinds_by_key.setdefault(setting.key, []).append(kind)
    for key, kinds in kinds_by_key.items():
        if key == f"{prefix}{KIND}":
            continue
        setting = settings[key]
        # What a plugin takes is not known here.
        is_common = variants.keys() - {PLUGIN} <= set(kinds)
        meaning = setting.meaning if is_common else f"{', '.join(kinds)}: {setting.meaning}"
        yield Setting(key, setting.default, meaning)


def format_default(info: FieldInfo) -> str:
    """Format the default of a field as YAML of one line; empty for one that is required."""
    if info.is_required():
        return ""
    value = info.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, list):
        value = [item.model_dump() if isinstance(item, BaseModel) else item for item in value]
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
