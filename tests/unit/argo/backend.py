"""Objects of a cluster where nothing is missing, by their paths, as its API server gives them."""

from typing import Any

KUEUE = "/apis/kueue.x-k8s.io/v1beta2"
CONTROLLER_IMAGE = "quay.io/argoproj/workflow-controller:v3.7.6"
EXECUTOR = "securityContext: {runAsNonRoot: true, runAsUser: 65532}"
DEFAULTS = "spec: {templateDefaults: {retryStrategy: {limit: '2', retryPolicy: OnError}}}"


def describe_deployment(name: str, namespace: str, image: str) -> dict[str, Any]:
    spec = {"template": {"spec": {"containers": [{"name": name, "image": image}]}}}
    return {"metadata": {"name": name, "namespace": namespace}, "spec": spec}


def describe_backend(namespace: str) -> dict[str, Any]:
    """Return path → object of an Argo, a Kueue, a store and a node with all images, for runs in `namespace`."""
    names = ("tuneloop", "tuneloop-samplers")
    queues = {name: {"metadata": {"name": name}, "spec": {"clusterQueue": name}} for name in names}
    inside, quota = f"/api/v1/namespaces/{namespace}", [{"name": "cpu", "nominalQuota": "4"}]
    quota.append({"name": "memory", "nominalQuota": "16Gi"})
    group = {
        "coveredResources": ["cpu", "memory"],
        "flavors": [{"name": "default", "resources": quota}],
    }
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    settings = {"name": "workflow-controller-configmap", "namespace": namespace}
    images = [
        {"names": [f"docker.io/tuneloop/{name}:dev"]} for name in ("base", "trainer", "rollout")
    ]
    accounts = ("tuneloop-stage", "tuneloop-executor", "tuneloop-continue")
    return {
        inside: {"metadata": {"name": namespace, "labels": selector["matchLabels"]}},
        **{f"{inside}/serviceaccounts/{name}": {"metadata": {"name": name}} for name in accounts},
        f"{inside}/configmaps/tuneloop-store": {
            "data": {"AWS_ENDPOINT_URL": "http://s3", "AWS_REGION": "eu"}
        },
        f"{inside}/secrets/tuneloop-store": {
            "data": {"AWS_ACCESS_KEY_ID": "YQ==", "AWS_SECRET_ACCESS_KEY": "Yg=="}
        },
        f"{inside}/configmaps/{settings['name']}": {
            "metadata": settings,
            "data": {"executor": EXECUTOR, "workflowDefaults": DEFAULTS},
        },
        "/apis/apps/v1/deployments": [
            describe_deployment("workflow-controller", "argo", CONTROLLER_IMAGE)
        ],
        f"/apis/argoproj.io/v1alpha1/namespaces/{namespace}/workflows": [],
        KUEUE: {"groupVersion": KUEUE[6:], "resources": []},
        f"{KUEUE}/namespaces/{namespace}/localqueues": [*queues.values()],
        **{
            f"{KUEUE}/namespaces/{namespace}/localqueues/{name}": each
            for name, each in queues.items()
        },
        **{
            f"{KUEUE}/clusterqueues/{name}": {
                "spec": {"namespaceSelector": selector, "resourceGroups": [group]}
            }
            for name in names
        },
        "/api/v1/nodes": [{"metadata": {"name": "n"}, "status": {"images": images}}],
    }
