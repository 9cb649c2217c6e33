"""The API server in plain JSON, for `scale.py`: objects of the client library take too long to make."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlencode

from kubernetes.client import ApiException
from kubernetes.watch.watch import iter_resp_lines
from urllib3.exceptions import HTTPError

from tuneloop.kube.connection import Connection

JSON = "application/json"
Object = Mapping[str, Any]


class Api:
    """The API server in plain JSON."""

    def __init__(self, cluster: Connection) -> None:
        self.client, self.namespace, self.stopped = (
            cluster.core.api_client,
            cluster.namespace,
            False,
        )
        self.refused = 0

    def path(self, group: str, plural: str, name: str = "") -> str:
        root = f"/apis/{group}" if "/" in group else f"/api/{group}"
        return f"{root}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def send(
        self, method: str, path: str, body: Any = None, accept: str = JSON, **query: Any
    ) -> Any:
        """Return urllib3's response, unread; a PATCH is a merge patch."""
        kind = "application/merge-patch+json" if method == "PATCH" else JSON
        headers = {"Accept": accept, "Content-Type": kind}
        self.client.update_params_for_auth(headers, [], ["BearerToken"])
        response = self.client.rest_client.pool_manager.request(
            *(method, f"{self.client.configuration.host}{path}?{urlencode(query)}"),
            body=json.dumps(body) if body else None,
            headers=headers,
            preload_content=False,
        )
        if response.status >= 400:
            raise ApiException(response.status, f"{method} {path}: {response.data.decode()[:300]}")
        return response

    def write(self, method: str, path: str, body: Any = None, **query: Any) -> None:
        """Send, five times where the server or a webhook is too busy."""
        for left in range(4, -1, -1):
            try:
                self.send(method, path, body, **query).read()
                return
            except ApiException as error:
                busy = (
                    error.status >= 500
                    or error.status == 429
                    or (error.status == 409 and method == "PATCH")
                )
                if left == 0 or not busy:
                    raise
            except HTTPError:
                if left == 0:
                    raise
            self.refused += 1
            time.sleep(1.0)

    def follow(self, path: str, see: Callable[[Object, bool], None], accept: str) -> None:
        """Call `see` with each object that is there, changes, or is gone, until `stopped`."""
        while not self.stopped:  # without a version the server begins with all that is there
            with contextlib.suppress(HTTPError):
                for line in iter_resp_lines(
                    self.send("GET", path, accept=accept, watch=1, timeoutSeconds=3000)
                ):
                    event = json.loads(line)
                    if self.stopped or event["type"] == "ERROR":
                        break
                    see(event["object"], event["type"] == "DELETED")
