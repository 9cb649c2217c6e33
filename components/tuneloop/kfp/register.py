"""Register an exported model, as a task: ``python -m tuneloop.kfp.register --executor-input …``

``kfp.model_registry`` is the address of a Kubeflow Model Registry (its api/openapi/model-registry.yaml, v1). A model
whose digest is registered already is left as it is. Properties of a version name the artifacts it was made of."""

import sys
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

from tuneloop.core.artifacts import split_ref
from tuneloop.core.errors import report_errors
from tuneloop.core.json_types import JsonMapping
from tuneloop.kfp.api import NotThere, call_api
from tuneloop.kfp.io import Task
from tuneloop.kfp.retry import retry_in_process
from tuneloop.kfp.stage import find_reason_to_skip

FIELD = "kfp.model_registry"
DIGITS = 12
"""Digits of the model's digest in a version's name."""


def register_model(registry: str, name: str, handle: JsonMapping) -> str:
    """Register a model, unless it is registered already, and return the name of its version."""
    made_of = {f"made_of.{key}": ref for key, ref in handle.get("inputs", {}).items()}
    properties = {
        "digest": str(handle["digest"]),
        **{key: str(value) for key, value in made_of.items()},
    }
    version = f"{name}-{handle['digest'].partition(':')[2][:DIGITS]}"
    api = f"{registry.rstrip('/')}/api/model_registry/v1"
    custom = {
        k: {"string_value": v, "metadataType": "MetadataStringValue"} for k, v in properties.items()
    }

    def find_or_create(kind: str, path: str, query: Mapping[str, str], body: JsonMapping) -> str:
        try:
            found = call_api(FIELD, "GET", f"{api}/{kind}?{urlencode(query)}")
        except NotThere:
            found = call_api(FIELD, "POST", f"{api}/{path}", body)
        return str(found["id"])

    model = find_or_create("registered_model", "registered_models", {"name": name}, {"name": name})
    body = {"name": version, "registeredModelId": model, "customProperties": custom}
    query = {"name": version, "parentResourceId": model}
    number = find_or_create("model_version", f"registered_models/{model}/versions", query, body)
    body = {"name": version, "artifactType": "model-artifact", "uri": split_ref(handle["ref"])[0]}
    query = {"name": version, "parentResourceId": number}
    path = f"model_versions/{number}/artifacts"
    find_or_create("model_artifact", path, query, {**body, "customProperties": custom})
    return version


def main(argv: Sequence[str]) -> int:
    """Run as a program."""
    task = Task.read(argv[1])
    given = task.parameters

    @report_errors
    def register_input() -> int:
        version = register_model(given["registry"], given["model_name"], task.inputs["model"])
        print(f"registered as {version}", file=sys.stderr)
        task.results = {"model_version": version}
        return 0

    if reason := find_reason_to_skip(task):
        task.results = {"model_version": f"nothing was registered: {reason}"}
    elif code := retry_in_process(register_input, str):
        return code
    task.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
