"""A DynamoGraphDeployment as a managed fleet: created before the training job, and deleted with it.

Dynamo's operator turns the object into pods; this module only writes, watches and deletes it. A
graph is ready when three gates are open at once: the operator says so, every pod is ready, and the
frontend answers HTTP. A graph that `bring_up` created is deleted again if it does not become ready
or if its job cannot be started; a graph that existed before is used as it is. A graph made for a
run gets the run's workflow as owner once that exists, and is deleted with it or with the run
(`tuneloop.cluster.reservations`). The service accounts of a manifest stay, and none is ever set.

Its callers are a submission whose run has a graph of its own (`cluster/submission.py`), the step
that deletes it (`cluster/reservations.py`), and `tuneloop fleet` (`extensions/fleets/fleet_commands.py`). To a run the
workers of a graph are a fleet of `inference/fleet/dynamo.py`. The rights of people and of the step
are in ``manifests/admin/namespace/rights.yaml``: a call of another kind needs one there. The tests
are `tests/unit/inference/test_graph.py`.
"""

import copy
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from tuneloop.core.errors import Retryable, Unavailable, UserError
from tuneloop.core.http import Unanswered, send_request
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.inference.fleet.dynamo import FRONTEND_PORT
from tuneloop.kube.connection import (
    IN_CLUSTER,
    OWNER,
    WORKFLOWS,
    ApiRefusal,
    Connection,
    ignore_refusals,
    read_api_message,
    wait_until,
)
from tuneloop.workflow.settings import RUN_LABEL

GROUP = "nvidia.com"
KIND = "DynamoGraphDeployment"
PLURAL = "dynamographdeployments"
VERSIONS = ("v1beta1", "v1alpha1")
"""Versions of the API, the newest first; `_list_main_containers` knows the form of each."""
POD_LABEL = "nvidia.com/dynamo-graph-deployment-name"
"""The operator writes it on the pods of a graph."""
NO_SERVER = (0, 502, 503, 504)
"""No answer, and the statuses by which a proxy says that its server is down.

Any other status is the server's own.
"""
DELETION_S = 120.0
"""Seconds within which a graph that is deleted must be gone."""
POLL_S = 2.0
"""Seconds between two looks at the gates."""
PROBE_S = 10.0
"""Seconds that the frontend has to answer in its cluster."""
PROXIED_PROBE_S = 30.0
"""Seconds that it has to answer through the API server."""

Tell = Callable[[str], object]
"""Takes a line for people."""


@dataclass(frozen=True)
class Gate:
    """One condition of readiness, which `tuneloop fleet status` prints, too.

    Attributes:
        name: ``operator``, ``pods`` or ``frontend``.
        open: whether it is met.
        reason: the current state, for people.
    """

    name: str
    open: bool
    reason: str


def render_graph(
    documents: Iterable[JsonMapping | None],
    *,
    name: str | None = None,
    namespace: str | None = None,
    labels: Mapping[str, str] | None = None,
    image: str | None = None,
    sets: Sequence[str] = (),
) -> JsonObject:
    """Take the graph from the documents of a manifest, and change a copy of it.

    Args:
        documents: of the manifest, of which exactly one is a graph.
        name: replaces the graph's own.
        namespace: replaces the graph's own.
        labels: are added to the graph's own.
        image: for components that name none.
        sets: ``path=value`` below the object, values in YAML. An item of a list is found by its
            ``name``.

    Raises:
        UserError: there is no graph, there are several, or a path leads nowhere.
    """
    graphs: list[JsonMapping] = []
    for document in documents:
        if isinstance(document, Mapping) and document.get("kind") == KIND:
            graphs.append(document)
    if len(graphs) != 1:
        raise UserError("manifest", f"{len(graphs)} of kind {KIND}", "must be one")
    graph: JsonObject = copy.deepcopy(dict(graphs[0]))
    metadata = graph.setdefault("metadata", {})
    if name:
        metadata["name"] = name
    if namespace:
        metadata["namespace"] = namespace
    if labels:
        metadata.setdefault("labels", {}).update(labels)
    for assignment in sets:
        _assign(graph, assignment)
    if image:
        for container in _list_main_containers(graph):
            container.setdefault("image", image)
    if not metadata.get("name"):
        raise UserError("manifest", None, "the graph has no name; give it one")
    return graph


