"""What `cluster.credentials` sets in every pod that is rendered, and what it refuses beside it."""

import json
from typing import Any

import pytest

from tests.token_services import CLIENT, ROLE, TENANT
from tests.unit.argo.test_pods import backend, list_argo_pods
from tuneloop.argo.lint import lint_workflow
from tuneloop.cluster.credentials import list_accounts
from tuneloop.cluster.serving import render_servers
from tuneloop.config.loading import find_pipeline
from tuneloop.config.pipeline import check_store
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.extensions.trainers.trainjob import as_job, as_jobset, as_rayjob, as_trainjob
from tuneloop.training.backends.native import Native
from tuneloop.workflow.settings import Cluster

KINDS: dict[str, JsonObject] = {
    "irsa": {
        "role": ROLE,
        "region": "eu-central-1",
        "sts_endpoint": "https://sts.internal",
    },
    "eks_pod_identity": {"region": "eu-central-1"},
    "gke": {"google_service_account": "tuneloop@project.iam.gserviceaccount.com"},
    "azure": {"client_id": CLIENT, "tenant_id": TENANT, "storage_account": "account"},
}
VARIABLES = {
    "irsa": {"AWS_REGION": "eu-central-1", "AWS_ENDPOINT_URL_STS": "https://sts.internal"},
    "eks_pod_identity": {"AWS_REGION": "eu-central-1"},
    "gke": {},
    "azure": {
        "AZURE_CLIENT_ID": CLIENT,
        "AZURE_TENANT_ID": TENANT,
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
    },
}
SCHEMES = {"irsa": "s3", "eks_pod_identity": "s3", "gke": "gs", "azure": "az"}


def describe_credentials(kind: str, **more: Any) -> JsonObject:
    return {"kind": kind} | KINDS[kind] | more


def configure(credentials: JsonObject | str, *sets: str, pipeline: str = "grpo") -> Any:
    return find_pipeline(pipeline).configure(
        sets=[f"cluster.credentials={json.dumps(credentials)}", *sets]
    )


def check_pod(pod: JsonObject, kind: str, account: str = "stores") -> None:
    """Check what a pod has by a kind of credentials."""
    labels = pod["metadata"].get("labels", {})
    assert ("azure.workload.identity/use" in labels) == (kind == "azure")
    spec = pod["spec"]
    assert spec["serviceAccountName"] == account
    container = next(item for item in spec["containers"] if item["name"] not in ("wait", "init"))
    variables = {item["name"]: item.get("value") for item in container["env"]}
    assert variables["TUNELOOP_CREDENTIALS"] == kind
    assert VARIABLES[kind].items() <= variables.items()
    # EKS' webhook leaves out a pod that has one of these.
    assert not {"AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"} & set(variables)
    sources = [name for source in container["envFrom"] for name in source]
    assert sources == ["configMapRef"], "a Secret's keys would open the store in its place"


@pytest.mark.parametrize("kind", KINDS)
def test_every_pod_has_what_the_mechanism_needs(kind: str) -> None:
    settings = configure(
        describe_credentials(kind, service_account="stores"),
        "nodes=2",
        "engine.weights.kind=pull",
        "engine.weights.url=s3://bucket/weights",
    )
    workflow = find_pipeline("grpo").build(settings)
    assert not lint_workflow(workflow)
    pods = list_argo_pods(workflow)
    assert len(pods) > 4
    for name, pod in pods.items():
        check_pod(pod, kind, "tuneloop-continue" if name == "continue" else "stores")
    deployment, _ = render_servers(workflow, "servers", settings)
    check_pod(deployment["spec"]["template"], kind)
    assert list_accounts(workflow) == ["stores"]


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_have_it(kind: str) -> None:
    cluster = Cluster.model_validate(
        {
            "credentials": describe_credentials(kind, service_account="stores"),
            "trainer": {"memory": "4Gi"},
        }
    )
    jobset = as_jobset(backend(), "tune", cluster)["spec"]["replicatedJobs"][0]
    pods = [
        jobset["template"]["spec"]["template"],
        as_job(backend(), "tune", cluster)["spec"]["template"],
    ]
    arguments = {"policy": "p", "prompts": "q", "checkpoint": "c"}
    ray = as_rayjob(Native(stage="sft", nodes=2, args=arguments), "tune", cluster)["spec"]
    pods.append(ray["rayClusterSpec"]["headGroupSpec"]["template"])
    pods.append(ray["submitterPodTemplate"])
    for pod in pods:
        check_pod(pod, kind)
    # The pods of a TrainJob are its runtime's: it has fields for variables, labels and account.
    job = json.dumps(as_trainjob(backend(), "tune", cluster))
    for text in ("TUNELOOP_CREDENTIALS", "stores", *VARIABLES[kind]):
        assert text in job


