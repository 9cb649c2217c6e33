"""The Kubeflow SDK itself, against an API server with the runtimes of ``manifests/components/trainer``."""

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow.trainer import (
    CustomTrainerContainer,
    HuggingFaceDatasetInitializer,
    HuggingFaceModelInitializer,
    Initializer,
    KubernetesBackendConfig,
    TrainerClient,
    options,
)
from kubernetes import client

from tests.unit.cluster.api import Answering
from tuneloop.core.errors import UserError
from tuneloop.extensions.trainers.kubeflow_sdk import build_train_arguments
from tuneloop.extensions.trainers.trainjob import as_trainjob
from tuneloop.training.backends import LLMBackend
from tuneloop.training.backends.native import Native
from tuneloop.training.backends.torchtune import Torchtune
from tuneloop.training.backends.trl import Trl
from tuneloop.workflow.settings import AcceleratorResources, Cluster, Toleration

pytestmark = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl, which renders overlays"
)

COMPONENT = Path(__file__).parents[3] / "manifests/components/trainer"
SIZES = AcceleratorResources(
    cpu="4",
    memory="8Gi",
    gpus=2,
    node_selector={"a": "b"},
    tolerations=[Toleration(key="c", operator="Exists")],
)
CLUSTER = Cluster(trainer=SIZES, priority="tuneloop-high")
DATA, MODEL = "s3://b/demo/data-prep@sha256:1#sft.parquet", "gs://b/demo/base-model@sha256:2#model"
STAGE = Native(nodes=2, processes=2, args={"policy": "p", "prompts": "q", "checkpoint": "c"})
TRL = Trl(
    args={
        "model_name_or_path": "/workspace/model",
        "dataset_name": "/workspace/dataset",
        "output_dir": "o",
    }
)


class Objects(Answering):
    """Has cluster-wide runtimes, and keeps what is created."""

    server: "Api"

    def do_GET(self) -> None:
        kind, _, name = self.path.removeprefix("/apis/trainer.kubeflow.org/v1alpha1/").partition(
            "/"
        )
        found = self.server.runtimes.get(name) if kind == "clustertrainingruntimes" else None
        self._answer(200 if found else 404, found or {"kind": "Status", "code": 404})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.created.append((self.path, body))
        self._answer(201, body)


class Api(ThreadingHTTPServer):
    def __init__(self, runtimes: dict[str, dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), Objects)
        self.runtimes, self.created = runtimes, list[tuple[str, dict[str, Any]]]()


@pytest.fixture(scope="module")
def runtimes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    overlay = tmp_path_factory.mktemp("overlay")
    shutil.copytree(COMPONENT, overlay / "trainer")
    (overlay / "kustomization.yaml").write_text("components: [trainer]\n")
    text = subprocess.check_output(["kubectl", "kustomize", overlay], text=True)
    objects = yaml.load_all(text, yaml.CSafeLoader)
    return {
        item["metadata"]["name"]: item
        for item in objects
        if item["kind"] == "ClusterTrainingRuntime"
    }


@pytest.fixture
def api(runtimes: dict[str, dict[str, Any]]) -> Iterator[Api]:
    with Api(runtimes) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def connect(api: Api) -> TrainerClient:
    where = client.Configuration(host=f"http://127.0.0.1:{api.server_port}")
    return TrainerClient(KubernetesBackendConfig(namespace="tuneloop", client_configuration=where))


def containers(runtime: dict[str, Any]) -> dict[str, dict[str, Any]]:
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return {
        job["name"]: job["template"]["spec"]["template"]["spec"]["containers"][0] for job in jobs
    }


