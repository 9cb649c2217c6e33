"""KFP's executor input and output, in JSON, as the launcher writes the one and reads the other.

The launcher replaces ``{{$}}`` in a container's arguments by the executor input and, once the program has ended
well, reads the file named in it: what stands there reaches metadata, the cache and the UI. The formats are the
messages ``ExecutorInput`` and ``ExecutorOutput`` of KFP's pipeline_spec.proto. kfp itself is not needed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SAME = "same_artifact"
"""Parameter: input → the other input that is the same artifact. KFP's metadata store has one event for an artifact in a
task (its table Event is UNIQUE in artifact, execution and type), and its driver fails at the second."""
LOGS = "executor-logs"
"""Output artifact that KFP's driver adds to each task: its launcher writes it, while the task runs."""
SCHEMES = {"s3://": "/s3/", "gs://": "/gcs/", "minio://": "/minio/"}
"""URL scheme → where the launcher keeps the artifact in the container."""


@dataclass
class Task:
    """One execution of a component.

    Attributes:
        inputs: input artifact → its metadata; an optional one that was not passed is absent.
        outputs: output artifact → what is to be said of it; `write` and `describe` fill it.
    """

    parameters: dict[str, Any]
    inputs: dict[str, dict[str, Any]]
    outputs: dict[str, dict[str, Any]]
    wanted: tuple[str, ...]
    file: Path
    results: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> "Task":
        """From the executor input."""
        given = json.loads(text)
        inputs, outputs = given.get("inputs", {}), given["outputs"]
        parameters = dict(inputs.get("parameterValues", {}))
        artifacts = {k: dict(v.get("metadata", {})) for k, v in _single(inputs.get("artifacts", {})).items()}
        return cls(
            parameters=parameters,
            inputs={**artifacts, **{k: artifacts[other] for k, other in parameters.get(SAME, {}).items()}},
            outputs={k: v for k, v in _single(outputs.get("artifacts", {})).items() if k != LOGS},
            wanted=tuple(outputs.get("parameters", {})),
            file=Path(outputs["outputFile"]),
        )

    def describe(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Set the metadata of an output artifact: what consumers and the UI read without opening it."""
        self.outputs[name]["metadata"] = {**self.outputs[name].get("metadata", {}), **metadata}

    def write(self, name: str, text: str) -> None:
        """Write the one file of an output artifact."""
        path = get_local_path(self.outputs[name])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def finish(self) -> None:
        """Write the executor output, and a file for each output that has none: without it, no cache holds the task."""
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


def get_local_path(artifact: Mapping[str, Any]) -> Path:
    """Return the path of an artifact in the container."""
    if artifact.get("customPath"):
        return Path(artifact["customPath"])
    uri = str(artifact["uri"])
    for scheme, place in SCHEMES.items():
        if uri.startswith(scheme):
            return Path(place + uri.removeprefix(scheme))
    assert "://" not in uri, f"the KFP launcher gives an artifact of {uri} no path"
    return Path(uri)


def _single(artifacts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: dict(listed["artifacts"][0]) for name, listed in artifacts.items() if listed.get("artifacts")}