def test_env_from_is_added_to_the_sources_of_the_kind() -> None:
    """A patch replaces the list, so that it has to repeat the others."""
    for credentials, names in (
        ("secret", ["tuneloop-store", "tuneloop-store", "hub"]),
        ({"name": "mine"}, ["mine", "mine", "hub"]),
        (describe_credentials("irsa"), ["tuneloop-store", "hub"]),
    ):
        settings = configure(credentials, "cluster.pod.env_from=[secret/hub]", pipeline="sft")
        for pod in list_argo_pods(find_pipeline("sft").build(settings)).values():
            sources = pod["spec"]["containers"][0]["envFrom"]
            assert [item["name"] for source in sources for item in source.values()] == names


@pytest.mark.parametrize(
    ("credentials", "sets", "refusal"),
    [
        ("foo", (), r"^cluster.credentials.kind: 'foo': unknown; known: secret, irsa"),
        ("irsa", (), r"^cluster.credentials.role: None: is required"),
        ({"kind": "irsa", "role": "admin"}, (), r"^cluster.credentials.role: 'admin': is not val"),
        ({"kind": "azure", "client_id": CLIENT}, (), r"^cluster.credentials.tenant_id: None"),
        ({"role": ROLE}, (), r"^cluster.credentials.role: .*is a setting of kind irsa, not of sec"),
        (
            describe_credentials("irsa"),
            ("cluster.pod.env.AWS_ACCESS_KEY_ID=AKIA",),
            r"^cluster.pod.env: 'AWS_ACCESS_KEY_ID': is a key, and would open the store in place of"
            " cluster.credentials.kind=irsa",
        ),
        (
            describe_credentials("gke"),
            ("cluster.trainer.pod.env.GOOGLE_SERVICE_ACCOUNT_KEY=key",),
            "^cluster.trainer.pod.env: 'GOOGLE_SERVICE_ACCOUNT_KEY'",
        ),
        (
            describe_credentials("azure"),
            (
                "cluster.pod.spec.containers=[{name: main, env: "
                "[{name: AZURE_STORAGE_ACCOUNT_KEY, value: k}]}]",
            ),
            "^cluster.pod.env: 'AZURE_STORAGE_ACCOUNT_KEY'",
        ),
        (
            describe_credentials("gke", service_account="stores"),
            ("cluster.pod.service_account=others",),
            r"^cluster.pod.service_account: 'others': is another account than cluster.credentials"
            r".service_account \(stores\): leave one of them out",
        ),
    ],
)
def test_contradictions_are_refused(
    credentials: JsonObject | str, sets: tuple[str, ...], refusal: str
) -> None:
    with pytest.raises(UserError, match=refusal) as error:
        configure(credentials, *sets, pipeline="sft")
    assert "AKIA" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_of_another_cloud_is_refused(kind: str) -> None:
    settings = configure(describe_credentials(kind), pipeline="sft")
    for scheme in ("s3", "gs", "az", "file"):
        url = f"{scheme}:///b/runs"
        if scheme in (SCHEMES[kind], "file"):
            check_store(settings, url)
            continue
        with pytest.raises(
            UserError, match=f"^store: '{url}': is a store of another cloud than .*kind={kind}"
        ):
            check_store(settings, url)
    for url in ("s3://b", "gs://b", "az://b"):
        check_store(configure("secret", pipeline="sft"), url)
