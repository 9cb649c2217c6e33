"""Change what this process's own pod requests while it runs: ``pods/resize``, of Kubernetes 1.33 and newer.

Without Kubernetes' client library, which images that sample do not have. The token names the pod it is bound to."""

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
"""The folder with the token and API certificate of a pod that resizes itself; it does not exist on one machine."""
CONTAINER = "main"
PAUSE_S = 0.25
"""Seconds before the first check whether the kubelet has resized the pod; pauses double up to 5 seconds."""


class PodResizer(threading.Thread):
    """Makes this pod request `asleep` while its server sleeps, and its original requests while the server is awake.
    `change_phase` returns at once. A refusal is printed, and the server continues: its limits never change."""

    def __init__(self, asleep: Mapping[str, str]) -> None:
        super().__init__(name="resize", daemon=True)
        self._asleep = asleep
        self._files = Path(ACCOUNT_FILES)
        self._said = set[str]()
        self._phases: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._newest = False

    def change_phase(self, asleep: bool) -> None:
        """Request the resources of the phase that begins, unless they were requested last."""
        if asleep != self._newest:
            self._newest = asleep
            self._phases.put(asleep)

    def run(self) -> None:
        if not (self._files / "token").exists():
            return self._say(
                f"its requests do not change while it sleeps: there is no token at {self._files}"
            )
        awake: dict[str, str] = {}
        now = False
        while True:
            asleep = self._phases.get()
            if asleep == now or not self._phases.empty():  # only the newest counts
                continue
            try:
                if not awake:
                    made_with = _read_requests(self._patch({})["spec"]["containers"])
                    awake = {name: made_with[name] for name in self._asleep}
                self._resize(
                    self._asleep if asleep else awake, "while it sleeps" if asleep else "awake"
                )
                now = asleep
            except ApiRefusal as refusal:
                self._say(f"its pod's requests do not change: {refusal}; the server continues")

    def _resize(self, requests: Mapping[str, str], when: str) -> None:
        begun = time.monotonic()
        wanted = ", ".join(f"{name} {amount}" for name, amount in requests.items()) + f" {when}"
        pod = self._patch(requests)
        pause = PAUSE_S
        while _read_requests(pod["status"]["containerStatuses"]) != _read_requests(
            pod["spec"]["containers"]
        ):
            for each in pod["status"].get("conditions", ()):
                if (
                    each["type"] == "PodResizePending"
                ):  # the kubelet goes on trying if it is Deferred
                    why = f"{each.get('reason')}: {each.get('message')}"
                    return self._say(
                        f"its pod cannot request {wanted} ({why}); the server continues"
                    )
            time.sleep(pause)
            pause = min(2 * pause, 5.0)
            if not self._phases.empty():
                return
            pod = self._patch({})
        print_diagnostic(
            f"serve: its pod requests {wanted}, after {time.monotonic() - begun:.1f} s", 0
        )

    def _patch(self, requests: Mapping[str, str]) -> JsonObject:
        """Change requests of this pod's container, and return the pod, also for none. Raises ApiRefusal."""
        while True:
            try:
                return self._send(
                    {"containers": [{"name": CONTAINER, "resources": {"requests": requests}}]}
                )
            except Unavailable as trouble:
                self._say(f"its pod's requests do not change for now: {trouble}; it retries")
                time.sleep(20 * PAUSE_S)

    def _send(self, spec: JsonMapping) -> JsonObject:
        token = (self._files / "token").read_text()  # the kubelet renews it
        of = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))["kubernetes.io"]
        host = os.environ["KUBERNETES_SERVICE_HOST"]
        port = os.environ["KUBERNETES_SERVICE_PORT"]
        url = f"https://{f'[{host}]' if ':' in host else host}:{port}/api/v1"
        url += f"/namespaces/{of['namespace']}/pods/{of['pod']['name']}/resize"
        how: JsonObject = {
            "timeout_s": 30,
            "trusted": ssl.create_default_context(cafile=self._files / "ca.crt"),
        }
        how["headers"] = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/strategic-merge-patch+json",
        }
        try:
            status, text = send_request("PATCH", url, body={"spec": spec}, **how)
        except Unanswered as error:
            raise Unavailable(f"cluster: {host} does not answer ({error})") from error
        if status == 200:
            return json.loads(text)  # type: ignore[no-any-return]
        message = read_api_message(Namespace(body=text, reason=f"status {status}"))
        if is_transient(status) or status == 409:
            raise Unavailable(f"cluster: {host}: {message}")
        raise ApiRefusal(IN_CLUSTER, status, message)

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            print_diagnostic(f"serve: {line}", 0)


def _read_requests(containers: Iterable[JsonMapping]) -> dict[str, str]:
    """Read what the container requests, from its spec or its status."""
    own = next((each for each in containers if each["name"] == CONTAINER), {})
    return (own.get("resources") or {}).get("requests") or {}
