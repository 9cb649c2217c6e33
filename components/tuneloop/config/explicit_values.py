"""The values that a configuration is made of, without those that follow from them.

A configuration does not tell which values a user has set, and which follow the base model, the
cluster or other settings. A run on Kubeflow Pipelines may change a setting of the compiled
pipeline, and the others have to follow the change: `kfp/pipeline.py` compiles the few values that
`find_explicit_values` finds, and `kfp/configure.py` makes the run's configuration of them, with the
changes.

`tests/unit/kfp/test_configure.py` tests it.
"""

from pydantic import BaseModel

from tuneloop.config.followed import merge_followed
from tuneloop.config.loading import Pipeline
from tuneloop.config.rules import follow_model
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject


def configure_values(pipeline: Pipeline, values: JsonMapping) -> BaseModel:
    """Make the configuration of `values`; what they leave out follows the base model, and the pods
    that they describe. These are the steps of `Pipeline.configure_for` after the values are read.

    Raises:
        UserError: they are refused.
    """
    followed = follow_model(pipeline.Config, values)
    return pipeline.validate(merge_followed(values, followed))


def find_explicit_values(pipeline: Pipeline, config: BaseModel) -> JsonObject:
    """Return a small mapping of values from which `configure_values` makes `config`.

    A value that would follow in the same way is left out, also if a user has set it. Each section
    and each value that is set is tried once, by making the configuration without it.
    """
    values = config.model_dump(mode="json", exclude_unset=True)
    expected = config.model_dump(mode="json")
    if not _is_made_of(pipeline, values, expected):
        # It was not made by `configure_values`: nothing follows.
        return expected
    return _drop_implied(pipeline, values, expected, [])


def _drop_implied(
    pipeline: Pipeline, values: JsonObject, expected: JsonObject, path: list[str]
) -> JsonObject:
    """Return `values` without those below `path` that follow from the others."""
    section = values
    for key in path:
        section = section[key]
    # A key is dropped while the others are looked at.
    for key in list(section):
        inner = [*path, key]
        fewer = _remove(values, inner)
        if _is_made_of(pipeline, fewer, expected):
            values = fewer
        elif isinstance(section[key], dict):
            values = _drop_implied(pipeline, values, expected, inner)
    return values


def _remove(values: JsonMapping, path: list[str]) -> JsonObject:
    """Return `values` without the value at `path`; neither they nor their sections are changed."""
    name = path[0]
    fewer = dict(values)
    if len(path) > 1:
        fewer[name] = _remove(values[name], path[1:])
    else:
        del fewer[name]
    return fewer


def _is_made_of(pipeline: Pipeline, values: JsonMapping, expected: JsonMapping) -> bool:
    """Return whether `expected` is the configuration that is made of `values`."""
    try:
        return configure_values(pipeline, values).model_dump(mode="json") == expected
    except UserError:
        return False
