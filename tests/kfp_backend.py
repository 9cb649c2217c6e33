"""A backend of Kubeflow Pipelines for tests: it interprets a compiled pipeline by the rules of KFP 2.17.0's driver and
launcher, over the C++ metadata store that the backend uses (the wheel `ml-metadata`), and runs each task as a process.

The rules were read in backend/src/v2 of kubeflow/pipelines 2.17.0:

- driver/resolve.go: a constant that is a macro as a whole is replaced, any other stays as it is; what a task is not
  given is not in its inputs.
- driver/container.go, cacheutils/cache.go: a task's fingerprint is of its inputs, its outputs' names and types, command
  and image; a task that is in the cache of the pipeline's name runs no container.
- driver/driver.go: each task has one more output artifact, `executor-logs`, which the launcher writes.
- metadata/client.go: all input events of an execution are put at once (one artifact twice fails); a DAG is complete
  when as many of its tasks are COMPLETE or CACHED as it has, and it is asked only when a container of it has ended.
- component/launcher_v2.go: the container's arguments get the executor input with the defaults of parameters, then each
  parameter's placeholder is replaced in the text; every exit code but 0 is a failure.

Argo, which runs this graph on a cluster, is left out: a task starts when those it depends on have succeeded (those of
an exit handler: have ended), one at a time, and has `maxRetryCount` more attempts. (KFP's own manifests give Argo the
retry policy OnError: there a pod that was deleted, or whose program failed, is not started again.)
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.warm import python

pytest.importorskip("ml_metadata", reason="the wheel of KFP's metadata store is for Python 3.11")

from ml_metadata import errors
from ml_metadata.metadata_store.metadata_store import MetadataStore
from ml_metadata.proto import metadata_store_pb2 as pb

AlreadyExistsError = errors.AlreadyExistsError

ENDED_WELL = (pb.Execution.COMPLETE, pb.Execution.CACHED)


class TaskFailed(Exception):
    """A task of the run ended with an error."""


@dataclass
class Values:
    """Inputs or outputs of a task: parameters by name, and artifacts as rows of the metadata store."""

    parameters: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, pb.Artifact] = field(default_factory=dict)


@dataclass
class BackendRun:
    """A run of a pipeline.

    Attributes:
        started: the tasks whose container was started, in order, each as often as it was.
        skipped: the tasks that the cache knew.
    """

    id: str
    name: str
    parameters: dict[str, Any]
    package: Path
    started: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    outputs: dict[str, Values] = field(default_factory=dict)
    executions: dict[str, int] = field(default_factory=dict)


class Backend:
    """Runs pipelines.

    Args:
        root: directory of what KFP keeps: handles and previews.

    Attributes:
        runs: by creation.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.runs = root, list[BackendRun]()
        config = pb.ConnectionConfig()
        config.sqlite.SetInParent()  # in memory
        self.store = MetadataStore(config)
        self._types: dict[str, int] = {}
        self._cache: dict[str, int] = {}

    def run(
        self, package: Path, name: str, *, cache: bool = True, run_id: str = "", **parameters: Any
    ) -> BackendRun:
        """Run a compiled pipeline to its end.

        Raises:
            TaskFailed: one of its tasks failed; what its exit handler runs has ended.
        """
        spec = next(yaml.load_all(package.read_text(), yaml.CSafeLoader))
        run = BackendRun(run_id or str(uuid.uuid4()), name, parameters, package)
        self.runs.append(run)
        wanted = spec["root"].get("inputDefinitions", {}).get("parameters", {})
        defaults = {k: v["defaultValue"] for k, v in wanted.items() if "defaultValue" in v}
        assert set(parameters) <= set(wanted), parameters
        given = Values({**defaults, **parameters})
        Interpreter(self, run, spec, cache).run_dag("root", "root", spec["root"], given, None)
        return run

    def get_states(self, run: BackendRun) -> dict[str, str]:
        """Return what the metadata store says of each task of a run, DAGs among them."""
        found = self.store.get_executions_by_id([*run.executions.values()])
        by_id = {each.id: pb.Execution.State.Name(each.last_known_state) for each in found}
        return {task: by_id[number] for task, number in run.executions.items()}

    def read_page(self, run: BackendRun, task: str, output: str = "") -> str:
        """Return the file of an output artifact, by default the one that is named as its task."""
        return Path(run.outputs[f"root/{task}"].artifacts[output or task].uri).read_text()

    def get_type(self, kind: str, make: Any, put: Any) -> int:
        if kind not in self._types:
            self._types[kind] = put(make(name=kind))
        return self._types[kind]


