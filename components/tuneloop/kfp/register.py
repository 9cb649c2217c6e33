"""Register an exported model, as a task: ``python -m tuneloop.kfp.register --executor-input …``

``kfp.model_registry`` is the address of a Kubeflow Model Registry (its api/openapi/model-registry.yaml, v1), or
``mlflow+`` and that of an MLflow server (REST API 2.0). A model whose digest is registered already is left as it is.
Properties of a version name the artifacts that the model was made of."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from tuneloop.core.artifacts import split_ref
from tuneloop.core.errors import report_errors
from tuneloop.kfp.api import NotThere, call_api
from tuneloop.kfp.io import Task
from tuneloop.kfp.retry import retry_in_process
from tuneloop.kfp.stage import find_reason_to_skip

FIELD = "kfp.model_registry"
MLFLOW = "mlflow+"
DIGITS = 12
"""Digits of the model's digest in a version's name."""


def register_model(registry: str, name: str, handle: Mapping[str, Any]) -> str:
    """Register a model, unless it is registered already, and return the name of its version."""
    made_of = {f"made_of.{key}": ref for key, ref in handle.get("inputs", {}).items()}
    properties = {"digest": str(handle["digest"]), **{key: str(value) for key, value in made_of.items()}}
    version = f"{name}-{handle['digest'].partition(':')[2][:DIGITS]}"
    url = split_ref(handle["ref"])[0]
    if registry.startswith(MLFLOW):
        _register_in_mlflow(registry.removeprefix(MLFLOW).rstrip("/"), name, url, properties)
    else:
        _register_in_kubeflow(registry.rstrip("/"), name, version, url, properties)
    return version


def _register_in_kubeflow(base: str, name: str, version: str, url: str, properties: Mapping[str, str]) -> None:
    api = f"{base}/api/model_registry/v1"
    custom = {k: {"string_value": v, "metadataType": "MetadataStringValue"} for k, v in properties.items()}

    def find_or_create(kind: str, path: str, query: Mapping[str, str], body: Mapping[str, Any]) -> str:
        try:
            found = call_api(FIELD, "GET", f"{api}/{kind}?{urlencode(query)}")
        except NotThere:
            found = call_api(FIELD, "POST", f"{api}/{path}", body)
        return str(found["id"])

    model = find_or_create("registered_model", "registered_models", {"name": name}, {"name": name})
    body = {"name": version, "registeredModelId": model, "customProperties": custom}
    query = {"name": version, "parentResourceId": model}
    number = find_or_create("model_version", f"registered_models/{model}/versions", query, body)
    artifact = {"artifactType": "model-artifact", "name": version, "uri": url, "customProperties": custom}
    query = {"name": version, "parentResourceId": number}
    find_or_create("model_artifact", f"model_versions/{number}/artifacts", query, artifact)


def _register_in_mlflow(base: str, name: str, url: str, properties: Mapping[str, str]) -> None:
    api = f"{base}/api/2.0/mlflow"
    try:
        call_api(FIELD, "GET", f"{api}/registered-models/get?{urlencode({'name': name})}")
    except NotThere:
        call_api(FIELD, "POST", f"{api}/registered-models/create", {"name": name})
    query = urlencode({"filter": f"name='{name}' and tags.digest='{properties['digest']}'"})
    if not call_api(FIELD, "GET", f"{api}/model-versions/search?{query}").get("model_versions"):
        tags = [{"key": key, "value": value} for key, value in properties.items()]
        call_api(FIELD, "POST", f"{api}/model-versions/create", {"name": name, "source": url, "tags": tags})


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
