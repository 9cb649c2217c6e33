"""Connect to a Kubernetes API server as kubectl would, and describe failures in one line.

`kube/resize.py` does without it, in images that have no client library. The tests in
`tests/unit/cluster/` use it against a small server, `tests/unit/cluster/api.py`."""

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
from tuneloop.core.http import is_transient
from tuneloop.core.json_types import JsonMapping, JsonObject

WORKFLOWS = ("argoproj.io", "v1alpha1", "workflows")
"""Group, version and plural of Argo's workflows: the first arguments of `Connection`'s calls for
custom objects."""
OWNER = {"apiVersion": "/".join(WORKFLOWS[:2]), "kind": "Workflow"}
"""Owner reference, without name and uid, to the Workflow with which an object is to be deleted."""
NAMESPACE = "tuneloop"
"""The namespace that ``manifests/`` create, where no other one is asked for."""
IN_CLUSTER = "in-cluster"
"""The context of a pod that uses its own account."""
PATIENCE = 300.0
"""Seconds that an API server may be unavailable while a run is followed: the time of a restart."""
T = TypeVar("T")


class Unreachable(UserError):
    """The API server does not answer. In a pod `translate_api_errors` raises `Unavailable` instead,
    after which the pod is started again."""


class ApiRefusal(UserError):
    """The API server refuses a request: its HTTP status and its message.

    Callers decide by `status`: 404 and 409 are expected in many places (`ignore_refusals`).
    """

    def __init__(self, context: str, status: int, message: str) -> None:
        super().__init__("cluster", context, f"refused ({status}): {message}")
        self.status = status
        self.message = message


@contextmanager
def translate_api_errors(host: str, context: str) -> Iterator[None]:
    """Turn errors of the client library into those of this module.

    The statuses that count as a failure of the server are listed here; `kube/resize.py` goes by
    `core/http.py: is_transient`, which has all from 500 on.

    Raises:
        ApiRefusal: the server refuses the request.
        Unavailable: the server fails, or in a pod does not answer, as the pod's own server will
            return.
        Unreachable: elsewhere the server does not answer.
    """
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        message = read_api_message(error)
        if is_transient(error.status or 0):
            raise Unavailable(f"cluster: {host}: {message}") from error
        raise ApiRefusal(context, error.status, message) from error
    except HTTPError as error:
        fault = f"{host} does not answer ({type(error).__name__})"
        if context == IN_CLUSTER:
            raise Unavailable(f"cluster: {fault}") from error
        raise Unreachable(
            "cluster",
            context,
            f"{fault}; is it running, and is this the context?",
        ) from error


