"""`tuneloop doctor` and `submit` on how pods get credentials for the store."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.token_services import CLIENT, ROLE, TENANT
from tests.unit.argo.backend import describe_backend
from tests.unit.cluster.api import Cluster, kubeconfig, serve_cluster
from tuneloop.cli import run_cli
from tuneloop.core.store_credentials import AWS_KEYS, AZURE_KEYS, GOOGLE_KEYS

INSIDE = "/api/v1/namespaces/tuneloop"
ACCOUNT = f"{INSIDE}/serviceaccounts/tuneloop-stage"
AGENT = "/apis/apps/v1/namespaces/kube-system/daemonsets/eks-pod-identity-agent"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/tuneloop/networkpolicies"
MANIFESTS = Path(__file__).parents[3] / "manifests"
ANNOTATIONS = {
    "irsa": {"eks.amazonaws.com/role-arn": ROLE},
    "gke": {"iam.gke.io/gcp-service-account": "t@p.iam.gserviceaccount.com"},
    "azure": {"azure.workload.identity/client-id": CLIENT},
}
CREDENTIALS = {
    "irsa": {"kind": "irsa", "role": ROLE},
    "gke": {"kind": "gke", "google_service_account": "t@p.iam.gserviceaccount.com"},
    "azure": {"kind": "azure", "client_id": CLIENT, "tenant_id": TENANT},
    "eks_pod_identity": {"kind": "eks_pod_identity"},
}
OWN = {"name": "mine"}
STORES = {"irsa": "s3", "gke": "gs", "azure": "az", "eks_pod_identity": "s3"}
Output = pytest.CaptureFixture[str]


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster without the Secret, and a machine without credentials."""
    with serve_cluster() as server:
        server.objects = describe_backend("tuneloop")
        del server.objects[f"{INSIDE}/secrets/tuneloop-store"]
        server.objects[AGENT] = {"metadata": {"name": "eks-pod-identity-agent"}}
        monkeypatch.setenv("KUBECONFIG", kubeconfig(server.url, tmp_path))
        monkeypatch.setenv("HOME", str(tmp_path))
        for name in (*AWS_KEYS, *GOOGLE_KEYS, *AZURE_KEYS):
            monkeypatch.delenv(name, raising=False)
        yield server


def annotate(backend: Cluster, kind: str) -> None:
    backend.objects[ACCOUNT] = {
        "metadata": {"name": "tuneloop-stage", "annotations": ANNOTATIONS.get(kind, {})}
    }


def diagnose(kind: str, capsys: Output) -> tuple[int, list[dict[str, str]]]:
    """Run doctor; return its code and its checks of the store."""
    setting = f"cluster.credentials={json.dumps(CREDENTIALS.get(kind, OWN))}"
    code = run_cli(["doctor", "sft", "--json", "--set", setting])
    checks = json.loads(capsys.readouterr().out)["checks"]
    return code, [check for check in checks if check["subject"] == "store"]


@pytest.mark.parametrize("kind", CREDENTIALS)
def test_an_identity_that_is_set_up_needs_no_secret(
    kind: str, backend: Cluster, capsys: Output
) -> None:
    annotate(backend, kind)
    code, checks = diagnose(kind, capsys)
    assert code == 0, checks
    assert not [check for check in checks if check["outcome"] in ("refused", "warning")]
    assert "Secret" not in json.dumps(checks)
    if kind in ("irsa", "gke"):
        ((name, value),) = ANNOTATIONS[kind].items()
        assert f"{kind}: ServiceAccount tuneloop-stage has {name}={value}" in checks[0]["found"]
    # What only the cloud knows is said, with the command that an admin gives there.
    (unseen,) = [check for check in checks if check["outcome"] == "not checked"]
    assert "what the cloud gives to ServiceAccount tuneloop-stage" in unseen["found"]
    assert "tuneloop-stage" in unseen["remedy"]
    assert not {"NAMESPACE", "ACCOUNT"} & set(re.split(r"\W", unseen["remedy"]))
    assert kind != "gke" or "binding t@p.iam.gserviceaccount.com --role" in unseen["remedy"]


@pytest.mark.parametrize("kind", ["irsa", "gke"])
def test_what_an_account_lacks_comes_with_a_command(
    kind: str, backend: Cluster, capsys: Output
) -> None:
    ((name, value),) = ANNOTATIONS[kind].items()
    command = "kubectl -n tuneloop annotate --overwrite serviceaccount tuneloop-stage"
    for annotations, found in (
        ({}, f"{kind}: ServiceAccount tuneloop-stage has no annotation {name}"),
        ({name: "another"}, f"has {name}=another, and cluster.credentials says {value}"),
    ):
        metadata = {"name": "tuneloop-stage", "annotations": annotations}
        backend.objects[ACCOUNT] = {"metadata": metadata}
        code, checks = diagnose(kind, capsys)
        assert code == 2
        (refused,) = [check for check in checks if check["outcome"] == "refused"]
        assert found in refused["found"]
        assert refused["remedy"] == f"{command} {name}={value}"