class Interpreter:
    """Interprets the compiled specification of one run."""

    def __init__(
        self, backend: Backend, run: BackendRun, spec: Mapping[str, Any], cache: bool
    ) -> None:
        self.backend, self.run, self.spec, self.cache = backend, run, spec, cache
        self.store = backend.store
        self.macros = {
            "{{$.pipeline_job_name}}": run.name,
            "{{$.pipeline_job_uuid}}": run.id,
            "{{$.pipeline_job_resource_name}}": f"workflow-{run.id[:8]}",
        }

    # ------------------------------------------------------------------ driver

    def run_dag(
        self, name: str, path: str, component: Mapping[str, Any], given: Values, parent: int | None
    ) -> None:
        """Run the tasks of a DAG; raises the first failure once nothing of it can be started any more."""
        tasks = component["dag"]["tasks"]
        dag = self.create_execution(
            "system.DAGExecution", name, path, given, parent, total_dag_tasks=len(tasks)
        )
        succeeded, failed = set[str](), dict[str, TaskFailed]()
        waiting = dict(tasks)
        while waiting:
            ended = succeeded | set(failed)
            ready = next(
                (k for k, task in waiting.items() if _is_ready(task, succeeded, ended)), None
            )
            if ready is None:
                break  # what they depend on has failed
            task = waiting.pop(ready)
            try:
                self.run_task(ready, f"{path}/{ready}", task, given, dag)
                succeeded.add(ready)
            except TaskFailed as error:
                failed[ready] = error
        for error in failed.values():
            raise error

    def run_task(
        self, name: str, path: str, task: Mapping[str, Any], scope: Values, dag: int
    ) -> None:
        component = self.spec["components"][task["componentRef"]["name"]]
        given = self.resolve_inputs(task, component, scope, path)
        assert "parameterIterator" not in task and "condition" not in task.get(
            "triggerPolicy", {}
        ), "ours have none"
        if "dag" in component:
            self.run_dag(name, path, component, given, dag)
        else:
            self.run_container(name, path, task, component, given, dag)

    def resolve_inputs(
        self, task: Mapping[str, Any], component: Mapping[str, Any], scope: Values, path: str
    ) -> Values:
        wanted = component.get("inputDefinitions", {})
        inputs, resolved = task.get("inputs", {}), Values()
        beside = path.rpartition("/")[0]
        for name, source in inputs.get("parameters", {}).items():
            if "componentInputParameter" in source:
                value = scope.parameters.get(source["componentInputParameter"])
            elif "taskOutputParameter" in source:
                made = source["taskOutputParameter"]
                value = self.run.outputs[f"{beside}/{made['producerTask']}"].parameters[
                    made["outputParameterKey"]
                ]
            else:
                value = source["runtimeValue"]["constant"]
                value = self.macros.get(value, value) if isinstance(value, str) else value
            if value is not None:
                resolved.parameters[name] = value
        for name, source in inputs.get("artifacts", {}).items():
            if "componentInputArtifact" in source:
                resolved.artifacts[name] = scope.artifacts[source["componentInputArtifact"]]
            else:
                made = source["taskOutputArtifact"]
                outputs = self.run.outputs[f"{beside}/{made['producerTask']}"]
                resolved.artifacts[name] = outputs.artifacts[made["outputArtifactKey"]]
        for name, definition in wanted.get("parameters", {}).items():
            assert name in resolved.parameters or definition.get("isOptional"), (
                f"{path}: {name} is not given"
            )
            if name in resolved.parameters:
                _check_type(
                    f"{path}: {name}", definition["parameterType"], resolved.parameters[name]
                )
        for name, definition in wanted.get("artifacts", {}).items():
            assert name in resolved.artifacts or definition.get("isOptional"), (
                f"{path}: {name} is not given"
            )
        return resolved

    def create_execution(
        self,
        kind: str,
        name: str,
        path: str,
        given: Values,
        parent: int | None,
        total_dag_tasks: int = 0,
    ) -> int:
        """Put an execution with an event for each of its input artifacts."""
        number = self.backend.get_type(kind, pb.ExecutionType, self.store.put_execution_type)
        execution = pb.Execution(type_id=number, last_known_state=pb.Execution.RUNNING)
        execution.custom_properties["task_name"].string_value = name
        execution.custom_properties["parent_dag_id"].int_value = parent or 0
        execution.custom_properties["total_dag_tasks"].int_value = total_dag_tasks
        pairs = [
            (artifact, _event(pb.Event.INPUT, key)) for key, artifact in given.artifacts.items()
        ]
        made: int = self.store.put_execution(execution, pairs, [])[0]
        self.run.executions[path] = made
        return made

    # ------------------------------------------------------------------ launcher

    def run_container(
        self,
        name: str,
        path: str,
        task: Mapping[str, Any],
        component: Mapping[str, Any],
        given: Values,
        dag: int,
    ) -> None:
        container = self.spec["deploymentSpec"]["executors"][component["executorLabel"]][
            "container"
        ]
        key = _compute_fingerprint(self.spec["pipelineInfo"]["name"], component, container, given)
        number = self.create_execution("system.ContainerExecution", name, path, given, dag)
        enabled = self.cache and task.get("cachingOptions", {}).get("enableCache", False)
        if enabled and key in self.backend._cache:
            self.run.outputs[path] = self.read_outputs(self.backend._cache[key])
            self.publish(number, pb.Execution.CACHED, self.run.outputs[path], new=False)
            self.run.skipped.append(name)
            return  # nobody asks after the DAG: only a launcher does
        try:
            for attempt in range(int(task.get("retryPolicy", {}).get("maxRetryCount", 0)) + 1):
                executor_input = self.provision(path, attempt, component, given)
                self.run.started.append(name)
                if self.execute(container, executor_input):
                    break
            else:
                self.publish(number, pb.Execution.FAILED, Values(), new=True)
                raise TaskFailed(path)
            outputs = self.collect(executor_input, component)
            self.run.outputs[path] = outputs
            self.publish(number, pb.Execution.COMPLETE, outputs, new=True)
            if enabled:
                self.backend._cache[key] = number
        finally:
            self.update_dag(dag)

    def provision(
        self, path: str, attempt: int, component: Mapping[str, Any], given: Values
    ) -> dict[str, Any]:
        """Build the executor input, with the defaults that the launcher adds."""
        place = self.backend.root / self.run.id / path / str(attempt)
        definitions = component.get("inputDefinitions", {}).get("parameters", {})
        defaults = {k: v["defaultValue"] for k, v in definitions.items() if "defaultValue" in v}
        outputs = component.get("outputDefinitions", {})
        logs = {"executor-logs": {"artifactType": {"schemaTitle": "system.Artifact"}}}
        return {
            "inputs": {
                "parameterValues": {**defaults, **given.parameters},
                "artifacts": {
                    k: {"artifacts": [_describe(each)]} for k, each in given.artifacts.items()
                },
            },
            "outputs": {
                "artifacts": {
                    k: {
                        "artifacts": [
                            {"name": k, "uri": str(place / k), "type": each["artifactType"]}
                        ]
                    }
                    for k, each in {**outputs.get("artifacts", {}), **logs}.items()
                },
                "parameters": {
                    k: {"outputFile": str(place / "parameters" / k)}
                    for k in outputs.get("parameters", {})
                },
                "outputFile": str(place / "executor_output.json"),
            },
        }

    def execute(self, container: Mapping[str, Any], executor_input: Mapping[str, Any]) -> bool:
        """Run the container's command here; it succeeded if it ends with 0."""
        values = executor_input["inputs"]["parameterValues"]

        def compile_text(text: str) -> str:
            text = text.replace("{{$}}", json.dumps(executor_input))
            for name, value in values.items():
                text = text.replace("{{$.inputs.parameters['%s']}}" % name, _write(value))
            return text

        assert container["command"][0] == "python3"
        command = [
            python(),
            *(
                compile_text(word)
                for word in (*container["command"][1:], *container.get("args", ()))
            ),
        ]
        environment = {each["name"]: each["value"] for each in container.get("env", ())}
        log = Path(executor_input["outputs"]["artifacts"]["executor-logs"]["artifacts"][0]["uri"])
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as file:
            done = subprocess.run(
                command, env={**os.environ, **environment}, stdout=file, stderr=subprocess.STDOUT
            )
        print(log.read_text())
        return done.returncode == 0

    def collect(self, executor_input: Mapping[str, Any], component: Mapping[str, Any]) -> Values:
        """Read the executor output, as the launcher does before it publishes."""
        told = json.loads(Path(executor_input["outputs"]["outputFile"]).read_text())
        outputs, definitions = Values(), component.get("outputDefinitions", {})
        for name, definition in definitions.get("parameters", {}).items():
            assert name in told["parameterValues"], f"output parameter {name} is not there"
            outputs.parameters[name] = told["parameterValues"][name]
            _check_type(name, definition["parameterType"], outputs.parameters[name])
        for name, listed in executor_input["outputs"]["artifacts"].items():
            (runtime,) = listed["artifacts"]
            assert Path(runtime["uri"]).exists(), f"output artifact {name} has no file"
            kind = runtime["type"]["schemaTitle"]
            number = self.backend.get_type(kind, pb.ArtifactType, self.store.put_artifact_type)
            artifact = pb.Artifact(type_id=number, uri=runtime["uri"])
            metadata = told["artifacts"].get(name, {}).get("artifacts", [{}])[0].get("metadata", {})
            assert None not in metadata.values(), f"{name}: metadata/converter.go takes no null"
            artifact.custom_properties["metadata"].string_value = json.dumps(metadata)
            outputs.artifacts[name] = artifact
        return outputs

    def publish(self, number: int, state: int, outputs: Values, *, new: bool) -> None:
        (execution,) = self.store.get_executions_by_id([number])
        execution.last_known_state = state
        execution.custom_properties["outputs"].string_value = json.dumps(outputs.parameters)
        for name, artifact in outputs.artifacts.items():
            artifact.custom_properties["name"].string_value = name
            if new:
                (artifact.id,) = self.store.put_artifacts([artifact])
        pairs = [
            (artifact, _event(pb.Event.OUTPUT, name))
            for name, artifact in outputs.artifacts.items()
        ]
        self.store.put_execution(execution, pairs, [])

    def read_outputs(self, number: int) -> Values:
        (execution,) = self.store.get_executions_by_id([number])
        events = [
            e for e in self.store.get_events_by_execution_ids([number]) if e.type == pb.Event.OUTPUT
        ]
        names = {event.artifact_id: event.path.steps[0].key for event in events}
        artifacts = (
            {names[each.id]: each for each in self.store.get_artifacts_by_id([*names])}
            if names
            else {}
        )
        return Values(json.loads(execution.custom_properties["outputs"].string_value), artifacts)

    def update_dag(self, number: int) -> None:
        """Complete a DAG all of whose tasks have ended, and those that it is in; the root's own state stays."""
        (dag,) = self.store.get_executions_by_id([number])
        parent = dag.custom_properties["parent_dag_id"].int_value
        total = dag.custom_properties["total_dag_tasks"].int_value
        inside = [
            each
            for each in self.store.get_executions_by_id([*self.run.executions.values()])
            if each.custom_properties["parent_dag_id"].int_value == number
        ]
        if sum(each.last_known_state in ENDED_WELL for each in inside) == total:
            dag.last_known_state = pb.Execution.COMPLETE
        elif any(each.last_known_state == pb.Execution.FAILED for each in inside):
            dag.last_known_state = pb.Execution.FAILED
        else:
            return
        self.store.put_executions([dag])
        if parent:
            self.update_dag(parent)


