"""Change what this process's own pod requests while it runs: ``pods/resize``, of Kubernetes 1.33.

It does without Kubernetes' client library, which images that sample do not have. The token names
the pod that it is bound to.

`inference/server.py` starts it with the flag ``--asleep`` that `argo/resize.py` renders, where the
policy and the volume with the token are described. Tests: `tests/unit/inference/test_resize.py`,
and `tests/cluster/test_resize.py` on a cluster.
"""

import base64
import json
import os
import queue
import ssl
import threading
import time
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path

from tuneloop.core.errors import Unavailable, print_diagnostic
from tuneloop.core.http import Unanswered, is_transient, send_request
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kube.connection import IN_CLUSTER, ApiRefusal, read_api_message

ACCOUNT_FILES = "/run/tuneloop/account"
"""The folder with the token and API certificate of a pod that resizes itself, where
`argo/resize.py` mounts them; in any other pod it is missing."""
CONTAINER = "main"
"""The container whose requests change: Argo calls a template's container so."""
PAUSE_S = 0.25
"""Seconds before the first check whether the kubelet has resized; pauses double up to 5 seconds. A
request that the API server could not take is repeated after 20 times as long."""


class PodResizer(threading.Thread):
    """Makes this pod request `asleep` while its server sleeps, and its original requests otherwise.

    `change_phase` returns at once; `inference/engine_loop.py` calls it. A refusal is printed, and
    the server continues: its limits never change. Each resource of `asleep` has to be among the
    pod's original requests.
    """

    def __init__(self, asleep: Mapping[str, str]) -> None:
        super().__init__(name="resize", daemon=True)
        self._asleep = asleep
        self._files = Path(ACCOUNT_FILES)
        self._printed: set[str] = set()
        self._phases: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._newest = False

    def change_phase(self, asleep: bool) -> None:
        """Request the resources of the phase that begins, unless they were requested last."""
        if asleep != self._newest:
            self._newest = asleep
            self._phases.put(asleep)

    def run(self) -> None:
        """Resize the pod at each change of the phase; never returns where the pod has a token."""
        if not (self._files / "token").exists():
            self._print_once(
                f"its requests do not change while it sleeps: there is no token at {self._files}"
            )
            return
        awake: dict[str, str] = {}
        is_asleep = False
        while True:
            asleep = self._phases.get()
            # Only the newest phase counts.
            if asleep == is_asleep or not self._phases.empty():
                continue
            try:
                if not awake:
                    pod = self._patch({})
                    original = _read_requests(pod["spec"]["containers"])
                    awake = {name: original[name] for name in self._asleep}
                if asleep:
                    self._resize(self._asleep, "while it sleeps")
                else:
                    self._resize(awake, "awake")
                is_asleep = asleep
            except ApiRefusal as refusal:
                self._print_once(
                    f"its pod's requests do not change: {refusal}; the server continues"
                )

    def _resize(self, requests: Mapping[str, str], phase: str) -> None:
        """Request resources, and wait until the kubelet has granted or refused them."""
        start = time.monotonic()
        amounts = ", ".join(f"{name} {amount}" for name, amount in requests.items())
        pause = PAUSE_S
        pod = self._patch(requests)
        while not _is_resized(pod):
            for condition in pod["status"].get("conditions", ()):
                # The kubelet goes on trying if the request is deferred.
                if condition["type"] == "PodResizePending":
                    reason = f"{condition.get('reason')}: {condition.get('message')}"
                    self._print_once(
                        f"its pod cannot request {amounts} {phase} ({reason}); the server continues"
                    )
                    return
            time.sleep(pause)
            pause = min(2 * pause, 5.0)
            # The phase has changed meanwhile.
            if not self._phases.empty():
                return
            pod = self._patch({})
        seconds = time.monotonic() - start
        print_diagnostic(f"serve: its pod requests {amounts} {phase}, after {seconds:.1f} s", 0)

    def _patch(self, requests: Mapping[str, str]) -> JsonObject:
        """Change requests of this pod's container, and return the pod, also for no requests.

        Raises:
            ApiRefusal: the API server refuses them.
        """
        # A strategic merge finds the container by its name, and leaves the others.
        container = {
            "name": CONTAINER,
            "resources": {"requests": requests},
        }
        while True:
            try:
                return self._send({"containers": [container]})
            except Unavailable as error:
                self._print_once(f"its pod's requests do not change for now: {error}; it retries")
                time.sleep(20 * PAUSE_S)

    def _send(self, spec: JsonMapping) -> JsonObject:
        """Patch the pod, and return it. Raises ApiRefusal, Unavailable."""
        # The kubelet renews the token in its file.
        token = (self._files / "token").read_text()
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=="))["kubernetes.io"]
        host = os.environ["KUBERNETES_SERVICE_HOST"]
        port = os.environ["KUBERNETES_SERVICE_PORT"]
        address = f"[{host}]" if ":" in host else host
        url = (
            f"https://{address}:{port}/api/v1"
            f"/namespaces/{claims['namespace']}/pods/{claims['pod']['name']}/resize"
        )
        try:
            status, text = send_request(
                "PATCH",
                url,
                body={"spec": spec},
                timeout_s=30,
                trusted=ssl.create_default_context(cafile=self._files / "ca.crt"),
                headers={
                    "Authorization": f"Bearer {token}",
                    "Content-Type": "application/strategic-merge-patch+json",
                },
            )
        except Unanswered as error:
            raise Unavailable(f"cluster: {host} does not answer ({error})") from error
        if status == 200:
            pod: JsonObject = json.loads(text)
            return pod
        message = read_api_message(Namespace(body=text, reason=f"status {status}"))
        # 409: another client has changed the pod meanwhile.
        if is_transient(status) or status == 409:
            raise Unavailable(f"cluster: {host}: {message}")
        raise ApiRefusal(IN_CLUSTER, status, message)

    def _print_once(self, line: str) -> None:
        """Print a line that was not printed before."""
        if line not in self._printed:
            self._printed.add(line)
            print_diagnostic(f"serve: {line}", 0)


def _is_resized(pod: JsonMapping) -> bool:
    """Return whether the container has what its pod requests."""
    granted = _read_requests(pod["status"]["containerStatuses"])
    return granted == _read_requests(pod["spec"]["containers"])


def _read_requests(containers: Iterable[JsonMapping]) -> dict[str, str]:
    """Read what the container requests, from its spec or its status."""
    for container in containers:
        if container["name"] == CONTAINER:
            resources = container.get("resources") or {}
            return resources.get("requests") or {}
    return {}
