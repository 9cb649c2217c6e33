"""Sections of a configuration that extensions add (`tuneloop.core.hooks.Extension.settings`).

They are there only with their extension: without it, their keys are unknown. What extensions add is
cached for the process, but for the class that `extend_cluster` makes anew at each call. A test that
adds an extension clears the cache, as `tests/unit/core/test_hooks.py` does.
"""

import functools
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, create_model

from tuneloop.config.sections import find_section, get_summary
from tuneloop.core.errors import UserError
from tuneloop.core.hooks import list_extensions
from tuneloop.core.json_types import JsonObject
from tuneloop.workflow.settings import Cluster


@functools.cache
def load_sections() -> dict[str, type[BaseModel]]:
    """Return whole key → class of all sections that extensions add.

    A section below ``cluster`` counts as a description of pods: `tuneloop plan` of a run that sets
    it goes by the pods and not by this machine (`config/machine.py: has_pod_resources`).

    Raises:
        UserError: an extension is faulty, or two add the same section.
    """
    sections: dict[str, type[BaseModel]] = {}
    for extension in list_extensions():
        for key, path in extension.settings.items():
            section = extension.load(path)
            problem = ""
            if key in sections:
                problem = f"its section {key} is there already: rename it"
            elif not (isinstance(section, type) and issubclass(section, BaseModel)):
                problem = f"its section {key} is no class of pydantic: {path}"
            if problem:
                remedy = f"{problem}, or uninstall the extension"
                raise UserError("extension", extension.name, remedy)
            sections[key] = section
    return sections


@functools.cache
def extend_config(config: type[BaseModel]) -> type[BaseModel]:
    """Return the class of a configuration with the sections that extensions add.

    Raises:
        UserError: as `load_sections`; or a section has the key of a setting of the core.
    """
    return extend_class(config, "", load_sections())


def extend_cluster() -> type[Cluster]:
    """Return the class of the section `cluster` with the sections that extensions add.

    Raises:
        UserError: as `extend_config`.
    """
    extended = extend_class(Cluster, "cluster.", load_sections())
    assert issubclass(extended, Cluster), "a subclass of what was given"
    return extended


def extend_class(
    section: type[BaseModel], prefix: str, added: Mapping[str, type[BaseModel]]
) -> type[BaseModel]:
    """Return a subclass of a section with further sections in it; the class itself if there are
    none.

    Args:
        section: the class.
        prefix: its key and a dot; empty for the whole configuration.
        added: whole key → class of a section that is added.
    """
    fields: dict[str, Any] = {}
    paths = [key.removeprefix(prefix) for key in added if key.startswith(prefix)]
    # Two extensions may add sections to the same section.
    names = dict.fromkeys(path.partition(".")[0] for path in paths)
    for name in names:
        info = section.model_fields.get(name)
        if name in paths:
            if info is not None:
                remedy = f"an extension adds a section of this key, which {section.__name__} has"
                raise UserError(f"{prefix}{name}", None, f"{remedy}: uninstall the extension")
            below = added[f"{prefix}{name}"]
            fields[name] = (below | None, Field(None, description=get_summary(below)))
            continue
        current = find_section(info) if info else None
        # A third party's pipeline may have no settings of a cluster.
        if info is None or current is None:
            continue
        extended = extend_class(current, f"{prefix}{name}.", added)
        # What a pipeline sets by default stays; a default of the old class would be refused.
        default = info.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            default = extended.model_validate(default.model_dump(exclude_unset=True))
        fields[name] = (extended, Field(default, description=info.description))
    if not fields:
        return section
    # Rules know a section by the name of its class, and people by its docstring.
    return create_model(
        section.__name__,
        __base__=section,
        __module__=section.__module__,
        __doc__=section.__doc__,
        **fields,
    )


def dump_settings(settings: BaseModel) -> JsonObject:
    """Dump settings for the record of a run, without the sections of extensions that are not set.
    So the run can be forked where their extensions are not installed.

    `tuneloop run` compares this dump with the one in the record of a run of the same name
    (`config/followed.py: keep_followed`).
    """
    dumped: JsonObject = settings.model_dump(mode="json")
    for key in load_sections():
        *path, name = key.split(".")
        section: Any = dumped
        for part in path:
            # A pipeline may lack the section around it.
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict) and name in section and section[name] is None:
            del section[name]
    return dumped
