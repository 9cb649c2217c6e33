"""Register an exported model, as a task: ``python -m tuneloop.kfp.register --executor-input …``

``kfp.model_registry`` is the address of a Kubeflow Model Registry (its
api/openapi/model-registry.yaml, v1). A model whose digest is registered already is left as it is.
Properties of a version name the artifacts it was made of.

With ``kfp.gate`` the task takes the evaluations before and after the training, and registers only a
model that is certainly better (`tuneloop.runs.gain`).
"""

import sys
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

from tuneloop.core.artifacts import split_ref
from tuneloop.core.errors import report_errors
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kfp.api import NotThere, call_api
from tuneloop.kfp.io import Task
from tuneloop.kfp.retry import retry_in_process
from tuneloop.kfp.stage import find_reason_to_skip
from tuneloop.runs.gain import compare_scores, read_scores

FIELD = "kfp.model_registry"
"""The setting that messages of a refused request name."""
BEFORE = "before"
AFTER = "after"
"""Inputs of the task: the evaluations before and after the training. `pipeline.py:
_register_exports` declares and passes them, and all other parameters of this task."""
DIGITS = 12
"""Digits of the model's digest in a version's name. The name tells whether a model is registered
already: with another number of digits all models would be registered once more."""


def register_model(registry: str, name: str, handle: JsonMapping) -> str:
    """Register a model, unless it is registered already.

    Args:
        registry: the address of the registry.
        name: of the registered model, which has a version for each export.
        handle: of the exported model, as `stage.py: build_handle` builds it.

    Returns:
        The name of the version.

    Raises:
        Retryable: the registry does not answer.
        UserError: it refuses.
    """
    api = f"{registry.rstrip('/')}/api/model_registry/v1"

    # Creation is not idempotent, and a task may be repeated: each object is looked for first.
    def find_or_create(kind: str, path: str, query: Mapping[str, str], body: JsonMapping) -> str:
        try:
            message = call_api(FIELD, "GET", f"{api}/{kind}?{urlencode(query)}")
        except NotThere:
            message = call_api(FIELD, "POST", f"{api}/{path}", body)
        return str(message["id"])

    properties = _build_properties(handle)
    model_id = find_or_create(
        "registered_model", "registered_models", {"name": name}, {"name": name}
    )
    version = f"{name}-{handle['digest'].partition(':')[2][:DIGITS]}"
    version_id = find_or_create(
        "model_version",
        f"registered_models/{model_id}/versions",
        {"name": version, "parentResourceId": model_id},
        {"name": version, "registeredModelId": model_id, "customProperties": properties},
    )
    artifact: JsonObject = {
        "name": version,
        "artifactType": "model-artifact",
        "uri": split_ref(handle["ref"])[0],
        "customProperties": properties,
    }
    find_or_create(
        "model_artifact",
        f"model_versions/{version_id}/artifacts",
        {"name": version, "parentResourceId": version_id},
        artifact,
    )
    return version


def _build_properties(handle: JsonMapping) -> JsonObject:
    """Build the registry's custom properties: the digest of a model, and the references of what it
    was made of.
    """
    texts = {"digest": str(handle["digest"])}
    for name, reference in handle.get("inputs", {}).items():
        texts[f"made_of.{name}"] = str(reference)
    return {
        name: {"string_value": text, "metadataType": "MetadataStringValue"}
        for name, text in texts.items()
    }


def main(argv: Sequence[str]) -> int:
    """Register the model that the task takes, unless there is none; return the exit code."""
    task = Task.read(argv[1])
    parameters = task.parameters

    @report_errors
    def register_input() -> int:
        handle = task.inputs["model"]
        if BEFORE in task.inputs:
            scores = [read_scores(task.inputs[name]["ref"]) for name in (BEFORE, AFTER)]
            gain = compare_scores(*scores)
            print(gain, file=sys.stderr)
            # A refusal is no failure: the run has done what it was asked for.
            if not gain.is_certain:
                task.results = {"model_version": f"nothing was registered: {gain}"}
                return 0
        version = register_model(parameters["registry"], parameters["model_name"], handle)
        print(f"registered as {version}", file=sys.stderr)
        task.results = {"model_version": version}
        return 0

    # Where the loop continues in another run, nothing has been exported yet.
    reason = find_reason_to_skip(task)
    if reason:
        task.results = {"model_version": f"nothing was registered: {reason}"}
    else:
        code = retry_in_process(register_input, str)
        if code:
            return code
    task.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
