"""A fleet behind a Kubernetes Service: ``service://name.namespace:port``, from its EndpointSlices.

The role tuneloop-user has the permission to list these, but a stage's pod has not, and uses `dns`. The id of a worker
is its pod's uid: a pod that replaces another under the same address is a new worker.
"""

from collections.abc import Iterator
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.inference.fleet import Fleet, Worker, parse_service_url
from tuneloop.kube.connection import connect_to_cluster

SLICES = ("discovery.k8s.io", "v1", "endpointslices")


class Service:
    """See the module. `port` is the pods' port; None: their only one. `context` is a context of the kubeconfig."""

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
            remedy = f"namespace {self.namespace} of {cluster.context} has no such Service with a selector"
            raise UserError("fleet", f"service://{self.name}.{self.namespace}", remedy)
        return list(
            {worker.id: worker for each in slices for worker in self._workers(each)}.values()
        )

    def _workers(self, each: dict[str, Any]) -> Iterator[Worker]:
        ports = sorted({p["port"] for p in each.get("ports") or ()})
        if self.port is None and len(ports) > 1:
            where = f"service://{self.name}.{self.namespace}"
            raise UserError(
                "fleet", where, f"has the ports {ports}; add the one of the workers' administration"
            )
        for endpoint in each.get("endpoints") or ():
            if endpoint.get("conditions", {}).get("ready") is not False:  # absent means ready
                address = endpoint["addresses"][0]
                host = f"[{address}]" if each["addressType"] == "IPv6" else address
                uid = endpoint.get("targetRef", {}).get("uid", address)
                yield Worker(uid, f"http://{host}:{self.port or ports[0]}")


def open_fleet(url: str) -> Fleet:
    return Service(*parse_service_url(url))
