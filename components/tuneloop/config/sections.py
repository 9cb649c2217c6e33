"""The classes of a configuration's sections. Some sections have one of several classes, by their
key `kind`.

``engine: {kind: vllm, replicas: 2}`` has the keys of vLLM's class, and ``engine: {kind:
transformers}`` those of another. A text in place of such a section is its kind, so that
``--set engine=transformers`` is the same as ``--set engine.kind=transformers``. Any other name than
those of the classes is a plugin, where the union has a class for `PLUGIN`.

Sections of several kinds are algorithms, whose unions `choose_by_kind` makes, and the engine and
its weights, whose unions `config/engines.py` and `config/engine_weights.py` write out of the same
parts. `config/listing.py`, `config/followed.py`, `config/refusals.py`, `config/loading.py`,
`config/extended.py`, `config/loop.py` and `planning/limits.py` find sections and their kinds by
these functions alone: a field of a form that `list_variants` and
`find_section` do not recognize is one plain setting for them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, Discriminator, Tag
from pydantic.fields import FieldInfo

from tuneloop.core.json_types import JsonMapping, JsonObject

KIND = "kind"
"""The key of a section that chooses its class."""
PLUGIN = "plugin"
"""The tag of the class that a union has for kinds of third parties."""


class PluginSection(BaseModel):
    """A class for `PLUGIN` in a union whose third parties may have classes of their own: the
    engine's."""

    @classmethod
    def choose_class(cls, kind: str) -> type[BaseModel]:
        """Return the class of a section of `kind`, which is none of the union's kinds; by default
        this class."""
        return cls


def make_kind_reader(default: str, kinds: Collection[str]) -> Callable[[Any], str]:
    """Make the function that pydantic's `Discriminator` calls with the value of a section: it
    returns the tag of the section's class.

    Args:
        default: the kind of a section that does not say it.
        kinds: the tags of the union's classes. They count only if `PLUGIN` is among them: then a
            class whose tag is missing here is never chosen, as its kind is taken for a third
            party's.
    """

    def read_tag(value: Any) -> str:
        kind = read_kind(value, default)
        # Any name that is not ours may be a third party's, where a section takes these.
        if kind not in kinds and PLUGIN in kinds:
            return PLUGIN
        return kind

    return read_tag


def read_kind(value: Any, default: str = "") -> str:
    """Return the kind that a value of a section states: a text, a mapping or an instance."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return str(value.get(KIND, default))
    return str(getattr(value, KIND, default))


def expand_text(value: Any) -> Any:
    """Return a section whose kind is `value`, if this is a text; else `value`."""
    return {KIND: value} if isinstance(value, str) else value


def choose_by_kind(default: str, classes: Mapping[str, type[BaseModel]]) -> Any:
    """Return the type of a section that is one of `classes`, by its key `kind`."""
    union: Any = None
    for tag, section in classes.items():
        part = Annotated[section, Tag(tag)]  # type: ignore[valid-type]
        union = part if union is None else union | part
    return Annotated[
        union,
        Discriminator(make_kind_reader(default, tuple(classes))),
        BeforeValidator(expand_text),
    ]


def list_variants(info: FieldInfo) -> dict[str, type[BaseModel]]:
    """Return kind → class of a section that is one of several; empty for any other field.

    A union's classes are found by their `Tag`; a section of several kinds that may be null is not
    supported.
    """
    variants: dict[str, type[BaseModel]] = {}
    for part in get_args(info.annotation):
        if get_origin(part) is Annotated:
            # Pydantic finds a class of the union by its tag.
            section, *marks = get_args(part)
            variants |= {mark.tag: section for mark in marks if isinstance(mark, Tag)}
    return variants


def get_summary(section: type[BaseModel]) -> str:
    """Return the first sentence of a class's docstring."""
    text = " ".join((section.__doc__ or "").split())
    return text.partition(". ")[0].rstrip(".")


def find_section(info: FieldInfo) -> type[BaseModel] | None:
    """Return the class of a field that is a section of one class, perhaps one that may be left out
    (``X | None``); else None."""
    # The items of a list have keys, too, but `--set` has no name for them.
    if get_origin(info.annotation) is list:
        return None
    # A section that may be left out is a union with None.
    kinds: tuple[Any, ...] = get_args(info.annotation) or (info.annotation,)
    sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    scalars = [kind for kind in kinds if kind is not type(None) and kind not in sections]
    return sections[0] if sections and not scalars else None


