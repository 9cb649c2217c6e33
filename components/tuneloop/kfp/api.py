"""Kubeflow Pipelines' API v2beta1 (backend/api/v2beta1/run.proto) for tasks of a run, whose images have no kfp."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tuneloop.core.errors import Interrupted, Retryable, Unavailable, UserError
from tuneloop.core.http import Unanswered, send_request
from tuneloop.core.json_types import JsonMapping, JsonObject

DONE = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
"""States of a run that has ended."""
KEPT = (
    "display_name",
    "description",
    "experiment_id",
    "pipeline_spec",
    "pipeline_version_reference",
    "runtime_config",
    "service_account",
)
"""Fields of a run's message that are copied to start another run like it; the others describe its progress."""
TOKEN = Path("/var/run/secrets/kubeflow/pipelines/token")
"""Token file that PodDefaults mount into the pods of a backend with several users."""


class NotThere(UserError):
    """The requested object does not exist in the API."""


class RunApi:
    """Reads and starts runs. Methods raise `Retryable` if the API does not answer, `UserError` if it refuses."""

    def __init__(self, address: str) -> None:
        self._runs = f"{address.rstrip('/')}/apis/v2beta1/runs"

    def read_run(self, run_id: str) -> JsonObject:
        """Read a run's message (``v2beta1Run``). Raises NotThere where there is no such run."""
        return _call("GET", f"{self._runs}/{run_id}")

    def list_runs(self, experiment_id: str, name: str, *, part: bool = False) -> list[JsonObject]:
        """List the newest hundred runs of a name, newest first; with `part`, all runs whose name contains it."""
        query = {"experiment_id": experiment_id, "filter": match_name(name, part=part)}
        query |= {"sort_by": "created_at desc", "page_size": "100"}
        listed: list[JsonObject] = []
        while True:
            page = _call("GET", f"{self._runs}?{urlencode(query)}")
            listed += page.get("runs", [])
            if not part or not page.get("next_page_token"):
                return listed
            query["page_token"] = page["next_page_token"]

    def start_run(self, run: JsonMapping) -> str:
        """Start a run, a message ``Run``, and return its id."""
        return str(_call("POST", self._runs, run)["run_id"])

    def find_newer_run(self, run: JsonMapping) -> str | None:
        """Return the id of the newest run with the name of `run`, if it was started after it."""
        newest = self.list_runs(run["experiment_id"], run["display_name"])[0]
        return str(newest["run_id"]) if newest["created_at"] > run["created_at"] else None

    def start_next_run(self, run_id: str) -> str:
        """Start a run like `run_id`, which continues after the committed iterations, and return its id; if a retried
        task finds a newer run, return that run's id. Raises Interrupted if `run_id` is being stopped."""
        own = self.read_run(run_id)
        if newer := self.find_newer_run(own):
            return newer
        refuse_stopped_run(own)
        return self.start_run({name: own[name] for name in KEPT if name in own})


def match_name(name: str, *, part: bool = False) -> str:
    """Return the API's filter for a name, or for names that contain it."""
    predicate = {
        "operation": "IS_SUBSTRING" if part else "EQUALS",
        "key": "display_name",
        "stringValue": name,
    }
    return json.dumps({"predicates": [predicate]})


def refuse_stopped_run(run: JsonMapping) -> None:
    """Raise Interrupted if a run is being stopped, so that no run follows it."""
    if run.get("state") in ("CANCELING", "CANCELED"):
        raise Interrupted(f"run {run['run_id']} is being stopped: no run continues it")


def _call(method: str, url: str, body: Any = None) -> JsonObject:
    headers = {"Authorization": f"Bearer {TOKEN.read_text().strip()}"} if TOKEN.exists() else None
    return call_api("kfp.api", method, url, body, headers)


def call_api(
    field: str, method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> JsonObject:
    """Send a request and return the JSON of the answer; `field` is the setting that names the address. Raises
    Unavailable without an answer and at status 429, 502, 503 and 504, Retryable at 500, NotThere at 404, and UserError
    at any other refusal and at an answer that is not JSON."""
    try:
        status, answer = send_request(method, url, timeout_s=60.0, body=body, headers=headers)
    except Unanswered as error:
        raise Unavailable(f"{field}: {url}: {error}") from error
    said = answer[:200].decode(errors="replace")
    if status in (429, 502, 503, 504):
        raise Unavailable(f"{field}: {url}: {status}: {said}")
    if status == 500:
        raise Retryable(f"{field}: {url}: {status}: {said}")
    if status >= 300:
        kind = NotThere if status == 404 else UserError
        raise kind(
            field, url, f"refused ({status}): {said}; {field} names the address as pods reach it"
        )
    try:
        read: JsonObject = json.loads(answer)
    except ValueError:
        raise UserError(
            field, url, f"does not answer with JSON: {said}; {field} names the API, not its UI"
        ) from None
    return read
