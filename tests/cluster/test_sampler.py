"""Two sessions sample from one vLLM server, which is a pod with a claim of its own while somebody samples."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
import yaml

from tests.cluster.conftest import ROOT, kubectl
from tests.cluster.test_gateway import clean, serve_gateway  # noqa: F401 - clean is a fixture
from tests.cluster.test_queue import until
from tests.policies import commit_policy
from tests.waiting import LIMIT_S
from tuneloop.kube.connection import Connection

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
CLASS = os.environ.get("TUNELOOP_TEST_DEVICE_CLASS", "gpu.example.com")
SMALL = """
apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component
components: [MANIFESTS/sampler, MANIFESTS/sampler-claim]
patches:
  - target: {kind: Deployment, name: tuneloop-sampler}
    patch: |
      - {op: replace, path: /spec/template/spec/containers/0/resources/requests, value: {cpu: 500m, memory: 2Gi}}
      - {op: replace, path: /spec/template/spec/containers/0/args/1, value: '{"enforce_eager": true}'}
  - target: {kind: ResourceClaimTemplate}
    patch: |
      - {op: replace, path: /spec/spec/devices/requests/0/exactly/deviceClassName, value: CLASS}
"""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    (folder := tmp_path / "small").mkdir()
    text = SMALL.replace(
        "MANIFESTS", os.path.relpath(ROOT / "manifests/components", folder)
    ).replace("CLASS", CLASS)
    (folder / "kustomization.yaml").write_text(text)
    secret = [
        "-n",
        "tuneloop",
        "create",
        "secret",
        "generic",
        "tuneloop-sampler",
        "--from-literal=token=a-token",
    ]
    made = kubectl(*secret, "--dry-run=client", "-o", "yaml")
    subprocess.run(
        ["kubectl", "apply", "-f", "-"], input=made, text=True, check=True, capture_output=True
    )
    yield folder
    kubectl("-n", "tuneloop", "delete", "secret", "tuneloop-sampler")


def find(kind: str) -> list[str]:
    labels = ["-l", "app.kubernetes.io/name=tuneloop-sampler"] if kind == "pods" else []
    return [
        name
        for name in kubectl("-n", "tuneloop", "get", kind, *labels, "-o", "name").split()
        if "sampler" in name
    ]


def test_sessions_share_a_pod_that_is_there_while_somebody_samples(
    cluster: Connection, root: str, small: Path, tmp_path: Path
) -> None:
    base = commit_policy(f"{root}/base", 3)  # type: ignore[arg-type]
    (home := tmp_path / "gateway").mkdir()
    with serve_gateway(
        home, [str(small)], sampler={"deployment": "tuneloop-sampler", "idle": 60}
    ) as gateway:
        datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints([5, 6, 7]),
            loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},  # type: ignore[dict-item]
        )
        clients = []
        for rate in (0.01, 0.05):
            service = tinker.ServiceClient(base_url=gateway.url, api_key=gateway.token)
            model = service.create_lora_training_client(base_model=base.ref, rank=0).result()
            model.forward_backward([datum], "cross_entropy").result()
            model.optim_step(tinker.AdamParams(learning_rate=rate)).result()
            clients.append(model)
        assert find("pods") == [] == find("resourceclaims"), "nobody has sampled"
        samplers = [model.save_weights_and_get_sampling_client() for model in clients]
        params = tinker.SamplingParams(max_tokens=8, temperature=1.0, seed=3, stop=[0])
        prompt = tinker.ModelInput.from_ints([5, 6, 7, 8])
        told = []
        for _ in range(2):
            for sampler in samplers:
                (made,) = sampler.sample(prompt, 1, params).result().sequences
                told.append((made.tokens, made.logprobs))
        assert told[:2] == told[2:] and told[0] != told[1], (
            "each has its own weights, whose turn it is"
        )
        assert len(find("pods")) == len(find("resourceclaims")) == 1
        pod = yaml.safe_load(kubectl("-n", "tuneloop", "get", *find("pods"), "-o", "yaml"))
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "tuneloop-samplers"
        assert pod["metadata"]["labels"]["kueue.x-k8s.io/managed"] == "true"
        until(lambda: find("pods") == [] == find("resourceclaims"), LIMIT_S)