def is_optional(info: FieldInfo) -> bool:
    """Return whether a section may be null."""
    return type(None) in get_args(info.annotation)


def list_classes(info: FieldInfo) -> list[type[BaseModel]]:
    """Return the classes that a section may have; none for a field that is no section."""
    section = find_section(info)
    return list(list_variants(info).values()) if section is None else [section]


def find_keys(config: type[BaseModel], key: str, prefix: str = "") -> list[str]:
    """Return the whole keys of all settings that are called `key`, in any section."""
    keys = [f"{prefix}{key}"] if key in config.model_fields else []
    for name, info in config.model_fields.items():
        for section in list_classes(info):
            keys += find_keys(section, key, f"{prefix}{name}.")
    # Several kinds of a section may have the same key.
    return list(dict.fromkeys(keys))


def expand_texts(config: type[BaseModel], values: JsonObject) -> None:
    """Replace each text in `values` that stands for a section by a mapping with this kind, in
    place. A section whose value is null, as a heading in YAML below which nothing is set, is
    deleted unless it may be null."""
    for name, info in config.model_fields.items():
        variants = list_variants(info)
        if name not in values or not (variants or find_section(info)):
            continue
        if values[name] is None and not is_optional(info):
            del values[name]
            continue
        if variants:
            values[name] = expand_text(values[name])
        if isinstance(values[name], dict):
            for section in list_classes(info):
                expand_texts(section, values[name])


@dataclass(frozen=True)
class ChosenKind:
    """The kind of a section on the way to a setting, and what else it could be.

    Attributes:
        keys: the keys of the section.
        kind: the tag of its class.
        variants: tag → class of all that it could be.
    """

    keys: tuple[str, ...]
    kind: str
    variants: Mapping[str, type[BaseModel]]

    @property
    def setting(self) -> str:
        """The key of the setting that chooses the kind."""
        return f"{'.'.join(self.keys)}.{KIND}"


@dataclass(frozen=True)
class Location:
    """Where in a configuration an error is.

    Attributes:
        keys: the keys from the outermost section to the setting.
        section: the class of the innermost section; None below a setting that is no section, such
            as a key of a mapping.
        chosen: the sections on the way that are one of several classes, from the outermost on.
    """

    keys: tuple[str, ...]
    section: type[BaseModel] | None
    chosen: tuple[ChosenKind, ...] = ()

    @property
    def setting(self) -> str:
        return ".".join(self.keys)


def read_section(values: Any, keys: Iterable[str]) -> Any:
    """Return what the user has set of the section at `keys`; None if nothing is set."""
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def locate_setting(
    config: type[BaseModel], parts: Iterable[str | int], values: JsonMapping
) -> Location:
    """Find the setting that an error of pydantic is about; `config/refusals.py` is the only caller.

    Args:
        config: the class of the configuration.
        parts: the error's `loc`, which names, beside keys, the class that was chosen where a
            section is one of several.
        values: what the configuration was made of, which name the kinds of third parties.
    """
    keys: list[str] = []
    chosen: list[ChosenKind] = []
    section: type[BaseModel] | None = config
    below: type[BaseModel] | None = config
    variants: Mapping[str, type[BaseModel]] = {}
    # Each part is a key, the index of an item, or the tag of the class that was chosen.
    for part in map(str, parts):
        if part in variants:
            below = variants[part]
            if issubclass(below, PluginSection):
                below = below.choose_class(read_kind(read_section(values, keys)))
                variants = dict(variants) | {part: below}
            chosen.append(ChosenKind(tuple(keys), part, variants))
            variants = {}
            continue
        if not part.isdigit():
            section = below
        keys.append(part)
        if section is None or part not in section.model_fields:
            continue
        info = section.model_fields[part]
        variants = list_variants(info)
        below = find_section(info) or find_item(info)
    return Location(tuple(keys), section, tuple(chosen))


def find_item(info: FieldInfo) -> type[BaseModel] | None:
    """Return the class of the items of a list of sections; None for any other field."""
    items = [part for part in get_args(info.annotation) if hasattr(part, "model_fields")]
    return items[0] if items else None
