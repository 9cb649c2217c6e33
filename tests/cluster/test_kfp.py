"""Jobs of two pods from Kubeflow Pipelines: the compiled task's own container launches a JobSet or a TrainJob.

No KFP backend is here. What its launcher would do is done by the test: the pod gets the command of the compiled
pipeline, with ``{{$}}`` replaced by an executor input, and the executor output is read where it was asked for.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import dsl

from tests.cluster.conftest import ROOT, STORE, kubectl
from tests.cluster.test_jobset import SMALL
from tests.cluster.volumes import apply
from tuneloop.config.loading import find_pipeline
from tuneloop.config.pipeline import Kfp
from tuneloop.extensions.trainers.kfp_step import NAME, format_placeholder, launch_step
from tuneloop.extensions.trainers.launch import job_name
from tuneloop.extensions.trainers.trainjob import as_trainjob
from tuneloop.kfp.client import compile_to
from tuneloop.kube.connection import Connection
from tuneloop.training.backends.native import Native

pytestmark = pytest.mark.cluster

IMAGES = os.environ.get("TUNELOOP_TEST_IMAGES", "tuneloop/{image}:dev")
SETTINGS = [
    *(
        "data.train=16",
        "data.eval=4",
        "data.sft=32",
        "sft.max_steps=4",
        "trainer.per_device_train_batch_size=4",
    ),
    *("trainer.device=cpu", "nodes=2", f"cluster.images={IMAGES}"),
    *(f"cluster.{role}={{cpu: 100m, memory: 2Gi}}" for role in ("trainer", "cpu")),
]


def compiled(built: Any, directory: Path) -> dict[str, Any]:
    """The document of a pipeline."""
    compile_to(built, directory / "pipeline.yaml")
    found: dict[str, Any] = next(
        iter(yaml.load_all((directory / "pipeline.yaml").read_text(), yaml.CSafeLoader))
    )
    return found


class Tasks:
    """Runs tasks of a compiled pipeline as pods, one after another."""

    def __init__(self, namespace: str, run: str, spec: dict[str, Any]) -> None:
        self.namespace, self.run, self.spec = namespace, run, spec

    def start(
        self, task: str, inputs: dict[str, Any] | None = None, **changed: Any
    ) -> tuple[int, str, dict[str, Any]]:
        """Exit code, output, and what was told: the handle of the stage's artifact, and output parameters."""
        graph = self.spec["components"].get("comp-exit-handler-1") or self.spec["root"]
        within = graph["dag"]["tasks"][task]
        constants = {
            k: v["runtimeValue"]["constant"]
            for k, v in within["inputs"]["parameters"].items()
            if _fixed(v)
        }
        component = self.spec["components"][f"comp-{task}"]
        outputs = component["outputDefinitions"].get("artifacts", {})
        executor_input = {
            "inputs": {
                "parameterValues": {
                    **constants,
                    "url": f"{STORE}/{self.run}/{task}",
                    "seed": 0,
                    **changed,
                },
                "artifacts": {
                    k: {"artifacts": [{"uri": "s3://x/y", "metadata": v}]}
                    for k, v in (inputs or {}).items()
                },
            },
            "outputs": {
                "artifacts": {
                    k: {"artifacts": [{"name": k, "uri": f"/tmp/kfp/{k}"}]} for k in outputs
                },
                "parameters": {k: {} for k in component["outputDefinitions"].get("parameters", {})},
                "outputFile": "/tmp/kfp/output.json",
            },
        }
        container = self.spec["deploymentSpec"]["executors"][component["executorLabel"]][
            "container"
        ]
        args = [word.replace("{{$}}", json.dumps(executor_input)) for word in container["args"]]
        name = f"{self.run}-{task}"
        self._pod(name, container["image"], [*container["command"], *args])
        ended = "jsonpath={.status.containerStatuses[0].state.terminated.exitCode}"
        kubectl("-n", self.namespace, "wait", "pod", name, f"--for={ended}", "--timeout=1800s")
        code = int(kubectl("-n", self.namespace, "get", "pod", name, "-o", ended))
        said = kubectl("-n", self.namespace, "logs", name)
        kubectl("-n", self.namespace, "delete", "pod", name)
        told = (
            json.loads(said.rpartition("EXECUTOR OUTPUT ")[2]) if code == 0 else {"artifacts": {}}
        )
        artifacts = [
            listed["artifacts"][0].get("metadata", {}) for listed in told["artifacts"].values()
        ]
        handle: dict[str, Any] = next((about for about in artifacts if "ref" in about), {})
        return code, said, {**told.get("parameterValues", {}), **handle}

    def _pod(self, name: str, image: str, command: list[str]) -> None:
        script = '"$@" && echo && echo "EXECUTOR OUTPUT $(cat /tmp/kfp/output.json)"'
        container = {
            **{"name": "main", "image": image, "command": ["sh", "-c", script, "sh", *command]},
            "envFrom": [
                {"configMapRef": {"name": "tuneloop-store"}},
                {"secretRef": {"name": "tuneloop-store"}},
            ],
            # Without a request of CPU a pod gets what nobody else wants, which beside other tests is nothing.
            "resources": {"requests": {"cpu": "200m", "memory": "512Mi"}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            },
        }
        spec = {
            **{
                "restartPolicy": "Never",
                "serviceAccountName": "tuneloop-launcher",
                "containers": [container],
            },
            "automountServiceAccountToken": True,
            "securityContext": {
                **{"runAsNonRoot": True, "runAsUser": 1000},
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        }
        about = {"name": name, "namespace": self.namespace, "labels": {"test": self.run}}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}
        subprocess.run(
            ["kubectl", "create", "-f", "-"], input=json.dumps(body), text=True, check=True
        )


