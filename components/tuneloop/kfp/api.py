"""Kubeflow Pipelines' API v2beta1 (backend/api/v2beta1/run.proto) for tasks of a run, whose images
have no kfp.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

from tuneloop.core.errors import Interrupted, Retryable, Unavailable, UserError
from tuneloop.core.http import Unanswered, is_transient, send_request
from tuneloop.core.json_types import JsonMapping, JsonObject

DONE = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
"""States of a run or task that has ended. A run in any other state counts as active: it is not
submitted again (`client.py: submit_run`), and its schedule starts no other (`check_data.py`).

All states of KFP, with their words for people: `progress.py: PHASES`.
"""
COPIED_FIELDS = (
    "display_name",
    "description",
    "experiment_id",
    "pipeline_spec",
    "pipeline_version_reference",
    "runtime_config",
    "service_account",
)
"""Fields of a run's message that are copied to start another run like it: the next part of a long
loop (`RunApi.start_next_run`). A field that is not listed is lost in that next run.

The other fields of the message describe the progress of a run.
"""
TOKEN = Path("/var/run/secrets/kubeflow/pipelines/token")
"""Token file that PodDefaults mount into the pods of a backend with several users."""
REQUEST_TIMEOUT_S = 60.0
"""Seconds for one request of a task. The commands have their own: `client.py: TIMEOUT_S`."""
UNAVAILABLE_STATUSES = (429, 502, 503, 504)
"""Statuses that a proxy, or a server that starts, answers with for a while: a task waits for its
end."""


class NotThere(UserError):
    """The requested object does not exist in the API."""


class RunApi:
    """Reads and starts runs.

    Methods raise `Retryable` if the API does not answer, and `UserError` if it refuses.
    """

    def __init__(self, address: str) -> None:
        self._runs = f"{address.rstrip('/')}/apis/v2beta1/runs"

    def read_run(self, run_id: str) -> JsonObject:
        """Read a run's message (``v2beta1Run``). Raises NotThere if there is no such run."""
        return _call("GET", f"{self._runs}/{run_id}")

    def list_runs(self, experiment_id: str, name: str, *, part: bool = False) -> list[JsonObject]:
        """List the newest hundred runs of a name, newest first.

        Args:
            experiment_id: the experiment that the runs belong to.
            name: the display name of the runs.
            part: list all runs whose name contains `name` instead.
        """
        query = {
            "experiment_id": experiment_id,
            "filter": match_name(name, part=part),
            "sort_by": "created_at desc",
            "page_size": "100",
        }
        runs: list[JsonObject] = []
        while True:
            page = _call("GET", f"{self._runs}?{urlencode(query)}")
            runs += page.get("runs", [])
            if not part or not page.get("next_page_token"):
                return runs
            query["page_token"] = page["next_page_token"]

    def start_run(self, run: JsonMapping) -> str:
        """Start a run, a message ``Run``, and return its id."""
        return str(_call("POST", self._runs, run)["run_id"])

    def find_newer_run(self, run: JsonMapping, name: str) -> str | None:
        """Return the id of the newest run that was started after `run` to continue it; None if
        there is none.

        Only the newest hundred runs of the display name are looked at.

        Args:
            run: the message of the run that is continued.
            name: of that run in the store, which the run that continues it has as its parameter
                ``run``. Several runs of the UI may have one display name.
        """
        for candidate in self.list_runs(run["experiment_id"], run["display_name"]):
            if candidate["created_at"] <= run["created_at"]:
                return None
            parameters = candidate.get("runtime_config", {}).get("parameters", {})
            if parameters.get("run") == name:
                return str(candidate["run_id"])
        return None

    def start_next_run(self, run_id: str, name: str) -> str:
        """Start a run like `run_id`, which continues after the committed iterations.

        The new run has the parameters of the old one, which `pipeline.py: build_pipeline` declares;
        only ``run`` is set anew.

        Args:
            run_id: of the run that is continued.
            name: of that run in the store.

        Returns:
            The id of the run that continues this one.

        Raises:
            Interrupted: `run_id` is being stopped.
        """
        run = self.read_run(run_id)
        # An earlier attempt of this task may have started the next run already.
        newer_run_id = self.find_newer_run(run, name)
        if newer_run_id:
            return newer_run_id
        refuse_stopped_run(run)
        request = {key: run[key] for key in COPIED_FIELDS if key in run}
        config = dict(run.get("runtime_config", {}))
        # The name may have followed from the id of the first run.
        config["parameters"] = dict(config.get("parameters", {})) | {"run": name}
        request["runtime_config"] = config
        return self.start_run(request)


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


def _call(method: str, url: str, body: JsonMapping | None = None) -> JsonObject:
    headers: dict[str, str] = {}
    # The kubelet renews the token, so it is read for each request.
    if TOKEN.exists():
        headers["Authorization"] = f"Bearer {TOKEN.read_text().strip()}"
    return call_api("kfp.api", method, url, body, headers)


def call_api(
    field: str,
    method: str,
    url: str,
    body: JsonMapping | None = None,
    headers: Mapping[str, str] | None = None,
) -> JsonObject:
    """Send a request and return the JSON of the answer; for KFP's API, and for the model registry
    (`register.py`).

    Args:
        field: the setting that names the address, for messages.
        method: GET or POST.
        url: the address with its query.
        body: what is sent as JSON.
        headers: such as a token.

    Raises:
        Unavailable: there is no answer, or its status is 429, 502, 503 or 504.
        Retryable: any other status that may pass (`core.http.is_transient`), as of the commands in
            `client.py: translate_api_errors`.
        NotThere: the status is 404.
        UserError: any other refusal, or an answer that is not JSON.
    """
    try:
        status, answer = send_request(
            method, url, timeout_s=REQUEST_TIMEOUT_S, body=body, headers=headers
        )
    except Unanswered as error:
        raise Unavailable(f"{field}: {url}: {error}") from error
    excerpt = answer[:200].decode(errors="replace")
    if status in UNAVAILABLE_STATUSES:
        raise Unavailable(f"{field}: {url}: {status}: {excerpt}")
    if is_transient(status):
        raise Retryable(f"{field}: {url}: {status}: {excerpt}")
    if status >= 300:
        error_class = NotThere if status == 404 else UserError
        remedy = f"refused ({status}): {excerpt}; {field} names the address as pods reach it"
        raise error_class(field, url, remedy)
    try:
        message: JsonObject = json.loads(answer)
    except ValueError:
        remedy = f"does not answer with JSON: {excerpt}; {field} names the API, not its UI"
        raise UserError(field, url, remedy) from None
    return message