def test_the_agent_of_eks_is_looked_for(backend: Cluster, capsys: Output) -> None:
    del backend.objects[AGENT]
    code, checks = diagnose("eks_pod_identity", capsys)
    assert code == 2
    (refused,) = [check for check in checks if check["outcome"] == "refused"]
    assert "no DaemonSet eks-pod-identity-agent" in refused["found"]
    assert refused["remedy"].startswith("aws eks create-addon")


@pytest.mark.parametrize("kind", ANNOTATIONS)
def test_a_namespace_of_another_kind_than_the_settings(
    kind: str, backend: Cluster, capsys: Output
) -> None:
    """The pods get the identity, whatever the settings say: a missing Secret refuses nothing."""
    annotate(backend, kind)
    assert run_cli(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    warned = {
        line.partition("store  ")[2].strip(): after.strip()
        for line, after in itertools.pairwise(lines)
        if line.startswith("warning ")
    }
    (remedy,) = [
        remedy
        for found, remedy in warned.items()
        if f"tuneloop-stage is set up for cluster.credentials.kind={kind}" in found
    ]
    assert remedy.startswith(f"tuneloop … --set cluster.credentials.kind={kind}")
    assert any("Secret tuneloop-store is missing" in found for found in warned)
    _, checks = diagnose("eks_pod_identity", capsys)
    (warning,) = [check for check in checks if check["outcome"] == "warning"]
    assert f"kind={kind}" in warning["found"]


def test_keys_of_another_name_with_a_session_token(backend: Cluster, capsys: Output) -> None:
    code, checks = diagnose("own", capsys)
    assert code == 2
    keys = dict.fromkeys(AWS_KEYS, "YQ==")
    backend.objects[f"{INSIDE}/secrets/mine"] = {"data": keys}
    backend.objects[f"{INSIDE}/configmaps/mine"] = {
        "data": {"AWS_ENDPOINT_URL": "http://s3", "AWS_REGION": "eu"}
    }
    code, checks = diagnose("own", capsys)
    assert code == 0
    assert (
        "Secret mine: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN (these"
        in (checks[1]["found"])
    )


@pytest.mark.parametrize("kind", ["gke", "eks_pod_identity"])
def test_a_policy_that_denies_the_metadata_server(
    kind: str, backend: Cluster, capsys: Output
) -> None:
    """The policies of `manifests/`, and what the remedy adds to them."""
    annotate(backend, kind)
    namespaced = load_policies(MANIFESTS / "namespaced/network.yaml")
    public = load_policies(MANIFESTS / "overlays/gpu/network.yaml")
    backend.objects[POLICIES] = [*namespaced, *public]
    code, checks = diagnose(kind, capsys)
    assert code == 2
    (refused,) = [check for check in checks if check["outcome"] == "refused"]
    assert f"{kind}: the network policies let no pod reach 169.254.1" in refused["found"]
    file = refused["remedy"].removeprefix("kubectl apply -f ")
    backend.objects[POLICIES] += load_policies(MANIFESTS.parent / file)
    assert diagnose(kind, capsys)[0] == 0


def load_policies(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("kind", CREDENTIALS)
def test_submit_from_a_machine_without_credentials_goes_on(
    kind: str, backend: Cluster, capsys: Output
) -> None:
    annotate(backend, kind)
    setting = f"cluster.credentials={json.dumps(CREDENTIALS[kind])}"
    url = f"{STORES[kind]}://bucket/runs"
    submit = ["submit", "sft", "--run", "a", "--check", "--set", setting]
    assert run_cli([*submit, "--store", url]) == 0
    output = capsys.readouterr()
    assert f"note: store: '{url}': not checked by a write: " in output.err
    assert "is not set here" in output.err
    assert "a: can be submitted" in output.out
    other = "gs" if STORES[kind] == "s3" else "s3"
    assert run_cli([*submit, "--store", f"{other}://bucket/runs"]) == 2
    assert f"is a store of another cloud than cluster.credentials.kind={kind}" in (
        capsys.readouterr().err
    )


def test_credentials_of_a_machine_are_tried(
    backend: Cluster, capsys: Output, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Keys that the store refuses are a mistake, and no reason to go on."""
    (tmp_path / "token").write_text("token")
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{backend.url}/v1/credentials",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": f"{tmp_path}/token",
    }.items():
        monkeypatch.setenv(name, value)
    assert run_cli(["submit", "sft", "--run", "a", "--check", "--store", "s3://bucket/runs"]) == 2
    assert "EKS Pod Identity refuses the pod's account (404" in capsys.readouterr().err
