"""A DynamoGraphDeployment as a managed fleet: brought up before the training job, tied to it, gone with it.

Dynamo's operator turns the object into pods; this module only writes, watches and deletes it. A graph is ready when
three gates are open at once: the operator says so, every pod is ready, and the frontend answers HTTP. A graph that
`bring_up` created is deleted again where it does not become ready or its job cannot be started; one that stood before
is used as it is. A graph made for a run gets the run's workflow as owner, once that exists, and goes with it and with
the run (`tuneloop.cluster.reservations`). A manifest's service accounts stay, and none is ever set.
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
from tuneloop.kube import connection
from tuneloop.workflow.settings import RUN_LABEL

GROUP = "nvidia.com"
KIND = "DynamoGraphDeployment"
PLURAL = "dynamographdeployments"
VERSIONS = ("v1beta1", "v1alpha1")
POD_LABEL = "nvidia.com/dynamo-graph-deployment-name"
DOWN = (502, 503, 504)
"""The statuses by which a proxy says that its server is down; any other status is the server's own."""

Object = JsonMapping


@dataclass(frozen=True)
class Gate:
    """One condition of readiness; `why` describes the current state."""

    name: str
    open: bool
    why: str


def render_graph(
    documents: Iterable[Object | None],
    *,
    name: str | None = None,
    namespace: str | None = None,
    labels: Mapping[str, str] | None = None,
    image: str | None = None,
    sets: Sequence[str] = (),
) -> JsonObject:
    """Take the graph from the documents of a manifest, and change it. `image` is for components that name none. `sets`:
    ``path=value`` below the object, values in YAML; an item of a list is found by its ``name``. Raises UserError: no
    graph or several; a path that leads nowhere."""
    graphs = [each for each in documents if isinstance(each, Mapping) and each.get("kind") == KIND]
    if len(graphs) != 1:
        raise UserError("manifest", f"{len(graphs)} of kind {KIND}", "must be one")
    graph: JsonObject = copy.deepcopy(dict(graphs[0]))
    metadata = graph.setdefault("metadata", {})
    metadata.update(
        {key: value for key, value in (("name", name), ("namespace", namespace)) if value}
    )
    if labels:
        metadata["labels"] = {**metadata.get("labels", {}), **labels}
    for item in sets:
        path, equals, text = item.partition("=")
        if not equals:
            raise UserError("--set", item, "write path=value")
        *above, last = path.split(".")
        place: Any = graph
        for key in above:
            place = (
                place.setdefault(key, {}) if isinstance(place, dict) else _item(place, key, item)
            )
        if not isinstance(place, dict):
            raise UserError("--set", item, f"{last} is below no mapping")
        place[last] = yaml.safe_load(text)
    if image:
        for container in _containers(graph):
            container.setdefault("image", image)
    if not metadata.get("name"):
        raise UserError("manifest", None, "the graph has no name; give it one")
    return graph


def _item(place: Any, name: str, item: str) -> Any:
    for each in place if isinstance(place, list) else ():
        if isinstance(each, dict) and each.get("name") == name:
            return each
    raise UserError("--set", item, f"the manifest has nothing named {name} there")


def _containers(graph: JsonObject) -> list[JsonObject]:
    """List the main container of each component, as ``v1alpha1`` (services) and ``v1beta1`` (components) have it."""
    spec = graph.setdefault("spec", {})
    main_containers = []
    for service in (spec.get("services") or {}).values():
        main_containers.append(
            service.setdefault("extraPodSpec", {}).setdefault("mainContainer", {})
        )
    for component in spec.get("components") or ():
        containers = (
            component.setdefault("podTemplate", {})
            .setdefault("spec", {})
            .setdefault("containers", [])
        )
        main = next((c for c in containers if c.get("name") == "main"), None)
        if main is None:
            containers.append(main := {"name": "main"})
        main_containers.append(main)
    return main_containers


def find_api_version(cluster: connection.Connection) -> str:
    """Find the newest version of the API that the cluster has; one that the account may not ask for (403) counts as
    there. Raises UserError: the operator's definitions are not installed."""
    for version in VERSIONS:
        try:
            if any(
                kind.name == PLURAL
                for kind in cluster.custom.get_api_resources(GROUP, version).resources
            ):
                return version
        except connection.ApiRefusal as error:
            if error.status == 403:
                return version
            if error.status != 404:
                raise
    raise UserError(
        "cluster",
        cluster.context,
        f"has no {KIND} ({PLURAL}.{GROUP}); install Dynamo's operator first",
    )


