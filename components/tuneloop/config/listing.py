"""The settings of a pipeline, one after another, as people read them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Setting:
    """A setting that `--set` takes: its key, its default as YAML, and what it means."""

    key: str
    default: str
    meaning: str


def list_settings(config: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of a configuration class in their order, those of sections among them."""
    for name, info in config.model_fields.items():
        key = f"{prefix}{name}"
        section = find_section(info)
        if section is None:
            yield Setting(key, format_default(info), info.description or "")
            continue
        if info.get_default(call_default_factory=True) is None:
            yield Setting(key, "null", info.description or section.__doc__ or "")
        yield from list_settings(section, f"{key}.")


def find_section(info: FieldInfo) -> type[BaseModel] | None:
    """Return the class of a field that is a section, perhaps one that may be left out; else
    None."""
    kinds: tuple[Any, ...] = get_args(info.annotation) or (info.annotation,)
    sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    scalars = [kind for kind in kinds if kind is not type(None) and kind not in sections]
    return sections[0] if sections and not scalars else None


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
