"""Connect to a Kubernetes API server as kubectl would.

cluster = connect_to_cluster("tuneloop")
with translate_api_errors(cluster):
    workflows = cluster.list(*WORKFLOWS)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuneloop.core.errors import UserError

WORKFLOWS = ("argoproj.io", "v1alpha1", "workflows")
OWNER = {"apiVersion": "/".join(WORKFLOWS[:2]), "kind": "Workflow"}
"""In an owner reference: with name and uid of a workflow, what its object shall not outlive."""
NAMESPACE = "tuneloop"
IN_CLUSTER = "in-cluster"
"""The context of a pod that uses its own account."""


@dataclass(frozen=True)
class Connection:
    """A connection to one namespace of a cluster.

    Attributes:
        namespace: where runs live.
        context: of the kubeconfig, for people.
        host: address of the API server, for people.
        core, custom, auth: the client library's APIs.
    """

    namespace: str
    context: str
    host: str
    core: Any
    custom: Any
    auth: Any

    def get(self, group: str, version: str, plural: str, name: str) -> dict[str, Any]:
        """Return a custom object of the namespace."""
        found: dict[str, Any] = self.custom.get_namespaced_custom_object(group, version, self.namespace, plural, name)
        return found

    def find(self, group: str, version: str, plural: str, name: str) -> dict[str, Any] | None:
        """Return a custom object of the namespace; None where there is none."""
        from kubernetes.client import ApiException

        try:
            return self.get(group, version, plural, name)
        except ApiException as error:
            if error.status != 404:
                raise
            return None

    def create(self, group: str, version: str, plural: str, body: Mapping[str, Any]) -> None:
        """Create a custom object in the namespace."""
        self.custom.create_namespaced_custom_object(group, version, self.namespace, plural, body)

    def delete(self, group: str, version: str, plural: str, name: str, **options: Any) -> bool:
        """Delete a custom object of the namespace, and return whether there was one."""
        from kubernetes.client import ApiException

        try:
            self.custom.delete_namespaced_custom_object(group, version, self.namespace, plural, name, **options)
        except ApiException as error:
            if error.status != 404:
                raise
            return False
        return True

    def list(self, group: str, version: str, plural: str, selector: str = "") -> list[dict[str, Any]]:
        """List the custom objects of the namespace, oldest first."""
        found = self.custom.list_namespaced_custom_object(
            group, version, self.namespace, plural, label_selector=selector, _request_timeout=30
        )
        return sorted(found["items"], key=lambda item: str(item["metadata"]["creationTimestamp"]))

    def list_pods(self, selector: str) -> Sequence[Any]:
        """List the pods of the namespace that have these labels."""
        found: Sequence[Any] = self.core.list_namespaced_pod(self.namespace, label_selector=selector).items
        return found


def connect_to_cluster(namespace: str = NAMESPACE, context: str | None = None) -> Connection:
    """Connect as kubectl would: KUBECONFIG, else ``~/.kube/config``, else the pod's own account.

    Raises:
        UserError: there is no configuration, or no such context.
    """
    try:
        from kubernetes import client, config
    except ImportError:
        raise UserError("cluster", None, "needs the Kubernetes client: pip install 'tuneloop[cluster]'") from None
    settings = client.Configuration()
    file = os.environ.get("KUBECONFIG")  # the library reads it when it is imported
    try:
        config.load_kube_config(config_file=file, context=context, client_configuration=settings)
        context = context or config.list_kube_config_contexts(config_file=file)[1]["name"]
    except config.ConfigException as error:
        if context or "KUBERNETES_SERVICE_HOST" not in os.environ:
            remedy = f"no usable cluster configuration ({error}); set KUBECONFIG, or choose --context"
            raise UserError("cluster", context or file or "~/.kube/config", remedy) from None
        config.load_incluster_config(client_configuration=settings)
        context = IN_CLUSTER
    settings.retries = 1
    api = client.ApiClient(settings)
    custom = client.CustomObjectsApi(api)
    return Connection(
        namespace, str(context), settings.host, client.CoreV1Api(api), custom, client.AuthorizationV1Api(api)
    )
