"""The key `algorithm` of a section that trains: one class for each algorithm, with its options.

A stage has two parameters, `algorithm` (the name) and `algorithm_args` (the mapping of its
options). In a configuration they are one section, so that each option has a type, a default and a
description. An algorithm is a file of `algorithms/`; the parts that stages and settings share are
in `training/algorithm_lookup.py`. `tests/unit/config/test_config.py` tests the section."""

from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, create_model

from tuneloop.config.sections import KIND, PLUGIN, choose_by_kind
from tuneloop.core import plugins
from tuneloop.core.component import Params
from tuneloop.core.json_types import JsonObject
from tuneloop.training.algorithm_lookup import list_stage_parameters, validate_kind


class AlgorithmSection(Params, frozen=True, extra="forbid"):
    """The settings of a stage that has an algorithm."""

    def to_parameters(self) -> JsonObject:
        """Return the parameters of the stage, which has two for the section `algorithm`."""
        # `choose_algorithm` adds the field to the subclasses that it makes.
        return super().to_parameters() | list_stage_parameters(self.__dict__["algorithm"])


def choose_algorithm(settings: type[Params], objective: type[BaseModel]) -> type[Params]:
    """Return the section `settings` of a stage with its algorithm as a section inside.

    The file of a pipeline calls it for each stage that has the two parameters.

    Args:
        settings: made by `Component.settings`; its default of `algorithm` stays.
        objective: the class that all algorithms of the stage extend.
    """
    fields: JsonObject = {}
    for name, info in settings.model_fields.items():
        if name == "algorithm":
            classes = list_classes(objective)
            default = classes[info.default](kind=info.default)
            text = "the algorithm, with its options"
            fields[name] = (
                choose_by_kind(info.default, classes),
                Field(default, description=text),
            )
        # The options are those of the section inside.
        elif name != "algorithm_args":
            fields[name] = (info.annotation, info)
    return create_model(
        settings.__name__,
        __base__=AlgorithmSection,
        __doc__=settings.__doc__,
        **fields,
    )


@cache
def list_classes(objective: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return name → class of the shipped algorithms of an objective, and the class of plugins.

    A file of `algorithms/` whose class does not extend `objective` is left out without a word: an
    algorithm that extends another one (``gspo``, ``grpo``) is found by what that one extends.
    """
    classes: dict[str, type[BaseModel]] = {}
    for name in plugins.list_shipped_variants("algorithms"):
        algorithm: Any = plugins.load_variant("algorithms", name, "Algorithm")
        if issubclass(algorithm, objective):
            classes[name] = make_class(name, algorithm)
    # Whatever is no shipped name may be a third party's.
    classes[PLUGIN] = make_plugin_class(objective)
    return classes


def make_class(name: str, algorithm: type[BaseModel]) -> type[BaseModel]:
    """Make the class of the section for an algorithm: its options, and the key `kind`."""
    # The first line of a docstring is its summary, in `tuneloop schema`: a sentence that goes on in
    # the second line is printed in part.
    summary = (algorithm.__doc__ or name).strip().split("\n")[0].rstrip(".")
    fields: JsonObject = {KIND: (Literal[name], Field(name, description=summary))}
    return create_model(f"{name}_algorithm", __base__=algorithm, **fields)


def make_plugin_class(objective: type[BaseModel]) -> type[BaseModel]:
    """Make the class of the section for an algorithm of a third party, whose options are checked by
    the stage, as only its image need have the package."""
    kind: Any = Annotated[str, plugins.validate_variant("algorithms"), validate_kind(objective)]
    description = "pkg.mod:attr, or the name of an entry point, with options of its own"
    fields: JsonObject = {KIND: (kind, Field(description=description))}
    return create_model("plugin_algorithm", __base__=OwnOptions, **fields)


class OwnOptions(BaseModel, frozen=True, extra="allow"):
    """Options that only an algorithm of a third party knows."""

    # Only the stage can import the algorithm, so that `pipelines/dpo.py` has the reference score
    # what it may need.
    needs_kl: ClassVar[bool] = True