def _assign(graph: JsonObject, assignment: str) -> None:
    """Carry out one ``path=value`` of the command line."""
    path, equals, text = assignment.partition("=")
    if not equals:
        raise UserError("--set", assignment, "write path=value")
    *parents, last = path.split(".")
    node: Any = graph
    for key in parents:
        node = _descend(node, key, assignment)
    if not isinstance(node, dict):
        raise UserError("--set", assignment, f"{last} is below no mapping")
    node[last] = yaml.safe_load(text)


def _descend(node: Any, key: str, assignment: str) -> Any:
    """Return the value of a mapping's key, or the item of a list that has this name.

    Raises:
        UserError: there is no such item.
    """
    if isinstance(node, dict):
        return node.setdefault(key, {})
    if isinstance(node, list):
        # The order of components is nothing that a user should have to count.
        for item in node:
            if isinstance(item, dict) and item.get("name") == key:
                return item
    raise UserError("--set", assignment, f"the manifest has nothing named {key} there")


def _list_main_containers(graph: JsonObject) -> list[JsonObject]:
    """List the main container of each component, and add it where there is none."""
    spec = graph.setdefault("spec", {})
    main_containers: list[JsonObject] = []
    # v1alpha1 has a mapping of services with one main container each.
    for service in (spec.get("services") or {}).values():
        extra_pod_spec = service.setdefault("extraPodSpec", {})
        main_containers.append(extra_pod_spec.setdefault("mainContainer", {}))
    # v1beta1 has a list of components, each with a pod template and a container named "main".
    for component in spec.get("components") or ():
        pod_spec = component.setdefault("podTemplate", {}).setdefault("spec", {})
        containers = pod_spec.setdefault("containers", [])
        main = next((item for item in containers if item.get("name") == "main"), None)
        if main is None:
            main = {"name": "main"}
            containers.append(main)
        main_containers.append(main)
    return main_containers


def find_api_version(cluster: Connection) -> str:
    """Find the newest version of the API that the cluster has.

    Raises:
        UserError: the operator's definitions are not installed.
    """
    for version in VERSIONS:
        try:
            kinds = cluster.custom.get_api_resources(GROUP, version).resources
        except ApiRefusal as error:
            # An account that may not ask may still use it, and is refused then if it may not.
            if error.status == 403:
                return version
            if error.status != 404:
                raise
        else:
            if any(kind.name == PLURAL for kind in kinds):
                return version
    remedy = f"has no {KIND} ({PLURAL}.{GROUP}); install Dynamo's operator first"
    raise UserError("cluster", cluster.context, remedy)


def find_graph(cluster: Connection, name: str, version: str | None = None) -> JsonObject | None:
    """Find the graph as it is now, in the newest or the given version of the API.

    Returns None if there is none.
    """
    return cluster.find(GROUP, version or find_api_version(cluster), PLURAL, name)


def bring_up(
    cluster: Connection,
    graph: JsonMapping,
    start: Callable[[], str] | None = None,
    *,
    recreate: bool = False,
    timeout: float = 1800.0,
    tell: Tell = print,
) -> str | None:
    """Create a graph, wait until it is ready, and start the run that uses it.

    A graph that this call created is deleted if an error is raised, and so is the workflow.

    Args:
        cluster: where the graph belongs.
        graph: as `render_graph` returns it.
        start: starts the workflow that becomes the graph's owner, and returns its name.
        recreate: replace an existing graph that differs. By default it is used as it is.
        timeout: seconds until the graph must be ready.
        tell: gets lines on the progress, such as where an existing graph differs.

    Returns:
        The name of the workflow, if there is one.

    Raises:
        UserError: the operator gave up.
        Retryable: the graph is not ready in time.
    """
    name = str(graph["metadata"]["name"])
    is_created = _ensure(cluster, graph, recreate, tell)
    workflow = None
    try:
        _wait(cluster, name, timeout, tell)
        if start is not None:
            workflow = start()
            own_graph(cluster, graph, workflow, tell)
        return workflow
    except BaseException:
        # An interrupt, too, must leave no fleet behind that holds GPUs and has no run.
        if workflow is not None:
            cluster.delete(*WORKFLOWS, workflow, propagation_policy="Background")
        if is_created:
            delete_graph(cluster, name)
            tell(f"{name}: taken down again")
        raise


