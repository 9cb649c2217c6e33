"""As much of an API server as keeps Argo's objects, RayJobs, JobSets, Dynamo's graphs and Kueue's Workloads. Nobody
works on them; others are not for this account to see."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tuneloop.cluster.watch import NODE_NAME
from tuneloop.kube.connection import Connection, build_connection

GROUPS = r"argoproj\.io/v1alpha1|ray\.io/v1|jobset\.x-k8s\.io/v1alpha2|nvidia\.com/v1beta1|"
GROUPS += r"kueue\.x-k8s\.io/v1beta2(?=/namespaces/[^/]+/workloads)"
PLACE = re.compile(rf"/apis/({GROUPS})/namespaces/[^/]+/(?P<plural>[^/]+)(/(?P<name>[^/]+))?$")


class Answering(BaseHTTPRequestHandler):
    """Answers as an API server does."""

    def _answer(self, status: int, body: Any) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *about: object) -> None:
        """Nothing is said."""


class Api(ThreadingHTTPServer):
    """A namespace.

    Attributes:
        objects: (plural, name) → object, in the order they were created.
        becomes: status of a workflow that is created.
        refuses: plurals of what nobody may create.
        unseen: plurals of what nobody may read.
        written: so many replacements yet are refused, as by another's who was faster.
        pods: of the namespace.
        logs: pod → what it wrote.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Objects)
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.becomes: dict[str, Any] = {}
        self.refuses: set[str] = set()
        self.unseen: set[str] = set()
        self.written = 0
        self.pods: list[dict[str, Any]] = []
        self.logs: dict[str, str] = {}

    def add_pod(self, node: str, at: str, log: str) -> None:
        """One that has ended."""
        name = node.replace(".", "-")
        about = {
            "name": name,
            "uid": name,
            "creationTimestamp": at,
            "annotations": {NODE_NAME: node},
        }
        ended = {"name": "main", "image": "", "imageID": "", "ready": False, "restartCount": 0}
        ended["state"] = {"terminated": {"exitCode": 2}}
        self.pods.append(
            {"metadata": about, "status": {"phase": "Failed", "containerStatuses": [ended]}}
        )
        self.logs[name] = log


def hold_pod(pod: dict[str, Any]) -> dict[str, Any]:
    """Return a pod as Kueue's webhook changes it: it waits."""
    pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    return pod


def _has(item: dict[str, Any], selector: str) -> bool:
    """Whether an object has the label that one part of a selector names: ``a=b``, ``a!=b``, ``a`` or ``!a``."""
    labels, (key, equals, value) = item["metadata"].get("labels") or {}, selector.partition("=")
    if key.endswith("!"):
        return labels.get(key[:-1]) != value
    return (
        labels.get(key) == value if equals else (key.lstrip("!") in labels) != key.startswith("!")
    )