def find_graph(
    cluster: connection.Connection, name: str, version: str | None = None
) -> JsonObject | None:
    """Find the graph as it is now, in the newest or a given version of the API; None where there is none."""
    return cluster.find(GROUP, version or find_api_version(cluster), PLURAL, name)


def bring_up(
    cluster: connection.Connection,
    graph: Object,
    start: Callable[[], str] | None = None,
    *,
    recreate: bool = False,
    timeout: float = 1800.0,
    tell: Callable[[str], object] = print,
) -> str | None:
    """Have `graph` ready within `timeout` seconds, then call `start`, make the workflow whose name it returns the owner
    of the graph, and return that name. `recreate` replaces an existing graph that differs; else that is used as it is,
    and `tell` says where it differs. Raises UserError if the operator gave up, Retryable if the graph is not ready in
    time, and whatever `start` raises; a graph that this call created is deleted then."""
    name = str(graph["metadata"]["name"])
    created = _ensure(cluster, graph, recreate, tell)
    started = None
    try:
        _wait(cluster, name, timeout, tell)
        if start is not None:
            started = start()
            own_graph(cluster, graph, started, tell)
        return started
    except BaseException:
        if started is not None:
            cluster.delete(*connection.WORKFLOWS, started, propagation_policy="Background")
        if created:
            delete_graph(cluster, name)
            tell(f"{name}: taken down again")
        raise


def _ensure(
    cluster: connection.Connection, graph: Object, recreate: bool, tell: Callable[[str], object]
) -> bool:
    """Create the graph unless it exists; return whether it was created."""
    name = str(graph["metadata"]["name"])
    group, _, version = str(graph["apiVersion"]).partition("/")
    find_api_version(cluster)
    live = find_graph(cluster, name, version)
    if live is not None and not live["metadata"].get("deletionTimestamp"):
        changed = find_drift(graph.get("spec", {}), live.get("spec", {}), "spec")
        if not (changed and recreate):
            tell(
                f"{name}: stands already"
                + (f", and differs: {', '.join(changed)}" if changed else "")
            )
            return False
        delete_graph(cluster, name)
    connection.wait_until(
        lambda: find_graph(cluster, name) is None, 120.0, f"{name}: is still being deleted"
    )
    cluster.custom.create_namespaced_custom_object(group, version, cluster.namespace, PLURAL, graph)
    tell(f"{name}: created")
    return True


def find_drift(wanted: Any, live: Any, at: str) -> list[str]:
    """List the paths at which `live` lacks or changes a `wanted` value; additional values come from the operator."""
    if isinstance(wanted, Mapping):
        fields = live if isinstance(live, Mapping) else {}
        return [
            path
            for key in wanted
            for path in find_drift(wanted[key], fields.get(key), f"{at}.{key}")
        ]
    if isinstance(wanted, list) and isinstance(live, list) and len(wanted) == len(live):
        return [
            path
            for i, item in enumerate(wanted)
            for path in find_drift(item, live[i], f"{at}[{i}]")
        ]
    return [] if wanted == live else [at]


def _wait(
    cluster: connection.Connection, name: str, timeout: float, tell: Callable[[str], object]
) -> None:
    deadline = time.monotonic() + timeout
    reported = ""
    while True:
        conditions = read_gates(cluster, name)
        shut = "; ".join(f"{gate.name}: {gate.why}" for gate in conditions if not gate.open)
        if not shut:
            break
        if conditions[0].why == "failed":
            found = ((find_graph(cluster, name) or {}).get("status") or {}).get("conditions") or ()
            told = "; ".join(
                c["message"] for c in found if c.get("status") == "False" and c.get("message")
            )
            raise UserError("graph", name, f"its operator gave up: {told or 'failed'}")
        if time.monotonic() > deadline:
            raise Retryable(f"{name}: not ready after {timeout:g} s ({shut})")
        if shut != reported:
            tell(f"{name}: {shut}")
            reported = shut
        time.sleep(2.0)
    tell(f"{name}: ready")


def read_gates(cluster: connection.Connection, name: str, port: int = FRONTEND_PORT) -> list[Gate]:
    """Read the three gates of a graph as they are now. Raises UserError where there is no such graph."""
    if (graph := find_graph(cluster, name)) is None:
        raise UserError(
            "graph", name, f"is not in namespace {cluster.namespace} of {cluster.context}"
        )
    pods = cluster.core.list_namespaced_pod(
        cluster.namespace, label_selector=f"{POD_LABEL}={name}"
    ).items
    return [
        operator_gate(graph),
        pods_gate(pods),
        frontend_gate(*_probe(cluster, f"{name}-frontend", port)),
    ]