def _fixed(value: dict[str, Any]) -> bool:
    return "runtimeValue" in value and "{{" not in str(value["runtimeValue"]["constant"])


@pytest.fixture(scope="module")
def tasks(cluster: Connection, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tasks]:
    """Of the sft pipeline, in a run of its own."""
    pipeline, run = find_pipeline("sft"), f"t{os.urandom(4).hex()}"
    built = pipeline.module.build_kfp(pipeline.configure(None, SETTINGS))
    yield Tasks(cluster.namespace, run, compiled(built, tmp_path_factory.mktemp("kfp")))
    kubectl("-n", cluster.namespace, "delete", "pods", "-l", f"test={run}", "--wait=false")


@pytest.fixture(scope="module")
def made(tasks: Tasks) -> dict[str, Any]:
    """Handles of prompts and of a model in the store."""
    code, said, prompts = tasks.start("data-prep")
    assert code == 0, said
    code, said, model = tasks.start("base-model", {"prompts": prompts})
    assert code == 0, said
    return {"policy": model, "prompts": prompts}


def test_a_stage_of_two_pods_is_launched_followed_and_told(
    tasks: Tasks, made: dict[str, Any]
) -> None:
    code, said, trained = tasks.start("sft", made)
    assert code == 0, said
    assert "node-0-0: " in said, "the pods' own lines"
    assert (trained["version"], trained["stage"]) == (1, "sft") and trained["ref"].startswith(
        f"{STORE}/{tasks.run}/sft@"
    )
    code, said, again = tasks.start("sft", made)
    assert (code, again) == (0, trained) and "node-0-0: " not in said, (
        "committed: no job was started"
    )

    code, said, _ = tasks.start(
        "sft", {**made, "prompts": made["policy"]}, url=f"{STORE}/{tasks.run}/wrong"
    )
    assert code == 2, said
    assert "holds no sft.parquet" in said, "the trainer's last words"


@pytest.fixture
def runtimes() -> Iterator[None]:
    """The ClusterTrainingRuntimes that ``manifests/components/trainer`` brings, with the images under test."""
    text = (ROOT / "manifests/components/trainer/torch.yaml").read_text()
    text = text.replace("tuneloop/trainer:dev", IMAGES.format(image="trainer"))
    apply(text)
    yield
    apply(text, "delete")


@pytest.mark.slow
def test_a_trainjob_of_two_pods_as_a_component_of_any_pipeline(
    tasks: Tasks, made: dict[str, Any], runtimes: None, tmp_path: Path
) -> None:
    own = {
        "policy": format_placeholder("policy"),
        "prompts": format_placeholder("prompts"),
        "checkpoint": format_placeholder("url"),
    }
    backend = Native(
        nodes=2, args={**own, "max_steps": 3, "device": "cpu", "per_device_train_batch_size": 2}
    )
    job, inputs = as_trainjob(backend, NAME, SMALL), ["policy", "prompts"]
    step = launch_step(
        job, inputs=inputs, parameters=["url"], cluster=SMALL, kfp=Kfp(jobs=tasks.namespace)
    )

    @dsl.pipeline(name="own")
    def built(
        policy: dsl.Input[dsl.Model], prompts: dsl.Input[dsl.Dataset], url: str, job_name: str
    ) -> None:
        step("trainjob", job_name=job_name, url=url, policy=policy, prompts=prompts)

    own_tasks = Tasks(tasks.namespace, tasks.run, compiled(built, tmp_path))
    for given in (
        {"job_name": f"{tasks.run}-pair"},
        {"job_name": f"{tasks.run}-pair"},
    ):  # the second finds the first's job
        code, said, told = own_tasks.start(
            "trainjob", made, url=f"{STORE}/{tasks.run}/pair", **given
        )
        assert code == 0, said
        assert (
            told["job"].startswith(f"{tasks.run}-pair-")
            and "node-0-0: " in said
            and "node-0-1: " in said
        )
    wrong = {"job_name": f"{tasks.run}-wrong", "url": f"{STORE}/{tasks.run}/wrong"}
    try:
        code, said, _ = own_tasks.start("trainjob", {**made, "prompts": made["policy"]}, **wrong)
    finally:  # a runtime outlasts its deletion as long as a job names it
        for name in (told["job"], job_name(wrong["job_name"])):
            kubectl("-n", tasks.namespace, "delete", "trainjobs", name, "--ignore-not-found")
    assert code == 2 and "holds no sft.parquet" in said, said