@pytest.mark.parametrize(
    ("backend", "data"), [(STAGE, {}), (TRL, {"dataset": DATA, "model": MODEL})]
)
def test_the_sdk_creates_the_trainjob_that_is_rendered(
    api: Api, runtimes: dict[str, dict[str, Any]], backend: LLMBackend, data: dict[str, str]
) -> None:
    job = as_trainjob(backend, "tune", CLUSTER, run="demo", **data)
    assert connect(api).train(**build_train_arguments(job)) == "tune"
    ((path, made),) = api.created
    assert path == "/apis/trainer.kubeflow.org/v1alpha1/namespaces/tuneloop/trainjobs"
    # Where the SDK has no such field, another field says the same:
    expected, trainer = job["spec"], job["spec"]["trainer"]
    trainer["command"].insert(3, f"--nproc-per-node={trainer.pop('numProcPerNode')}")
    sizes = {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "2"}
    trainer["resourcesPerNode"] = {"requests": sizes, "limits": sizes}
    assert trainer["env"][0] in containers(runtimes[expected["runtimeRef"]["name"]])["node"]["env"]
    del trainer["env"][0]
    (pod,) = expected.pop("podTemplateOverrides")
    (target,) = pod.pop("targetJobs")
    node = {**target, "template": {"spec": {"template": pod}}}
    template = {"metadata": {"labels": expected.pop("labels")}, "spec": {"replicatedJobs": [node]}}
    manager = "trainer.kubeflow.org/kubeflow-sdk"
    expected["runtimePatches"] = [
        {"manager": manager, "trainingRuntimeSpec": {"template": template}}
    ]
    expected["runtimeRef"]["kind"] = "ClusterTrainingRuntime"
    for part in expected.get("initializer", {}).values():
        part["env"] = []
    assert made == job
    assert pod["spec"] == {
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "c", "operator": "Exists"}],
    }
    assert made["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "tuneloop-high"


@pytest.mark.parametrize(
    ("backend", "sizes", "told"),
    [
        (
            STAGE,
            AcceleratorResources(memory="8Gi"),
            r"cluster\.trainer\.cpu: '500m': is the default; set it",
        ),
        (
            STAGE,
            AcceleratorResources(cpu="1"),
            r"cluster\.trainer\.memory: 'auto': is the default; set it",
        ),
        (
            Torchtune(),
            SIZES,
            "backend: 'tune run': does not start with our torchrun.*BuiltinTrainer",
        ),
    ],
)
def test_what_the_sdk_has_no_field_for_is_refused(
    backend: LLMBackend, sizes: AcceleratorResources, told: str
) -> None:
    job = as_trainjob(backend, "tune", Cluster(trainer=sizes))
    with pytest.raises(UserError, match=told):
        build_train_arguments(job)


def test_a_trainjob_of_the_grpo_runtime_names_model_and_data(
    api: Api, runtimes: dict[str, dict[str, Any]]
) -> None:
    connect(api).train(
        runtime="tuneloop-grpo",
        initializer=Initializer(
            dataset=HuggingFaceDatasetInitializer(DATA),
            model=HuggingFaceModelInitializer(MODEL, ignore_patterns=None),
        ),
        trainer=CustomTrainerContainer(
            "tuneloop/rollout:dev", resources_per_node={"gpu": 1, "memory": "64Gi"}
        ),
        options=[options.Name("mine"), options.TrainerArgs(["--set", "rollout.max_tokens=512"])],
    )
    ((_, made),) = api.created
    spec = made["spec"]
    assert {part: of["storageUri"] for part, of in spec["initializer"].items()} == {
        "dataset": DATA,
        "model": MODEL,
    }
    assert "command" not in spec["trainer"]  # which is the runtime's
    found = runtimes["tuneloop-grpo"]["spec"]
    assert found["mlPolicy"] == {
        "numNodes": 1
    }  # no variables of torchrun for a process that starts torchrun itself
    for name, container in containers(
        runtimes["tuneloop-grpo"]
    ).items():  # the webhook asks for this name
        assert {"name": "initializer", "mountPath": "/workspace"} in container["volumeMounts"], name


def test_the_sdk_reads_every_runtime_and_the_pods_of_its_jobs(
    api: Api, runtimes: dict[str, dict[str, Any]]
) -> None:
    names = {name for name in runtimes if connect(api).get_runtime(name).name == name}
    assert {"tuneloop-torch", "tuneloop-trl", "tuneloop-grpo"} < names
    for name in names:
        for container in containers(
            runtimes[name]
        ).values():  # it knows a pod's device by a limit of it
            assert "cpu" in container.get("resources", {}).get("limits", {"cpu": ""}), (
                name,
                container["name"],
            )