def operator_gate(graph: Object) -> Gate:
    """Check that the operator's state is ``successful``, for the graph's current generation."""
    status = graph.get("status") or {}
    state = str(status.get("state") or "not seen")
    seen = status.get("observedGeneration")
    if seen is not None and seen < graph["metadata"].get("generation", 0):
        return Gate("operator", False, f"{state}, of an earlier generation")
    return Gate("operator", state == "successful", state)


def pods_gate(pods: Sequence[Any]) -> Gate:
    """Check that all pods are ready, and that there is one."""
    live = [pod for pod in pods if not pod.metadata.deletion_timestamp]
    ready = [
        pod
        for pod in live
        if any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ())
    ]
    return Gate("pods", 0 < len(live) == len(ready), f"{len(ready)} of {len(live)} ready")


def frontend_gate(status: int, reason: str = "") -> Gate:
    """Check that the frontend answers, if only with 404. `status` is 0 if it does not."""
    return Gate(
        "frontend",
        status not in (0, *DOWN),
        f"answers {status}" if status else reason or "does not answer",
    )


def _probe(cluster: connection.Connection, service: str, port: int) -> tuple[int, str]:
    """Return a Service's HTTP status, and why there is none: from a pod by its name, else through the API server."""
    if cluster.context == connection.IN_CLUSTER:
        try:
            return send_request(
                "GET", f"http://{service}.{cluster.namespace}:{port}/health", timeout_s=10
            )[0], ""
        except Unanswered as error:
            return 0, str(error)
    proxy = cluster.core.connect_get_namespaced_service_proxy_with_path
    try:
        proxy(f"{service}:{port}", cluster.namespace, "health", _request_timeout=30)
        return 200, ""
    except (connection.ApiRefusal, Unavailable) as error:
        answer: Any = error.__cause__
        if answer.status == 403:
            raise
        return (
            (0, connection.read_api_message(answer)) if _of_the_api(answer) else (answer.status, "")
        )


def _of_the_api(error: Any) -> bool:
    """Return whether the API server answered itself, because it did not reach the Service."""
    try:
        status = json.loads(error.body)
        return bool(status["kind"] == "Status" and status["details"]["kind"] == "services")
    except (TypeError, ValueError, KeyError):
        return False


def own_graph(
    cluster: connection.Connection, graph: Object, workflow: str, tell: Callable[[str], object]
) -> None:
    """Make the workflow the owner of the graph, if it was made for that run, so that both are deleted together."""
    name = str(graph["metadata"]["name"])
    owner = cluster.get(*connection.WORKFLOWS, workflow)
    run = owner["metadata"].get("labels", {}).get(RUN_LABEL)
    reference = {
        **connection.OWNER,
        "name": workflow,
        "uid": owner["metadata"]["uid"],
        "controller": False,
    }
    while True:
        if (live := find_graph(cluster, name)) is None:
            raise Retryable(f"{name}: was deleted while its run was started")
        if run is None or live["metadata"].get("labels", {}).get(RUN_LABEL) != run:
            tell(f"{name}: was not made for this run, and stays when it ends")
            return
        others = [
            o for o in live["metadata"].get("ownerReferences", ()) if o["uid"] != reference["uid"]
        ]
        patch = {
            "resourceVersion": live["metadata"]["resourceVersion"],
            "ownerReferences": [*others, reference],
        }
        place = (GROUP, find_api_version(cluster), cluster.namespace, PLURAL, name)
        with connection.ignore_refusals(
            409
        ):  # the object was changed meanwhile, as by the operator
            cluster.custom.patch_namespaced_custom_object(*place, {"metadata": patch})
            return


def list_graphs(cluster: connection.Connection, run: str) -> list[JsonObject]:
    """List the graphs that were made for a run; none where Dynamo's definitions are not installed."""
    for version in VERSIONS:
        with connection.ignore_refusals(404):
            return cluster.list(GROUP, version, PLURAL, f"{RUN_LABEL}={run}")
    return []


def delete_graph(cluster: connection.Connection, name: str) -> bool:
    """Delete a graph, and with it the objects that its operator created; return whether it existed."""
    return cluster.delete(
        GROUP, find_api_version(cluster), PLURAL, name, propagation_policy="Background"
    )
