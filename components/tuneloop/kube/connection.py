"""Connect to a Kubernetes API server as kubectl would, and describe failures in one line."""

import base64
import gzip
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tuneloop.core.errors import Retryable, Unavailable, UserError
from tuneloop.core.json_types import JsonMapping, JsonObject

WORKFLOWS = ("argoproj.io", "v1alpha1", "workflows")
OWNER = {"apiVersion": "/".join(WORKFLOWS[:2]), "kind": "Workflow"}
"""Owner reference, without name and uid, to the Workflow with which an object is to be deleted."""
NAMESPACE = "tuneloop"
IN_CLUSTER = "in-cluster"
"""The context of a pod that uses its own account."""
PATIENCE = 300.0
"""Seconds that an API server may be unavailable while a run is followed: as long as a restart takes."""
T = TypeVar("T")


class Unreachable(UserError):
    """The API server does not answer."""


class ApiRefusal(UserError):
    """The API server refuses a request: its HTTP status and its message."""

    def __init__(self, context: str, status: int, message: str) -> None:
        super().__init__("cluster", context, f"refused ({status}): {message}")
        self.status = status
        self.message = message


@contextmanager
def translate_api_errors(host: str, context: str) -> Iterator[None]:
    """Turn errors of the client library into `ApiRefusal` or `Unavailable`; if the server does not answer, into
    `Unreachable`, but in a pod into `Unavailable`, as the pod's own server will return."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        message = read_api_message(error)
        if error.status in (429, 500, 502, 503, 504):
            raise Unavailable(f"cluster: {host}: {message}") from error
        raise ApiRefusal(context, error.status, message) from error
    except HTTPError as error:
        if context == IN_CLUSTER:
            raise Unavailable(
                f"cluster: {host} does not answer ({type(error).__name__})"
            ) from error
        remedy = f"{host} does not answer ({type(error).__name__}); is it running, and is this the context?"
        raise Unreachable("cluster", context, remedy) from error


def retry_until_available(
    look: Callable[[], T], *, patience: float = PATIENCE, pause: float = 1.0
) -> T:
    """Call `look` until the API server answers without a failure, and return its result. Pauses double from `pause` to
    30 seconds. Raises Retryable or Unreachable after `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return look()
        except (Retryable, Unreachable):
            if time.monotonic() + pause > deadline:
                raise
            time.sleep(pause)
            pause = min(2 * pause, 30.0)


def wait_until(done: Callable[[], bool], timeout: float, what: str) -> None:
    """Call `done` every second until it returns True; after `timeout` seconds raise Retryable with the text `what`."""
    deadline = time.monotonic() + timeout
    while not done():
        if time.monotonic() > deadline:
            raise Retryable(f"{what} after {timeout:g} s")
        time.sleep(1.0)


@contextmanager
def ignore_refusals(*statuses: int) -> Iterator[None]:
    """Leave the block without an error if the API server refuses a call in it with one of these statuses."""
    try:
        yield
    except ApiRefusal as error:
        if error.status not in statuses:
            raise


def list_status_nodes(workflow: JsonMapping) -> list[JsonObject]:
    """List the nodes of a workflow's status, which the controller compresses if it is too large for an object."""
    status = workflow.get("status", {})
    if packed := status.get("compressedNodes"):
        return [*json.loads(gzip.decompress(base64.b64decode(packed))).values()]
    return [*(status.get("nodes") or {}).values()]


def read_api_message(error: Any) -> str:
    """Read the API server's message in an ApiException of Kubernetes' client, or of KFP's."""
    try:
        said = json.loads(error.body)
        return " ".join(
            str(said.get("error_message") or said.get("message") or said["error"]).split()
        )
    except (TypeError, ValueError, AttributeError, KeyError):
        return str(error.reason)


@dataclass(frozen=True)
class Connection:
    """A connection to one namespace of a cluster. All its calls raise `ApiRefusal`, `Unreachable` or `Unavailable`."""

    namespace: str
    context: str
    host: str
    core: Any
    custom: Any
    auth: Any

    def get(self, group: str, version: str, plural: str, name: str) -> JsonObject:
        """Return a custom object of the namespace."""
        return self.custom.get_namespaced_custom_object(
            group, version, self.namespace, plural, name
        )

    def find(self, group: str, version: str, plural: str, name: str) -> JsonObject | None:
        """Return a custom object of the namespace; None where there is none."""
        with ignore_refusals(404):
            return self.get(group, version, plural, name)
        return None

    def create(self, group: str, version: str, plural: str, body: JsonMapping) -> JsonObject:
        """Create a custom object in the namespace."""
        return self.custom.create_namespaced_custom_object(
            group, version, self.namespace, plural, body
        )

    def delete(self, group: str, version: str, plural: str, name: str, **options: Any) -> bool:
        """Delete a custom object of the namespace, and return whether there was one."""
        with ignore_refusals(404):
            self.custom.delete_namespaced_custom_object(
                group, version, self.namespace, plural, name, **options
            )
            return True
        return False

    def list(
        self, group: str, version: str, plural: str, selector: str = ""
    ) -> "list[dict[str, Any]]":
        """List the custom objects of the namespace, oldest first."""
        found = self.custom.list_namespaced_custom_object(
            group, version, self.namespace, plural, label_selector=selector, _request_timeout=30
        )
        return sorted(found["items"], key=lambda item: str(item["metadata"]["creationTimestamp"]))

    def list_pods(self, selector: str, **options: Any) -> Sequence[Any]:
        """List the pods of the namespace that have these labels."""
        return self.core.list_namespaced_pod(
            self.namespace, label_selector=selector, **options
        ).items


def connect_to_cluster(namespace: str = NAMESPACE, context: str | None = None) -> Connection:
    """Connect as kubectl would: KUBECONFIG, else ``~/.kube/config``, else the pod's own account. Raises UserError where
    there is no configuration, or no such context."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise UserError(
            "cluster", None, "needs the Kubernetes client: pip install 'tuneloop[cluster]'"
        ) from None
    settings = client.Configuration()
    file = os.environ.get("KUBECONFIG")  # the library reads it when it is imported
    try:
        config.load_kube_config(config_file=file, context=context, client_configuration=settings)
        context = context or config.list_kube_config_contexts(config_file=file)[1]["name"]
    except config.ConfigException as error:
        if context or "KUBERNETES_SERVICE_HOST" not in os.environ:
            remedy = (
                f"no usable cluster configuration ({error}); set KUBECONFIG, or choose --context"
            )
            raise UserError("cluster", context or file or "~/.kube/config", remedy) from None
        config.load_incluster_config(client_configuration=settings)
        context = IN_CLUSTER
    settings.retries = 1
    return build_connection(settings, namespace, str(context))


def build_connection(settings: Any, namespace: str, context: str) -> Connection:
    """Build a connection of the client library's settings (``kubernetes.client.Configuration``)."""
    from kubernetes import client

    api = client.ApiClient(settings)
    api.call_api = translate_api_errors(settings.host, context)(api.call_api)  # type: ignore[method-assign]
    custom = client.CustomObjectsApi(api)
    auth = client.AuthorizationV1Api(api)
    return Connection(namespace, context, settings.host, client.CoreV1Api(api), custom, auth)
