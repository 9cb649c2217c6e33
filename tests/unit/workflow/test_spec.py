"""What the executor refuses, before anything runs."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.local.making import dag, run, shell, task, workflow
from tuneloop.core.errors import UserError
from tuneloop.local.executor import execute_workflow
from tuneloop.workflow.manifest import parse_duration

OK = shell("ok", "true")
MAIN = dag(task("t", "ok"))


def pod(**more: Any) -> dict[str, Any]:
    return {**OK, **more}


def container(**more: Any) -> dict[str, Any]:
    return {**OK, "container": {**OK["container"], **more}}


@pytest.mark.parametrize(
    ("templates", "spec", "field"),
    [
        ([pod(sidecars=[{"name": "s"}]), MAIN], {}, "spec.templates.ok.sidecars"),
        ([pod(initContainers=[{"name": "s"}]), MAIN], {}, "spec.templates.ok.initContainers"),
        ([pod(memoize={"key": "k"}), MAIN], {}, "spec.templates.ok.memoize"),
        ([pod(synchronization={"mutexes": []}), MAIN], {}, "spec.templates.ok.synchronization"),
        ([pod(misspelt=1), MAIN], {}, "spec.templates.ok.misspelt"),
        ([container(livenessProbe={}), MAIN], {}, "spec.templates.ok.container.livenessProbe"),
        (
            [container(volumeMounts=[{"name": "v", "mountPath": "/v", "subPath": "s"}]), MAIN],
            {},
            "volumeMounts.v.subPath",
        ),
        (
            [OK, MAIN],
            {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]},
            "spec.volumes.v.hostPath",
        ),
        ([OK, MAIN], {"synchronization": {"semaphores": []}}, "spec.synchronization.semaphores"),
        ([OK, MAIN], {"shutdown": "Stop"}, "spec.shutdown"),
        (
            [OK, dag(task("t", "ok", inline={"container": {}}))],
            {},
            "spec.templates.main.dag.tasks.t.inline",
        ),
        (
            [OK, dag(task("t", "ok", arguments={"artifacts": []}))],
            {},
            "tasks.t.arguments.artifacts",
        ),
        ([pod(outputs={"artifacts": []}), MAIN], {}, "spec.templates.ok.outputs.artifacts"),
        (
            [OK, dag(task("t", "ok", withSequence={"count": 2}))],
            {},
            "spec.templates.main.dag.tasks.t.withSequence",
        ),
        (
            [OK, dag(task("t", "ok", withItems=[1]))],
            {},
            "spec.templates.main.dag.tasks.t.withItems",
        ),
        (
            [OK, dag(task("t", "ok", withParam="[1]"))],
            {},
            "spec.templates.main.dag.tasks.t.withParam",
        ),
        ([OK, {**MAIN, "parallelism": 1}], {}, "spec.templates.main.parallelism"),
        ([pod(timeout="1m"), MAIN], {}, "spec.templates.ok.timeout"),
        ([pod(activeDeadlineSeconds=1), MAIN], {}, "spec.templates.ok.activeDeadlineSeconds"),
        (
            [pod(inputs={"parameters": [{"name": "x", "enum": ["a"]}]}), MAIN],
            {},
            "inputs.parameters.x.enum",
        ),
        (
            [container(readinessProbe={"httpGet": {"scheme": "HTTPS"}}), MAIN],
            {},
            "readinessProbe.httpGet.scheme",
        ),
        (
            [container(readinessProbe={"initialDelaySeconds": 1}), MAIN],
            {},
            "readinessProbe.initialDelaySeconds",
        ),
        (
            [OK, dag(task("t", "ok", continueOn={"failed": True}))],
            {},
            "spec.templates.main.dag.tasks.t.continueOn",
        ),
        (
            [OK, {"name": "main", "dag": {"target": "t", "tasks": []}}],
            {},
            "spec.templates.main.dag.target",
        ),
        ([OK, {**MAIN, "failFast": True}], {}, "spec.templates.main.failFast"),
        ([OK, {"name": "main", "steps": [[task("t", "ok")]]}], {}, "spec.templates.main.steps"),
        (
            [container(readinessProbe={"exec": {}}), MAIN],
            {},
            "spec.templates.ok.container.readinessProbe.exec",
        ),
        (
            [pod(retryStrategy={"backoff": {"cap": "1m"}}), MAIN],
            {},
            "spec.templates.ok.retryStrategy.backoff.cap",
        ),
        (
            [pod(retryStrategy={"limit": 1, "retryPolicy": "OnTransientError"}), MAIN],
            {},
            "templates.ok.retryStrategy.retryPolicy",
        ),
        ([OK, MAIN], {"activeDeadlineSeconds": 1}, "spec.activeDeadlineSeconds"),
        ([OK, MAIN], {"templateDefaults": {}}, "spec.templateDefaults"),
        ([OK, MAIN], {"retryStrategy": {"limit": 1}}, "spec.retryStrategy"),
        (
            [{"name": "ok", "resource": {"action": "create"}}, MAIN],
            {},
            "spec.templates.ok.resource",
        ),
        ([{"name": "ok", "http": {"url": "u"}}, MAIN], {}, "spec.templates.ok.http"),
        ([{"name": "ok", "script": {"source": "true"}}, MAIN], {}, "spec.templates.ok.script"),
        ([{"name": "ok", "suspend": {"duration": "1"}}, MAIN], {}, "spec.templates.ok.suspend"),
        (
            [OK, dag({"name": "t", "templateRef": {"name": "lib", "template": "x"}})],
            {},
            "tasks.t.templateRef",
        ),
        ([OK, dag(task("t", "ok", onExit="ok"))], {}, "spec.templates.main.dag.tasks.t.onExit"),
        (
            [OK, dag(task("t", "ok", hooks={"exit": {"template": "ok"}}))],
            {},
            "spec.templates.main.dag.tasks.t.hooks",
        ),
        ([OK, MAIN], {"hooks": {"exit": {"template": "ok"}}}, "spec.hooks"),
        ([OK, MAIN], {"workflowTemplateRef": {"name": "all"}}, "spec.workflowTemplateRef"),
        ([OK, MAIN], {"workflowSpec": {}}, "spec.workflowSpec"),
        (
            [OK, dag(task("t", "ok"), task("u", "ok", when="{{tasks.t.outputs.result}} == x"))],
            {},
            "t.outputs.result",
        ),
        ([{"name": "ok", "containerSet": {}}, MAIN], {}, "spec.templates.ok.containerSet"),
        ([{"name": "ok"}, MAIN], {}, "templates.ok: "),
        ([container(command=[]), MAIN], {}, "templates.ok.command"),
        (
            [container(env=[{"name": "A", "valueFrom": {"resourceFieldRef": {}}}]), MAIN],
            {},
            "resourceFieldRef",
        ),
        (
            [container(env=[{"name": "A", "valueFrom": {"secretKeyRef": {}}}]), MAIN],
            {},
            "env.A.valueFrom.secretKeyRef",
        ),
        (
            [
                container(
                    env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.phase"}}}]
                ),
                MAIN,
            ],
            {},
            "fieldRef",
        ),
        ([container(envFrom=[{"secretRef": {"name": "s"}}]), MAIN], {}, "envFrom"),
        (
            [{**OK, "volumes": [{"name": "v", "secret": {"secretName": "s"}}]}, MAIN],
            {},
            "templates.ok.volumes.v: 's'",
        ),
        ([OK, dag(task("t", "missing"))], {}, "templates.main.t.template: 'missing'"),
        (
            [OK, dag(task("a", "ok", depends="b"), task("b", "ok", depends="a"))],
            {},
            "templates.main.dag: ['a', 'b']",
        ),
        ([OK, dag(task("a", "ok", depends="zz"))], {}, "tasks.a.depends: 'zz'"),
        (
            [OK, dag(task("a", "ok"), task("b", "ok", depends="a.Done"))],
            {},
            "tasks.b.depends: 'a.Done'",
        ),
    ],
)
def test_refused_by_name(
    tmp_path: Path, templates: list[Any], spec: dict[str, Any], field: str
) -> None:
    with pytest.raises(UserError) as caught:
        run(tmp_path / "run", *templates, **spec)
    assert field in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_what_only_a_cluster_reads_is_accepted(tmp_path: Path) -> None:
    of_pod = {
        "metadata": {"labels": {"a": "b"}},
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "gpu"}],
        "serviceAccountName": "stage",
        "podSpecPatch": "{}",
        "securityContext": {"runAsNonRoot": True},
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    told = {
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "imagePullPolicy": "Always",
        "ports": [{"containerPort": 1}],
    }
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    template = {**container(**told, volumeMounts=mounts), **of_pod}
    spec: dict[str, Any] = {
        "podGC": {"strategy": "OnPodSuccess"},
        "ttlStrategy": {"secondsAfterSuccess": 1},
        "priority": 3,
    }
    assert run(tmp_path, template, MAIN, **spec).phase == "Succeeded"


@pytest.mark.parametrize(
    ("parameters", "arguments", "told"),
    [
        (
            [{"name": "n", "value": "1"}],
            {"m": "2"},
            "parameter m: '2': is not a parameter; known: n",
        ),
        ([{"name": "n"}], {}, "parameter n: None: is required"),
    ],
)
def test_arguments(
    tmp_path: Path, parameters: list[Any], arguments: dict[str, str], told: str
) -> None:
    document = workflow(OK, MAIN)
    document["spec"]["arguments"] = {"parameters": parameters}
    with pytest.raises(UserError) as caught:
        execute_workflow(document, workdir=tmp_path / "run", arguments=arguments, warm=False)
    assert str(caught.value) == told


def test_entrypoint_and_exit_handler_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"spec.entrypoint: 'other': no such template"):
        run(tmp_path, OK, MAIN, entrypoint="other")
    with pytest.raises(UserError, match=r"spec.onExit: 'bye': no such template"):
        run(tmp_path, OK, MAIN, onExit="bye")


@pytest.mark.parametrize(
    ("text", "value"),
    [("30", 30), (30, 30), ("1m30s", 90), ("2h", 7200), ("250ms", 0.25), ("1.5h", 5400)],
)
def test_durations(text: str | int, value: float) -> None:
    assert parse_duration(text) == value


def test_a_faulty_duration() -> None:
    with pytest.raises(UserError, match="write seconds, or units"):
        parse_duration("soon")
