"""Read KFP's executor input and write its executor output, without kfp: the JSON of the messages ``ExecutorInput`` and
``ExecutorOutput`` of KFP's pipeline_spec.proto. KFP's launcher puts the input in place of ``{{$}}`` in a container's
arguments and, once the program has succeeded, passes the output file on to metadata, the cache and the UI."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from tuneloop.core.json_types import JsonMapping, JsonObject

SAME = "same_artifact"
"""Parameter: input → the other input that is the same artifact. KFP's metadata store allows one event for an artifact
in a task (its table Event is UNIQUE in artifact, execution and type), and its driver fails at the second."""
LOGS = "executor-logs"
"""Output artifact that KFP's driver adds to each task: its launcher writes it, while the task runs."""
SCHEMES = {"s3://": "/s3/", "gs://": "/gcs/", "minio://": "/minio/"}
"""URL scheme → where the launcher keeps the artifact in the container."""


@dataclass
class Task:
    """One execution of a component. `inputs` maps each input artifact to its metadata (an optional one that was not
    passed is absent), `outputs` each output artifact to its message, whose metadata `describe` sets."""

    parameters: JsonObject
    inputs: dict[str, JsonObject]
    outputs: dict[str, JsonObject]
    wanted: tuple[str, ...]
    file: Path
    results: JsonObject = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> "Task":
        """Read a task from the JSON of its executor input."""
        given = json.loads(text)
        inputs = given.get("inputs", {})
        outputs = given["outputs"]
        parameters = dict(inputs.get("parameterValues", {}))
        artifacts = {
            k: dict(v.get("metadata", {})) for k, v in _single(inputs.get("artifacts", {})).items()
        }
        return cls(
            parameters=parameters,
            inputs={
                **artifacts,
                **{k: artifacts[other] for k, other in parameters.get(SAME, {}).items()},
            },
            outputs={k: v for k, v in _single(outputs.get("artifacts", {})).items() if k != LOGS},
            wanted=tuple(outputs.get("parameters", {})),
            file=Path(outputs["outputFile"]),
        )

    def describe(self, name: str, metadata: JsonMapping) -> None:
        """Set the metadata of an output artifact, which consumers and the UI read without opening the artifact."""
        self.outputs[name]["metadata"] = {**self.outputs[name].get("metadata", {}), **metadata}

    def write(self, name: str, text: str) -> None:
        """Write the one file of an output artifact."""
        path = get_local_path(self.outputs[name])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def finish(self) -> None:
        """Write the executor output, and an empty file for each missing output: otherwise the task is not cached."""
        for name, artifact in self.outputs.items():
            if not get_local_path(artifact).exists():
                self.write(name, json.dumps(artifact.get("metadata", {})))
        kept = ("name", "uri", "metadata", "customPath")
        artifacts = {
            name: {"artifacts": [{k: artifact[k] for k in kept if k in artifact}]}
            for name, artifact in self.outputs.items()
        }
        values = {name: value for name, value in self.results.items() if name in self.wanted}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps({"artifacts": artifacts, "parameterValues": values}))


def get_local_path(artifact: JsonMapping) -> Path:
    """Return the path of an artifact in the container."""
    if artifact.get("customPath"):
        return Path(artifact["customPath"])
    uri = str(artifact["uri"])
    for scheme, place in SCHEMES.items():
        if uri.startswith(scheme):
            return Path(place + uri.removeprefix(scheme))
    assert "://" not in uri, f"the KFP launcher gives an artifact of {uri} no path"
    return Path(uri)


def _single(artifacts: JsonMapping) -> dict[str, JsonObject]:
    return {
        name: dict(listed["artifacts"][0])
        for name, listed in artifacts.items()
        if listed.get("artifacts")
    }
