"""Generate the fields of a PodTemplateSpec that `tuneloop.workflow.pod_schema` checks patches by.

They come from the models of Kubernetes' API in ``kubeflow-trainer-api``, which follows newer
releases than the client ``kubernetes`` that kfp allows. ``python -m tests.pod_schema`` writes them
anew, after a new release of that library.
"""

import datetime
import json
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, StrictBool, StrictFloat, StrictInt, StrictStr

from tuneloop.core.json_types import JsonObject
from tuneloop.workflow.pod_schema import FILE, ROOT

SCALARS: dict[Any, str] = {
    StrictBool: "boolean",
    StrictInt: "integer",
    StrictFloat: "number",
    StrictStr: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Any: "object",
    datetime.datetime: "string",
}
WRAPPERS = {
    "IoK8sApimachineryPkgApiResourceQuantity": "quantity",
    "IoK8sApimachineryPkgUtilIntstrIntOrString": "int-or-string",
    "IoK8sApimachineryPkgApisMetaV1FieldsV1": "object",
}
"""Models that are no objects of fields → the type of their values."""


def build_schema() -> JsonObject:
    """Build object → field → type, of all objects that a PodTemplateSpec can hold."""
    from kubeflow_trainer_api import models

    schema: JsonObject = {}
    waiting: list[type[BaseModel]] = [models.IoK8sApiCoreV1PodTemplateSpec]
    while waiting:
        model = waiting.pop()
        name = shorten_name(model)
        if name in schema:
            continue
        fields: dict[str, str] = {}
        for field_name, field in model.model_fields.items():
            fields[field.alias or field_name] = name_type(field.annotation, waiting)
        schema[name] = dict(sorted(fields.items()))
    assert ROOT in schema
    return dict(sorted(schema.items()))


def shorten_name(model: type[BaseModel]) -> str:
    """Return an object's name as Kubernetes' documentation writes it."""
    return model.__name__.removeprefix("IoK8sApiCoreV1").removeprefix(
        "IoK8sApimachineryPkgApisMetaV1"
    )


def name_type(annotation: Any, waiting: list[type[BaseModel]]) -> str:
    """Name the type of a field: ``string``, ``[]EnvVar``, ``{}quantity``; models are also appended
    to `waiting`.
    """
    if annotation in SCALARS:
        return SCALARS[annotation]
    origin = get_origin(annotation)
    arguments = [item for item in get_args(annotation) if item is not type(None)]
    if origin is list:
        return "[]" + name_type(arguments[0], waiting)
    if origin is dict:
        return "{}" + name_type(arguments[1], waiting)
    if origin in (Union, UnionType):
        return name_type(arguments[0], waiting)
    if annotation.__name__ in WRAPPERS:
        return WRAPPERS[annotation.__name__]
    waiting.append(annotation)
    return shorten_name(annotation)


def dump_schema(schema: JsonObject) -> str:
    """Dump the schema with one object a line."""
    lines = [f"{json.dumps(name)}: {json.dumps(fields)}" for name, fields in schema.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    Path(FILE).write_text(dump_schema(build_schema()))