def retry_until_available(
    look: Callable[[], T],
    *,
    patience: float = PATIENCE,
    pause: float = 1.0,
) -> T:
    """Call `look` until the API server answers without a failure, and return its result.

    It is for calls that only read: a request that failed may have been carried out all the same.

    Pauses double from `pause` to 30 seconds.

    Raises:
        Retryable: the server failed for `patience` seconds. What it was asked for goes on meanwhile,
            so it is no mistake of the user.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return look()
        except (Retryable, Unreachable) as error:
            # A pause that ends after the deadline is not begun.
            if time.monotonic() + pause > deadline:
                if isinstance(error, Unreachable):
                    fault = error.remedy.partition(";")[0]
                    message = f"{error.field}: {error.value!r}: {fault}, for {patience:g} s"
                    raise Unavailable(message) from error
                raise
            time.sleep(pause)
            pause = min(2 * pause, 30.0)


def wait_until(is_done: Callable[[], bool], timeout: float, state: str) -> None:
    """Call `is_done` every second until it returns True.

    Raises:
        Retryable: it did not within `timeout` seconds; the message begins with `state`.
    """
    deadline = time.monotonic() + timeout
    while not is_done():
        if time.monotonic() > deadline:
            raise Retryable(f"{state} after {timeout:g} s")
        time.sleep(1.0)


@contextmanager
def ignore_refusals(*statuses: int) -> Iterator[None]:
    """Leave the block without an error if the API server refuses a call in it with one of these statuses."""
    try:
        yield
    except ApiRefusal as error:
        # Any other status is a failure that the caller does not expect.
        if error.status not in statuses:
            raise


def list_status_nodes(workflow: JsonMapping) -> list[JsonObject]:
    """List the nodes of a workflow's status. Argo offloads nodes that are too many for an object
    even when they are compressed, into a database if it has one: those are not seen here."""
    status = workflow.get("status", {})
    # The controller compresses nodes that are too large for an object.
    compressed = status.get("compressedNodes")
    if compressed:
        text = gzip.decompress(base64.b64decode(compressed))
        return list(json.loads(text).values())
    nodes = status.get("nodes") or {}
    return list(nodes.values())


def read_api_message(error: Any) -> str:
    """Read the API server's message in an ApiException of Kubernetes' client, or of KFP's, or in
    any object with the attributes ``body`` and ``reason``."""
    try:
        body = json.loads(error.body)
        message = body.get("error_message") or body.get("message") or body["error"]
        # In one line, whatever the server wrote.
        return " ".join(str(message).split())
    except (TypeError, ValueError, AttributeError, KeyError):
        return str(error.reason)


@dataclass(frozen=True)
class Connection:
    """A connection to one namespace of a cluster.

    All its calls raise `ApiRefusal`, `Unreachable` or `Unavailable`, and so do calls of `core`,
    `custom` and `auth`. An API of another group gets the same errors if it is made of the same
    client of the library: ``BatchV1Api(connection.core.api_client)``.

    Attributes:
        namespace: the namespace of all objects.
        context: the context of the configuration, or `IN_CLUSTER`.
        host: the URL of the API server.
        core, custom, auth: the client library's APIs of these groups.
    """

    namespace: str
    context: str
    host: str
    core: Any
    custom: Any
    auth: Any

    def get(self, group: str, version: str, plural: str, name: str) -> JsonObject:
        """Return a custom object of the namespace."""
        return self.custom.get_namespaced_custom_object(
            group,
            version,
            self.namespace,
            plural,
            name,
        )

    def find(self, group: str, version: str, plural: str, name: str) -> JsonObject | None:
        """Return a custom object of the namespace; None where there is none."""
        with ignore_refusals(404):
            return self.get(group, version, plural, name)
        return None

    def create(self, group: str, version: str, plural: str, body: JsonMapping) -> JsonObject:
        """Create a custom object in the namespace."""
        return self.custom.create_namespaced_custom_object(
            group,
            version,
            self.namespace,
            plural,
            body,
        )

    def delete(self, group: str, version: str, plural: str, name: str, **options: Any) -> bool:
        """Delete a custom object of the namespace, and return whether there was one."""
        with ignore_refusals(404):
            self.custom.delete_namespaced_custom_object(
                group,
                version,
                self.namespace,
                plural,
                name,
                **options,
            )
            return True
        return False

    def list(
        self, group: str, version: str, plural: str, selector: str = ""
    ) -> "list[dict[str, Any]]":
        """List the custom objects of the namespace, oldest first.

        Times of creation are whole seconds: `cluster/run_workflows.py: get_workflow_age` orders the
        workflows of a run further.
        """
        answer = self.custom.list_namespaced_custom_object(
            group,
            version,
            self.namespace,
            plural,
            label_selector=selector,
            _request_timeout=30,
        )
        return sorted(answer["items"], key=lambda item: str(item["metadata"]["creationTimestamp"]))

    def list_pods(self, selector: str, **options: Any) -> Sequence[Any]:
        """List the pods of the namespace that have these labels."""
        answer = self.core.list_namespaced_pod(
            self.namespace,
            label_selector=selector,
            **options,
        )
        return answer.items


def connect_to_cluster(namespace: str = NAMESPACE, context: str | None = None) -> Connection:
    """Connect as kubectl would: KUBECONFIG, else ``~/.kube/config``, else the pod's own account.

    Raises:
        UserError: there is no configuration, or no such context.
    """
    try:
        from kubernetes import client, config
    except ImportError:
        remedy = "needs the Kubernetes client: pip install 'tuneloop[cluster]'"
        raise UserError("cluster", None, remedy) from None
    settings = client.Configuration()
    # Read here, as the library reads it only once, when it is imported.
    file = os.environ.get("KUBECONFIG")
    try:
        config.load_kube_config(config_file=file, context=context, client_configuration=settings)
        _, active_context = config.list_kube_config_contexts(config_file=file)
        context = context or active_context["name"]
    except config.ConfigException as error:
        if context or "KUBERNETES_SERVICE_HOST" not in os.environ:
            raise UserError(
                "cluster",
                context or file or "~/.kube/config",
                f"no usable cluster configuration ({error}); set KUBECONFIG, or choose --context",
            ) from None
        config.load_incluster_config(client_configuration=settings)
        context = IN_CLUSTER
    # The callers retry, with pauses: the library's own retries have none.
    settings.retries = 1
    return build_connection(settings, namespace, str(context))


def build_connection(settings: Any, namespace: str, context: str) -> Connection:
    """Build a connection of the client library's settings (``kubernetes.client.Configuration``)."""
    from kubernetes import client

    api = client.ApiClient(settings)
    # Every request of every API of this client goes through this method.
    translate = translate_api_errors(settings.host, context)
    # No timeout for all calls here: `cluster/watch.py` follows logs through it.
    api.call_api = translate(api.call_api)  # type: ignore[method-assign]
    return Connection(
        namespace=namespace,
        context=context,
        host=settings.host,
        core=client.CoreV1Api(api),
        custom=client.CustomObjectsApi(api),
        auth=client.AuthorizationV1Api(api),
    )