class Objects(Answering):
    server: Api

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        match = PLACE.match(url.path)
        if url.path.endswith("/pods"):
            phase = parse_qs(url.query).get("fieldSelector", [""])[0].partition("=")[2]
            pods = [pod for pod in self.server.pods if phase in ("", pod["status"]["phase"])]
            wanted = parse_qs(url.query).get("labelSelector", [""])[0]
            if wanted.startswith("ray.io/"):  # else they are all of the run that is asked for
                pods = [pod for pod in pods if _has(pod, wanted)]
            return self._answer(
                200, {"apiVersion": "v1", "kind": "PodList", "items": pods, "metadata": {}}
            )
        if url.path.endswith("/log"):
            return self._answer(200, self.server.logs[url.path.split("/")[-2]])
        if url.path.startswith("/apis/kueue.x-k8s.io/") and url.path.count("/") == 3:
            return self._answer(200, {"groupVersion": url.path[6:], "resources": []})
        if url.path.endswith(("/limitranges", "/resourcequotas")):
            return self._answer(200, {"items": [], "metadata": {}})
        if match is None:
            return self._answer(
                200 if "/api/v1/namespaces/" in url.path else 403, {"message": "forbidden"}
            )
        if match["plural"] in self.server.unseen:
            words = f'cannot list resource "{match["plural"]}" in API group ""'
            return self._answer(403, {"message": words})
        if match["name"]:
            found = self.server.objects.get((match["plural"], match["name"]))
            return self._answer(200 if found else 404, found or {"message": "not found"})
        wanted = parse_qs(url.query).get("labelSelector", [""])[0]
        own = [
            each for (plural, _), each in self.server.objects.items() if plural == match["plural"]
        ]
        mine = [each for each in own if all(_has(each, part) for part in wanted.split(",") if part)]
        self._answer(200, {"items": mine, "metadata": {}})

    def do_POST(self) -> None:
        body = self._body()
        if urlsplit(self.path).path.endswith("/pods"):
            return self._answer(201, hold_pod(body))
        match = PLACE.match(self.path)
        if match is None and not self.path.endswith("/secrets"):
            asked = body.get("spec", {}).get("resourceAttributes", {}).get("resource")
            return self._answer(
                201, {"spec": {}, "status": {"allowed": asked not in self.server.refuses}}
            )
        place = match["plural"] if match else "secrets", body["metadata"]["name"]
        if place[0] in self.server.refuses:
            return self._answer(403, {"message": "forbidden"})
        if place in self.server.objects:
            return self._answer(409, {"message": "already exists"})
        self._answer(201, self._keep(place, {**body, "status": self.server.becomes}))

    def do_PUT(self) -> None:
        match = PLACE.match(self.path)
        assert match
        body = self._body()
        if self.server.written:
            self.server.written -= 1
            return self._answer(409, {"message": "the object has been modified"})
        self._answer(200, self._keep((match["plural"], match["name"]), body))

    def do_PATCH(self) -> None:
        match, body = PLACE.match(self.path), self._body()
        assert match
        found = self.server.objects[match["plural"], match["name"]]
        found["metadata"].update(body.get("metadata", {}))
        if body.get("spec", {}).get(
            "shutdown"
        ):  # without an exit handler, as where it is terminated
            found["status"] = {"phase": "Failed"}
        self._answer(200, found)

    def do_DELETE(self) -> None:
        path = urlsplit(self.path).path
        if "/pods/" in path:
            kept = [
                pod
                for pod in self.server.pods
                if pod["metadata"]["name"] != path.rpartition("/")[2]
            ]
            self.server.pods, gone = kept, len(kept) < len(self.server.pods)
            return self._answer(200 if gone else 404, {})
        match = PLACE.match(path)
        found = self.server.objects.pop((match["plural"], match["name"]), None) if match else None
        self._answer(200 if found else 404, {})

    def _body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def _keep(self, place: tuple[str, str], body: dict[str, Any]) -> dict[str, Any]:
        at = f"2026-01-01T00:0{len(self.server.objects)}:00Z"
        body["metadata"] = {
            "creationTimestamp": at,
            "uid": f"uid-{place[1]}",
            **body["metadata"],
            "resourceVersion": "1",
        }
        self.server.objects[place] = body
        return body


def connected(url: str, context: str = "test") -> Connection:
    from kubernetes import client

    settings = client.Configuration(host=url)
    settings.retries = 0
    return build_connection(settings, "tuneloop", context)


def kubeconfig(url: str, directory: Path) -> str:
    """Path of a file that names the API server at `url`."""
    at = {"cluster": {"server": url}, "name": "c"}
    contexts = [{"name": "c", "context": {"cluster": "c", "user": "u"}}]
    config = {
        "current-context": "c",
        "clusters": [at],
        "contexts": contexts,
        "users": [{"name": "u", "user": {}}],
    }
    (directory / "config").write_text(json.dumps(config))
    return str(directory / "config")


@contextmanager
def serving() -> Iterator[tuple[Api, Connection]]:
    with Api() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server, connected(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


class Cluster(ThreadingHTTPServer):
    """A whole API server that is only read.

    Attributes:
        objects: path → object, or list of objects; others do not exist.
        denied: path → resource that the account may not get or list there.
        holds_pods: whether Kueue's webhook makes queued pods wait.
        created: the objects that were sent, none of which is kept.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Reading)
        self.objects: dict[str, Any] = {}
        self.denied: dict[str, str] = {}
        self.holds_pods = True
        self.created: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Reading(Answering):
    server: Cluster

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if resource := self.server.denied.get(path):
            verb = "list" if path.endswith(resource) else "get"
            words = f'User "somebody" cannot {verb} resource "{resource}" in API group "" at the cluster scope'
            return self._answer(403, {"message": f"{resource} is forbidden: {words}"})
        found = self.server.objects.get(path)
        if isinstance(found, list):
            selector = parse_qs(urlsplit(self.path).query).get("labelSelector", [""])[0]
            parts = [part for part in selector.split(",") if part]
            items = [item for item in found if all(_has(item, part) for part in parts)]
            return self._answer(200, {"items": items, "metadata": {}})
        self._answer(200 if found else 404, found or {"message": "not found"})

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not url.path.endswith("/pods"):
            # A question about a right.
            return self._answer(201, {"spec": {}, "status": {"allowed": True}})
        if url.path in self.server.denied:
            words = 'User "somebody" cannot create resource "pods" in API group "" in the namespace'
            return self._answer(403, {"message": f"pods is forbidden: {words}"})
        assert parse_qs(url.query)["dryRun"] == ["All"]
        self.server.created.append(body)
        self._answer(201, hold_pod(body) if self.server.holds_pods else body)


@contextmanager
def serve_cluster() -> Iterator[Cluster]:
    with Cluster() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