def _ensure(cluster: Connection, graph: JsonMapping, recreate: bool, tell: Tell) -> bool:
    """Create the graph unless it exists; return whether it was created."""
    name = str(graph["metadata"]["name"])
    group, _, version = str(graph["apiVersion"]).partition("/")
    # It raises the error that names the operator, where the calls below would be refused with 404.
    find_api_version(cluster)
    live = find_graph(cluster, name, version)
    if live is not None and not live["metadata"].get("deletionTimestamp"):
        drift = find_drift(graph.get("spec", {}), live.get("spec", {}), "spec")
        if not drift:
            tell(f"{name}: stands already")
            return False
        if not recreate:
            tell(f"{name}: stands already, and differs: {', '.join(drift)}")
            return False
        delete_graph(cluster, name)
    state = f"{name}: is still being deleted"
    wait_until(lambda: find_graph(cluster, name) is None, DELETION_S, state)
    cluster.create(group, version, PLURAL, graph)
    tell(f"{name}: created")
    return True


def find_drift(expected: Any, live: Any, path: str) -> list[str]:
    """List the paths at which `live` lacks or changes an expected value.

    Additional values are no drift: the operator fills in defaults.
    """
    drift: list[str] = []
    if isinstance(expected, Mapping):
        fields = live if isinstance(live, Mapping) else {}
        for key, value in expected.items():
            drift += find_drift(value, fields.get(key), f"{path}.{key}")
    elif isinstance(expected, list) and isinstance(live, list) and len(expected) == len(live):
        for index, item in enumerate(expected):
            drift += find_drift(item, live[index], f"{path}[{index}]")
    elif expected != live:
        drift.append(path)
    return drift


def _wait(cluster: Connection, name: str, timeout: float, tell: Tell) -> None:
    """Wait until all gates are open; raises as `bring_up`."""
    deadline = time.monotonic() + timeout
    reported = ""
    while True:
        gates = read_gates(cluster, name)
        state = "; ".join(f"{gate.name}: {gate.reason}" for gate in gates if not gate.open)
        if not state:
            break
        if gates[0].reason == "failed":
            remedy = f"its operator gave up: {_read_failure(cluster, name)}"
            raise UserError("graph", name, remedy)
        if time.monotonic() > deadline:
            raise Retryable(f"{name}: not ready after {timeout:g} s ({state})")
        # The state stays the same for minutes, while an image or a model is loaded.
        if state != reported:
            tell(f"{name}: {state}")
            reported = state
        time.sleep(POLL_S)
    tell(f"{name}: ready")


def _read_failure(cluster: Connection, name: str) -> str:
    """Return what the operator says about a graph that failed."""
    graph = find_graph(cluster, name) or {}
    messages: list[str] = []
    for condition in (graph.get("status") or {}).get("conditions") or ():
        if condition.get("status") == "False" and condition.get("message"):
            messages.append(condition["message"])
    return "; ".join(messages) or "failed"


def read_gates(cluster: Connection, name: str, port: int = FRONTEND_PORT) -> list[Gate]:
    """Read the three gates of a graph as they are now; the operator's is the first.

    Raises:
        UserError: there is no such graph.
    """
    graph = find_graph(cluster, name)
    if graph is None:
        remedy = f"is not in namespace {cluster.namespace} of {cluster.context}"
        raise UserError("graph", name, remedy)
    status, reason = _probe(cluster, f"{name}-frontend", port)
    return [
        operator_gate(graph),
        pods_gate(cluster.list_pods(f"{POD_LABEL}={name}")),
        frontend_gate(status, reason),
    ]


def operator_gate(graph: JsonMapping) -> Gate:
    """Check that the operator's state is ``successful``, for the graph's current generation."""
    status = graph.get("status") or {}
    state = str(status.get("state") or "not seen")
    # After a change the status describes the pods of before, until the operator looks again.
    observed = status.get("observedGeneration")
    if observed is not None and observed < graph["metadata"].get("generation", 0):
        return Gate("operator", False, f"{state}, of an earlier generation")
    return Gate("operator", state == "successful", state)


