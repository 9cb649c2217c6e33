"""Read KFP's executor input and write its executor output, without kfp.

They are the JSON of the messages ``ExecutorInput`` and ``ExecutorOutput`` of KFP's
pipeline_spec.proto. KFP's launcher puts the input in place of ``{{$}}`` in a container's arguments
and, once the program has succeeded, passes the output file on to metadata, the cache and the UI.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject

SAME = "same_artifact"
"""Parameter of a task: input → the other input that is the same artifact. `template.py:
pass_artifacts_once` sets it, `Task.read` undoes it.

KFP's metadata store allows one event for an artifact in a task (its table Event is UNIQUE in
artifact, execution and type), and its driver fails at the second.
"""
LOGS = "executor-logs"
"""Output artifact that KFP's driver adds to each task: its launcher writes it while the task
runs.
"""
SCHEMES = {"s3://": "/s3/", "gs://": "/gcs/", "minio://": "/minio/"}
"""URL scheme of KFP's pipeline root → where KFP's launcher keeps an artifact in the container.

The list is the launcher's, and has nothing to do with the schemes of our own store.
"""
ARTIFACT_FIELDS = ("name", "uri", "metadata", "customPath")
"""Fields of an artifact's message that the executor output repeats."""


@dataclass
class Task:
    """One execution of a component.

    Attributes:
        parameters: input parameter → value.
        inputs: input artifact → its metadata; an optional one that was not passed is absent.
        outputs: output artifact → its message, whose metadata `describe` sets.
        result_names: the output parameters that the component has.
        output_file: where the executor output is written.
        results: output parameter → value. `finish` drops a value that the component does not
            declare, as an older compiled pipeline may lack it. It checks that each declared
            artifact has a file, and not that each declared parameter has a value.
    """

    parameters: JsonObject
    inputs: dict[str, JsonObject]
    outputs: dict[str, JsonObject]
    result_names: tuple[str, ...]
    output_file: Path
    results: JsonObject = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> "Task":
        """Read a task from the JSON of its executor input."""
        message = json.loads(text)
        # The launcher leaves out what is empty.
        input_messages = message.get("inputs", {})
        output_messages = message["outputs"]
        parameters = dict(input_messages.get("parameterValues", {}))
        inputs: dict[str, JsonObject] = {}
        for name, artifact in _unwrap_artifacts(input_messages.get("artifacts", {})).items():
            inputs[name] = dict(artifact.get("metadata", {}))
        # An input that is the same artifact as another was not passed itself.
        for name, other in parameters.get(SAME, {}).items():
            inputs[name] = inputs[other]
        outputs = _unwrap_artifacts(output_messages.get("artifacts", {}))
        outputs.pop(LOGS, None)
        return cls(
            parameters=parameters,
            inputs=inputs,
            outputs=outputs,
            result_names=tuple(output_messages.get("parameters", {})),
            output_file=Path(output_messages["outputFile"]),
        )

    def describe(self, name: str, metadata: JsonMapping) -> None:
        """Add metadata to an output artifact, which consumers and the UI read without opening the
        artifact.
        """
        self.outputs[name].setdefault("metadata", {}).update(metadata)

    def write(self, name: str, text: str) -> None:
        """Write the one file of an output artifact."""
        path = get_local_path(self.outputs[name])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def write_metrics(self, name: str, scalars: JsonMapping) -> None:
        """Write an output artifact of type Metrics: the UI reads its scalars from the metadata, and
        whoever downloads it from the file.
        """
        self.describe(name, scalars)
        self.write(name, json.dumps(scalars))

    def finish(self) -> None:
        """Write the executor output.

        Raises:
            UserError: an output artifact that the component declares has no file.
        """
        missing = [
            name for name, artifact in self.outputs.items() if not get_local_path(artifact).exists()
        ]
        # KFP would not cache such a task, and its UI would show an empty artifact.
        if missing:
            remedy = (
                "was written by nothing: compile the pipeline with the release of tuneloop that is "
                "in cluster.images"
            )
            raise UserError("output", ", ".join(missing), remedy)
        artifacts: JsonObject = {}
        for name, artifact in self.outputs.items():
            message = {key: artifact[key] for key in ARTIFACT_FIELDS if key in artifact}
            artifacts[name] = {"artifacts": [message]}
        values = {name: value for name, value in self.results.items() if name in self.result_names}
        self.output_file.parent.mkdir(parents=True, exist_ok=True)
        self.output_file.write_text(json.dumps({"artifacts": artifacts, "parameterValues": values}))


def get_local_path(artifact: JsonMapping) -> Path:
    """Return the path of an artifact in the container."""
    if artifact.get("customPath"):
        return Path(artifact["customPath"])
    uri = str(artifact["uri"])
    for scheme, directory in SCHEMES.items():
        if uri.startswith(scheme):
            return Path(directory + uri.removeprefix(scheme))
    assert "://" not in uri, f"the KFP launcher gives an artifact of {uri} no path"
    return Path(uri)


def _unwrap_artifacts(lists_by_name: JsonMapping) -> dict[str, JsonObject]:
    """Return name → artifact: none of our inputs and outputs is a list, as KFP's may be."""
    return {
        name: dict(message["artifacts"][0])
        for name, message in lists_by_name.items()
        if message.get("artifacts")
    }
