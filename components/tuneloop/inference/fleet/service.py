"""A fleet behind a Kubernetes Service: ``service://name.namespace:port``, from its EndpointSlices.

The role tuneloop-user may list these (``manifests/namespaced/accounts.yaml``), and so may the
autoscaler (``manifests/components/rollout-autoscaler``). A stage's pod may not, and finds its fleet
by DNS (`inference/fleet/dns.py`). The id of a worker is its pod's uid: a pod that replaces another
under the same address is a new worker.
"""

from collections.abc import Iterator

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.inference.fleet import Fleet, Worker, parse_service_url
from tuneloop.kube.connection import connect_to_cluster

SLICES = ("discovery.k8s.io", "v1", "endpointslices")


class Service:
    """A fleet that is listed by the Kubernetes API.

    `extensions/fleets/autoscaler.py` uses it, too.

    Attributes:
        port: of the pods; None: their only one.
        context: of the kubeconfig, which `extensions/fleets/fleet_commands.py` sets; None: its
            current one, or the cluster that this runs in.
    """

    endpoint = None

    def __init__(self, name: str, namespace: str, port: int | None) -> None:
        self.name = name
        self.namespace = namespace
        self.port = port
        self.context: str | None = None

    def discover(self) -> list[Worker]:
        cluster = connect_to_cluster(self.namespace, self.context)
        slices = cluster.list(*SLICES, selector=f"kubernetes.io/service-name={self.name}")
        if not slices:
            namespace = f"namespace {self.namespace} of {cluster.context}"
            remedy = f"{namespace} has no such Service with a selector"
            raise UserError("fleet", f"service://{self.name}.{self.namespace}", remedy)
        workers: dict[str, Worker] = {}
        for endpoint_slice in slices:
            # A pod may stand in two slices while Kubernetes moves it from one to the other.
            for worker in self._list_workers(endpoint_slice):
                workers[worker.id] = worker
        return list(workers.values())

    def _list_workers(self, endpoint_slice: JsonMapping) -> Iterator[Worker]:
        """Yield the workers of one EndpointSlice that are ready."""
        # Kubernetes writes null for an empty list.
        ports = sorted({port["port"] for port in endpoint_slice.get("ports") or ()})
        endpoints = endpoint_slice.get("endpoints") or ()
        if self.port is None and endpoints and len(ports) != 1:
            url = f"service://{self.name}.{self.namespace}"
            listed = f"the ports {ports}" if ports else "no port"
            remedy = f"has {listed}; add the one of the workers' administration"
            raise UserError("fleet", url, remedy)
        is_ipv6 = endpoint_slice["addressType"] == "IPv6"
        for endpoint in endpoints:
            # An absent condition means ready.
            if endpoint.get("conditions", {}).get("ready") is False:
                continue
            # The addresses of one endpoint are interchangeable.
            address = endpoint["addresses"][0]
            host = f"[{address}]" if is_ipv6 else address
            uid = endpoint.get("targetRef", {}).get("uid", address)
            port = self.port or ports[0]
            yield Worker(uid, f"http://{host}:{port}")


def open_fleet(url: str) -> Fleet:
    return Service(*parse_service_url(url))