def pods_gate(pods: Sequence[Any]) -> Gate:
    """Check that there is a pod, and that all pods are ready.

    Pods of before a change, which are being deleted, do not count.
    """
    live = [pod for pod in pods if not pod.metadata.deletion_timestamp]
    ready = sum(_is_ready(pod) for pod in live)
    return Gate("pods", 0 < len(live) == ready, f"{ready} of {len(live)} ready")


def _is_ready(pod: Any) -> bool:
    conditions = pod.status.conditions or ()
    return any(item.type == "Ready" and item.status == "True" for item in conditions)


def frontend_gate(status: int, reason: str = "") -> Gate:
    """Check that the frontend answers, if only with 404.

    Args:
        status: of its answer, 0 if there is none.
        reason: why there is none.
    """
    state = f"answers {status}" if status else reason or "does not answer"
    return Gate("frontend", status not in NO_SERVER, state)


def _probe(cluster: Connection, service: str, port: int) -> tuple[int, str]:
    """Ask a Service for its health.

    Returns:
        The HTTP status, or 0 and why there is none.
    """
    if cluster.context == IN_CLUSTER:
        url = f"http://{service}.{cluster.namespace}:{port}/health"
        try:
            status, _ = send_request("GET", url, timeout_s=PROBE_S)
        except Unanswered as error:
            return 0, str(error)
        return status, ""
    # Outside of the cluster the name does not resolve, but the API server passes requests on.
    proxy = cluster.core.connect_get_namespaced_service_proxy_with_path
    target = f"{service}:{port}"
    try:
        proxy(target, cluster.namespace, "health", _request_timeout=PROXIED_PROBE_S)
    except (ApiRefusal, Unavailable) as error:
        answer: Any = error.__cause__
        # The account may not use the proxy: this is no state of the graph, and would never change.
        if answer.status == 403:
            raise
        if _is_answer_of_api_server(answer):
            return 0, read_api_message(answer)
        return answer.status, ""
    return 200, ""


def _is_answer_of_api_server(error: Any) -> bool:
    """Return whether the API server answered itself, because it did not reach the Service."""
    try:
        status = json.loads(error.body)
        return bool(status["kind"] == "Status" and status["details"]["kind"] == "services")
    except (TypeError, ValueError, KeyError):
        return False


def own_graph(cluster: Connection, graph: JsonMapping, workflow: str, tell: Tell) -> None:
    """Make the workflow the owner of the graph if the graph was made for that run.

    Kubernetes then deletes both together.

    Raises:
        Retryable: the graph was deleted meanwhile.
    """
    name = str(graph["metadata"]["name"])
    workflow_metadata = cluster.get(*WORKFLOWS, workflow)["metadata"]
    run = workflow_metadata.get("labels", {}).get(RUN_LABEL)
    reference = dict(OWNER, name=workflow, uid=workflow_metadata["uid"], controller=False)
    while True:
        live = find_graph(cluster, name)
        if live is None:
            raise Retryable(f"{name}: was deleted while its run was started")
        metadata = live["metadata"]
        if run is None or metadata.get("labels", {}).get(RUN_LABEL) != run:
            tell(f"{name}: was not made for this run, and stays when it ends")
            return
        owners: list[JsonObject] = []
        for owner in metadata.get("ownerReferences", ()):
            if owner["uid"] != reference["uid"]:
                owners.append(owner)
        owners.append(reference)
        patch: JsonObject = {
            "metadata": {
                "resourceVersion": metadata["resourceVersion"],
                "ownerReferences": owners,
            }
        }
        # With a resource version the API server answers 409 if the object was changed since it was
        # read, as by the operator; then it is read again.
        with ignore_refusals(409):
            cluster.custom.patch_namespaced_custom_object(
                GROUP,
                find_api_version(cluster),
                cluster.namespace,
                PLURAL,
                name,
                patch,
            )
            return


def list_graphs(cluster: Connection, run: str) -> list[JsonObject]:
    """List the graphs that were made for a run, none if Dynamo's definitions are not installed."""
    for version in VERSIONS:
        with ignore_refusals(404):
            return cluster.list(GROUP, version, PLURAL, f"{RUN_LABEL}={run}")
    return []


def delete_graph(cluster: Connection, name: str) -> bool:
    """Delete a graph, and with it the objects that its operator created.

    Returns:
        Whether it existed.
    """
    version = find_api_version(cluster)
    return cluster.delete(GROUP, version, PLURAL, name, propagation_policy="Background")