def _is_ready(task: Mapping[str, Any], succeeded: set[str], ended: set[str]) -> bool:
    enough = (
        ended
        if task.get("triggerPolicy", {}).get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED"
        else succeeded
    )
    return set(task.get("dependentTasks", ())) <= enough


def _check_type(what: str, kind: str, value: Any) -> None:
    expected: Mapping[str, Any] = {
        **{
            "STRING": str,
            "NUMBER_INTEGER": (int, float),
            "NUMBER_DOUBLE": (int, float),
            "BOOLEAN": bool,
        },
        **{"LIST": list, "STRUCT": dict},
    }
    good = isinstance(value, expected[kind]) and (kind == "BOOLEAN" or not isinstance(value, bool))
    assert good, f"{what}: type mismatch: {kind}, {value!r}"


def _compute_fingerprint(
    pipeline: str, component: Mapping[str, Any], container: Mapping[str, Any], given: Values
) -> str:
    outputs = component.get("outputDefinitions", {})
    parts = [
        pipeline,
        given.parameters,
        {name: artifact.id for name, artifact in given.artifacts.items()},
        outputs,
        [*container["command"], *container.get("args", ())],
        container["image"],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _event(kind: int, key: str) -> pb.Event:
    event = pb.Event(type=kind)
    event.path.steps.add(key=key)
    return event


def _describe(artifact: pb.Artifact) -> dict[str, Any]:
    metadata = json.loads(artifact.custom_properties["metadata"].string_value)
    return {"name": str(artifact.id), "uri": artifact.uri, "metadata": metadata}


def _write(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.17g}" if isinstance(value, float) else json.dumps(value)
