"""`tuneloop doctor` for Argo, against what an API server answers."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.argo.backend import KUEUE, describe_backend, describe_deployment
from tests.unit.cluster.api import Cluster, kubeconfig, serve_cluster
from tuneloop.cli import run_cli
from tuneloop.cluster.doctor import read_tag

INSIDE = "/api/v1/namespaces/tuneloop"
SAMPLERS = f"{KUEUE}/namespaces/tuneloop/localqueues/tuneloop-samplers"


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with serve_cluster() as server:
        server.objects = describe_backend("tuneloop")
        monkeypatch.setenv("KUBECONFIG", kubeconfig(server.url, tmp_path))
        monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
        yield server


Output = pytest.CaptureFixture[str]


def test_a_cluster_that_has_all(backend: Cluster, capsys: Output) -> None:
    assert run_cli(["doctor", "sft_then_grpo", "--store", "s3://b/runs"]) == 0
    shown = capsys.readouterr().out
    assert all(line.startswith("ok ") for line in shown.splitlines()[:-2]), shown
    for said in (
        "workflow-controller:v3.7.6",
        "tuneloop/rollout:dev: on a node",
        "LocalQueue tuneloop, tuneloop-samplers admits what the stages ask for",
    ):
        assert said in shown
    unwritten = (
        "-        store              not checked by a write: AWS_ACCESS_KEY_ID is not set here"
    )
    assert shown.endswith(f"{unwritten}\n0 refused, 0 warnings\n")
    assert run_cli(["doctor"]) == 0
    assert "images" not in capsys.readouterr().out, "which ones, a pipeline says"


@pytest.mark.parametrize(
    ("path", "found", "remedy"),
    [
        (
            "",
            "namespace       'tuneloop': does not exist in context c",
            "kubectl apply -k manifests/overlays/local",
        ),
        (
            "/serviceaccounts/tuneloop-stage",
            "'tuneloop-stage': is missing in namespace",
            "kubectl apply -k manif",
        ),
        (
            "/secrets/tuneloop-store",
            "store              Secret tuneloop-store is missing",
            "kubectl apply -k manif",
        ),
        (
            SAMPLERS,
            "'tuneloop-samplers': is not a LocalQueue of namespace tuneloop",
            "kubectl apply -k manif",
        ),
    ],
)
def test_what_is_missing_comes_with_a_command(
    backend: Cluster, capsys: Output, path: str, found: str, remedy: str
) -> None:
    del backend.objects[path if path == SAMPLERS else f"{INSIDE}{path}"]
    assert run_cli(["doctor", "sft"]) == 2
    lines = capsys.readouterr().out.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("refused")]
    assert found in lines[at] and lines[at + 1].startswith(f"{'':11}{remedy}")


def test_a_cluster_queue_that_admits_other_namespaces(backend: Cluster, capsys: Output) -> None:
    """`submit` refuses it as well."""
    queue = backend.objects[f"{KUEUE}/clusterqueues/tuneloop"]["spec"]
    queue["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": "other"}}
    assert run_cli(["doctor", "sft", "--json"]) == 2
    (told,) = [
        each
        for each in json.loads(capsys.readouterr().out)["checks"]
        if each["outcome"] == "refused"
    ]
    assert told["found"] == "ClusterQueue 'tuneloop': does not admit namespace tuneloop"
    assert '"values": ["other", "tuneloop"]' in told["remedy"]
    assert run_cli(["submit", "sft", "--run", "a", "--store", "s3://b/runs"]) == 2
    assert "does not admit namespace tuneloop; kubectl patch" in capsys.readouterr().err
    queue["namespaceSelector"] = {}
    assert run_cli(["doctor", "sft"]) == 0


def test_warnings_refuse_nothing(backend: Cluster, capsys: Output) -> None:
    old = describe_deployment(
        "workflow-controller", "argo", "quay.io/argoproj/workflow-controller:v3.6.0"
    )
    backend.objects["/apis/apps/v1/deployments"] = [old]
    backend.objects[f"{INSIDE}/configmaps/tuneloop-store"]["data"] = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_REGION": "eu",
    }
    assert run_cli(["doctor", "sft"]) == 0
    lines = capsys.readouterr().out.splitlines()
    warned = [
        (line, after) for line, after in itertools.pairwise(lines) if line.startswith("warning ")
    ]
    expected = ["3.7 or newer is needed", "lacks AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID is in both"]
    assert all(said in line for said, (line, _) in zip(expected, warned, strict=True)), lines
    assert all(after.startswith(" " * 11) for _, after in warned)


def test_what_the_account_may_not_see_is_said(backend: Cluster, capsys: Output) -> None:
    backend.denied = {
        "/api/v1/nodes": "nodes",
        f"{KUEUE}/clusterqueues/tuneloop": "clusterqueues",
        f"{INSIDE}/secrets/tuneloop-store": "secrets",
    }
    assert run_cli(["doctor", "sft"]) == 0
    shown = capsys.readouterr().out
    for line in (
        "images             not checked: no right to list nodes",
        "no right to get clusterqueues",
    ):
        assert line in shown
    assert shown.count("no right to get secrets") == 1


def test_images(backend: Cluster, capsys: Output) -> None:
    for place, code, said in (
        (
            "reg.example/{image}:1",
            0,
            "warning  images             reg.example/base:1: not on a node: it must be pull",
        ),
        (
            "reg.example/{image}",
            2,
            "refused  images             reg.example/base: nodes keep what they have as `latest`",
        ),
        (
            "mine/{image}:1",
            2,
            "refused  images             image 'mine/base:1': is on no node, and names no registry",
        ),
    ):
        assert run_cli(["doctor", "sft", "--set", f"cluster.images={place}"]) == code
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("image", "tag"),
    [
        ("a:5000/b/c", "latest"),
        ("a:5000/b:1.2", "1.2"),
        ("b@sha256:00", ""),
        ("b:1@sha256:00", "1"),
        ("b", "latest"),
    ],
)
def test_the_tag_of_an_image(image: str, tag: str) -> None:
    assert read_tag(image) == tag


def test_settings_are_of_a_pipeline(capsys: Output) -> None:
    assert run_cli(["doctor", "--set", "a=1"]) == 2
    assert "needs a pipeline: name one" in capsys.readouterr().err


def test_a_server_and_stages_on_one_quota_are_warned_of(backend: Cluster, capsys: Output) -> None:
    """`submit` notes it as well."""
    one = ["--set", "cluster.sampler.queue=tuneloop"]
    assert run_cli(["doctor", "grpo", *one]) == 0
    lines = capsys.readouterr().out.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.startswith("warning ")]
    assert (
        "queue              'tuneloop': gives rollout servers quota that stages wait for, as long as their r"
        in lines[at]
    )
    assert lines[at + 1].strip() == "tuneloop … --set cluster.sampler.queue=tuneloop-samplers"
    submit = ["submit", "grpo", "--run", "a", "--store", "s3://b/runs", "--check"]
    for sets, notes in ((one, 1), ([], 0)):
        assert run_cli([*submit, *sets]) == 0
        assert (
            capsys.readouterr().err.count("note: queue: 'tuneloop': gives rollout servers") == notes
        )


def test_remedies_are_for_the_namespace_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Not for `tuneloop`, which is somebody else's."""
    with serve_cluster() as server:
        server.objects = describe_backend("team-a")
        monkeypatch.setenv("KUBECONFIG", kubeconfig(server.url, tmp_path))
        del server.objects["/api/v1/namespaces/team-a/serviceaccounts/tuneloop-stage"]
        del server.objects["/api/v1/namespaces/team-a/secrets/tuneloop-store"]
        assert run_cli(["doctor", "sft", "-n", "team-a"]) == 2
        printed = capsys.readouterr().out
        assert "overlays/local" not in printed
        assert printed.count("kubectl apply -k manifests/overlays/team-a") == 2
        assert "printf 'namespace: team-a\\nresources: [../../namespaced]" in printed
        del server.objects["/api/v1/namespaces/team-a"]
        assert run_cli(["doctor", "sft", "-n", "team-a"]) == 2
        assert "kubectl create namespace team-a" in capsys.readouterr().out
