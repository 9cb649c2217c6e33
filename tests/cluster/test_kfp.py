"""A stage of two pods from Kubeflow Pipelines: the compiled task's own container launches a JobSet and follows it.

No KFP backend is here. What its launcher would do is done by the test: the pod gets the command of the compiled
pipeline, with ``{{$}}`` replaced by an executor input, and the executor output is read where it was asked for.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import STORE, kubectl
from tuneloop.argo import cluster as argo
from tuneloop.config import find
from tuneloop.kfp.client import compile_to

pytestmark = pytest.mark.cluster

IMAGES = os.environ.get("TUNELOOP_TEST_IMAGES", "tuneloop/{image}:dev")
SETTINGS = [
    *("data.train=16", "data.eval=4", "data.sft=32", "sft.max_steps=4", "sft.per_device_train_batch_size=4"),
    *("sft.device=cpu", "nodes=2", "cluster.cpu=100m", "cluster.memory=1500Mi", f"cluster.images={IMAGES}"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The sft pipeline's document."""
    path = tmp_path_factory.mktemp("kfp") / "sft.yaml"
    pipeline = find("sft")
    compile_to(pipeline.module.build_kfp(pipeline.configure(None, SETTINGS)), path)
    found: dict[str, Any] = next(iter(yaml.load_all(path.read_text(), yaml.CSafeLoader)))
    return found


class Tasks:
    """Runs tasks of a compiled pipeline as pods, one after another."""

    def __init__(self, namespace: str, run: str, spec: dict[str, Any]) -> None:
        self.namespace, self.run, self.spec = namespace, run, spec

    def start(self, task: str, inputs: dict[str, Any] | None = None, **changed: Any) -> tuple[int, str, dict[str, Any]]:
        """Exit code, output, and the metadata of the task's first output artifact."""
        within = self.spec["components"]["comp-exit-handler-1"]["dag"]["tasks"][task]
        constants = {k: v["runtimeValue"]["constant"] for k, v in within["inputs"]["parameters"].items() if _fixed(v)}
        component = self.spec["components"][f"comp-{task}"]
        outputs = component["outputDefinitions"]["artifacts"]
        executor_input = {
            "inputs": {
                "parameterValues": {**constants, "url": f"{STORE}/{self.run}/{task}", "seed": 0, **changed},
                "artifacts": {
                    k: {"artifacts": [{"uri": "s3://x/y", "metadata": v}]} for k, v in (inputs or {}).items()
                },
            },
            "outputs": {
                "artifacts": {k: {"artifacts": [{"name": k, "uri": f"/tmp/kfp/{k}"}]} for k in outputs},
                "outputFile": "/tmp/kfp/output.json",
            },
        }
        container = self.spec["deploymentSpec"]["executors"][component["executorLabel"]]["container"]
        args = [word.replace("{{$}}", json.dumps(executor_input)) for word in container["args"]]
        name = f"{self.run}-{task}"
        self._pod(name, container["image"], [*container["command"], *args])
        ended = "jsonpath={.status.containerStatuses[0].state.terminated.exitCode}"
        kubectl("-n", self.namespace, "wait", "pod", name, f"--for={ended}", "--timeout=400s")
        code = int(kubectl("-n", self.namespace, "get", "pod", name, "-o", ended))
        said = kubectl("-n", self.namespace, "logs", name)
        kubectl("-n", self.namespace, "delete", "pod", name)
        told = json.loads(said.rpartition("EXECUTOR OUTPUT ")[2]) if code == 0 else {}
        stage = {"data-prep": "prompts"}.get(task, "checkpoint")
        return code, said, told["artifacts"][stage]["artifacts"][0]["metadata"] if code == 0 else {}

    def _pod(self, name: str, image: str, command: list[str]) -> None:
        script = '"$@" && echo && echo "EXECUTOR OUTPUT $(cat /tmp/kfp/output.json)"'
        container = {
            **{"name": "main", "image": image, "command": ["sh", "-c", script, "sh", *command]},
            "envFrom": [{"configMapRef": {"name": "tuneloop-store"}}, {"secretRef": {"name": "tuneloop-store"}}],
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
        spec = {
            **{"restartPolicy": "Never", "serviceAccountName": "tuneloop-launcher", "containers": [container]},
            "automountServiceAccountToken": True,
            "securityContext": {
                **{"runAsNonRoot": True, "runAsUser": 1000},
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        }
        about = {"name": name, "namespace": self.namespace, "labels": {"test": self.run}}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}
        subprocess.run(["kubectl", "create", "-f", "-"], input=json.dumps(body), text=True, check=True)


def _fixed(value: dict[str, Any]) -> bool:
    return "runtimeValue" in value and "{{" not in str(value["runtimeValue"]["constant"])


@pytest.fixture
def tasks(cluster: argo.Cluster, run: str, compiled: dict[str, Any]) -> Iterator[Tasks]:
    yield Tasks(cluster.namespace, run, compiled)
    kubectl("-n", cluster.namespace, "delete", "pods", "-l", f"test={run}", "--wait=false")


def test_a_stage_of_two_pods_is_launched_followed_and_told(tasks: Tasks) -> None:
    code, said, prompts = tasks.start("data-prep")
    assert code == 0, said
    code, said, model = tasks.start("base-model", {"prompts": prompts})
    assert code == 0, said
    given = {"policy": model, "prompts": prompts}
    code, said, trained = tasks.start("sft", given)
    assert code == 0, said
    assert "node-0-0: " in said, "the pods' own lines"
    assert (trained["version"], trained["stage"]) == (1, "sft") and trained["ref"].startswith(
        f"{STORE}/{tasks.run}/sft@"
    )
    code, said, again = tasks.start("sft", given)
    assert (code, again) == (0, trained) and "node-0-0: " not in said, "committed: no job was started"

    wrong = {"policy": model, "prompts": model}
    code, said, _ = tasks.start("sft", wrong, url=f"{STORE}/{tasks.run}/wrong")
    assert code == 2, said
    assert "holds no sft.parquet" in said, "the trainer's last words"
