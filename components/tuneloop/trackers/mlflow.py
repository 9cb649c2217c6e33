"""MLflow: one run, found again by its tag. ``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME`` are honoured."""

import os
import re
import threading
from collections.abc import Mapping
from typing import Any

from tuneloop import trackers
from tuneloop.core.errors import print_diagnostic

ANSWERS = 3.0
"""Seconds within which a server answers at all."""


class Tracker(trackers.Tracker):
    """A tracking server, or a database; which takes a value of a metric once: of the same step, time and value."""

    def __init__(self, address: str) -> None:
        self.uri = address or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        self.address = re.sub(r"(?<=://)[^/]*@", "", self.uri)  # for people: without user and password

    def find_trouble(self) -> str:
        """Ask whether the server is there, where MLflow's client would try again for minutes."""
        import httpx2

        why = ["timed out"]

        def ask() -> None:
            try:  # through a proxy, as MLflow does, which may also have been told to trust any certificate
                status = httpx2.get(f"{self.address.rstrip('/')}/health", timeout=ANSWERS, verify=False).status_code
                why.append(f"status {status}" if status in (502, 503, 504) else "")  # which a proxy says of who is away
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                why.append(str(error))

        if self.address.startswith(("http://", "https://")):
            asking = threading.Thread(target=ask, daemon=True)
            asking.start()
            asking.join(ANSWERS)  # looking up a name has no timeout of its own
            return why[-1] and f"{self.address} does not answer ({why[-1]})"
        return ""

    def open_run(self, key: str, name: str, pipeline: str, settings: Mapping[str, Any], started: float) -> None:
        """Find or make the run, with its settings as parameters; those that are there already stay."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client = MlflowClient(tracking_uri=self.uri)
        self.experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or pipeline
        made = self.client.get_experiment_by_name(self.experiment)
        at = str(made.experiment_id if made else self.client.create_experiment(self.experiment))
        found = list(self.client.search_runs([at], f"tags.tuneloop_key = '{key}'", max_results=1))
        tags = {"tuneloop_key": key, "tuneloop.run": name}
        self.run = found[0] if found else self.client.create_run(at, int(started * 1000), tags, name)
        self.id = self.run.info.run_id
        self.client.update_run(self.id, status="RUNNING")  # a resumed run goes on in the same one
        flat = [Param(k, str(v)[:6000]) for k, v in settings.items() if k not in self.run.data.params]
        for start in range(0, len(flat), 100):
            self.client.log_batch(self.id, params=flat[start : start + 100])

    def log_rows(self, rows: trackers.Rows) -> None:
        """Log values as metrics, and each table as a file ``samples/<stage>-<step>.json``."""
        from mlflow.entities import Metric

        each = [(name, v, int(at * 1000), step) for (_, step, at), row in rows.items() for name, v in row.items()]
        values = [Metric(*one) for one in each if isinstance(one[1], float)]
        for start in range(0, len(values), 1000):
            self.client.log_batch(self.id, metrics=values[start : start + 1000])
        for file, table in ((f"{name}-{step:06}.json", v) for name, v, _, step in each if isinstance(v, list)):
            try:
                if file not in {f.path for f in self.client.list_artifacts(self.id, "samples")}:
                    self.client.log_table(self.id, {k: [row[k] for row in table] for k in table[0]}, file)
            except Exception as error:  # of wherever the server keeps files; metrics go on without
                print_diagnostic(f"mlflow: {file}: {error}", 0)

    def close_run(self, phase: str, ended: float, notes: str) -> str:
        self.client.set_tag(self.id, "mlflow.note.content", notes)
        if phase != "running":
            status = {"failed": "FAILED", "interrupted": "KILLED"}.get(phase, "FINISHED")
            self.client.set_terminated(self.id, status, int(ended * 1000))
        return f"{self.address}, experiment {self.experiment}, run {self.run.info.run_name}"
