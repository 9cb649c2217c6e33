"""Stands in for Dynamo's operator, which is not here: its definition with group and kind, and the least of its work.

Each component of a graph becomes a Deployment, and the frontend a Service; what it makes is owned by the graph, so that
Kubernetes deletes it with the graph. Containers run `tests/unit/inference/crew.py`: workers and a frontend, no model.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.cluster.conftest import ROOT, kubectl
from tests.cluster.volumes import apply
from tuneloop.inference.fleet.graph import GROUP, KIND, PLURAL, POD_LABEL
from tuneloop.kube.connection import Connection
from tuneloop.workflow.pod_settings import RESTRICTED_CONTAINER

IMAGE = os.environ.get("TUNELOOP_TEST_IMAGES", "tuneloop/{image}:dev").format(image="base")
DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"{PLURAL}.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"kind": KIND, "plural": PLURAL, "singular": KIND.lower(), "shortNames": ["dgd"]},
        "versions": [
            {
                "name": "v1beta1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}


@contextmanager
def operating(cluster: Connection) -> Iterator[None]:
    """While it is entered, graphs become pods."""
    apply(json.dumps(DEFINITION))
    kubectl("wait", "--for=condition=Established", f"crd/{PLURAL}.{GROUP}", "--timeout=600s")
    kubectl("-n", cluster.namespace, "delete", "configmap", "crew", "--ignore-not-found")
    kubectl(
        "-n",
        cluster.namespace,
        "create",
        "configmap",
        "crew",
        f"--from-file={ROOT}/tests/unit/inference/crew.py",
    )
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(cluster, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        apply(json.dumps(DEFINITION), "delete")
        kubectl("-n", cluster.namespace, "delete", "configmap", "crew", "--ignore-not-found")


def _watch(cluster: Connection, stop: threading.Event) -> None:
    while not stop.wait(0.5):
        for graph in cluster.list(GROUP, "v1beta1", PLURAL):
            if not graph["metadata"].get("deletionTimestamp"):
                _reconcile(cluster, graph)


def _reconcile(cluster: Connection, graph: dict[str, Any]) -> None:
    name, components = graph["metadata"]["name"], graph["spec"]["components"]
    if any(component["name"] == "broken" for component in components):
        _report(cluster, graph, "failed", "no node has such a device")
        return
    state = (graph.get("status") or {}).get("state")
    if state is None:
        objects = [each for component in components for each in _objects(graph, component)]
        apply(json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
        _report(cluster, graph, "pending", "")
    elif state == "pending":
        found = kubectl(
            "-n", cluster.namespace, "get", "deploy", "-l", f"{POD_LABEL}={name}", "-o", "json"
        )
        statuses = [each["status"] for each in json.loads(found)["items"]]
        if statuses and all(
            each.get("availableReplicas") == each.get("replicas") for each in statuses
        ):
            _report(cluster, graph, "successful", "")


def _report(cluster: Connection, graph: dict[str, Any], state: str, message: str) -> None:
    ready = {
        "type": "Ready",
        "status": str(state == "successful"),
        "reason": state,
        "message": message,
    }
    status = {
        "state": state,
        "observedGeneration": graph["metadata"]["generation"],
        "conditions": [ready],
    }
    cluster.custom.patch_namespaced_custom_object_status(
        GROUP, "v1beta1", cluster.namespace, PLURAL, graph["metadata"]["name"], {"status": status}
    )


def _objects(graph: dict[str, Any], component: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A Deployment, and a Service: the workers' is headless."""
    name = f"{graph['metadata']['name']}-{component['name']}"
    labels = {POD_LABEL: graph["metadata"]["name"], "app": name}
    about = {"name": name, "namespace": graph["metadata"]["namespace"], "labels": labels}
    owner = {
        "apiVersion": graph["apiVersion"],
        "kind": KIND,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    about["ownerReferences"] = [
        {**owner, "name": graph["metadata"]["name"], "uid": graph["metadata"]["uid"]}
    ]
    front = component["type"] == "frontend"
    role = (
        ["frontend", "8000", "8001", name.replace("frontend", "worker"), "8081"]
        if front
        else ["worker", "8081"]
    )
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "/crew/crew.py", *role],
        "readinessProbe": {"tcpSocket": {"port": 8000 if front else 8081}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}},
        "securityContext": RESTRICTED_CONTAINER,
        "volumeMounts": [{"name": "crew", "mountPath": "/crew"}],
    }
    pod = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "crew", "configMap": {"name": "crew"}}],
    }
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {
        "replicas": component.get("replicas", 1),
        "selector": {"matchLabels": labels},
        "template": template,
    }
    yield {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": about, "spec": spec}
    ports = [{"name": f"p{port}", "port": port} for port in ((8000, 8001) if front else (8081,))]
    service = {"selector": labels, "ports": ports, **({} if front else {"clusterIP": "None"})}
    yield {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": service}
