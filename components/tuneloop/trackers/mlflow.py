"""MLflow: one run, found again by its tag. ``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME`` are honoured."""

import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tuneloop import trackers
from tuneloop.core.artifacts import Manifest, split_ref
from tuneloop.core.errors import print_diagnostic

ANSWERS = 3.0
"""Seconds within which a server answers at all."""
REF = "tuneloop.artifact"
"""Tag: the reference of a dataset or a model."""


class Tracker(trackers.Tracker):
    """A tracking server, or a database; which takes a value of a metric once: of the same step, time and value."""

    def __init__(self, address: str) -> None:
        self.uri = address or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        self.address = re.sub(
            r"(?<=://)[^/]*@", "", self.uri
        )  # for people: without user and password

    def find_trouble(self) -> str:
        """Ask whether the server is there, where MLflow's client would try again for minutes."""
        import httpx2

        why = ["timed out"]

        def ask() -> None:
            try:  # through a proxy, as MLflow does, which may also have been told to trust any certificate
                status = httpx2.get(
                    f"{self.address.rstrip('/')}/health", timeout=ANSWERS, verify=False
                ).status_code
                why.append(
                    f"status {status}" if status in (502, 503, 504) else ""
                )  # which a proxy says of who is away
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                why.append(str(error))

        if self.address.startswith(("http://", "https://")):
            asking = threading.Thread(target=ask, daemon=True)
            asking.start()
            asking.join(ANSWERS)  # looking up a name has no timeout of its own
            return why[-1] and f"{self.address} does not answer ({why[-1]})"
        return ""

    def open_run(
        self, key: str, name: str, pipeline: str, settings: Mapping[str, Any], started: float
    ) -> None:
        """Find or make the run, with its settings as parameters; those that are there already stay."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client = MlflowClient(tracking_uri=self.uri)
        self.experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or pipeline
        made = self.client.get_experiment_by_name(self.experiment)
        at = str(made.experiment_id if made else self.client.create_experiment(self.experiment))
        found = list(self.client.search_runs([at], f"tags.tuneloop_key = '{key}'", max_results=1))
        tags = {"tuneloop_key": key, "tuneloop.run": name}
        self.run = (
            found[0] if found else self.client.create_run(at, int(started * 1000), tags, name)
        )
        self.id = self.run.info.run_id
        self.client.update_run(self.id, status="RUNNING")  # a resumed run goes on in the same one
        flat = [
            Param(k, str(v)[:6000]) for k, v in settings.items() if k not in self.run.data.params
        ]
        for start in range(0, len(flat), 100):
            self.client.log_batch(self.id, params=flat[start : start + 100])

    def log_rows(self, rows: trackers.Rows) -> None:
        """Log values as metrics, and each table as a file ``samples/<stage>-<step>.json``."""
        from mlflow.entities import Metric

        each = [
            (name, v, int(at * 1000), step)
            for (_, step, at), row in rows.items()
            for name, v in row.items()
        ]
        values = [Metric(*one) for one in each if isinstance(one[1], float)]
        for start in range(0, len(values), 1000):
            self.client.log_batch(self.id, metrics=values[start : start + 1000])
        for file, table in (
            (f"{name}-{step:06}.json", v) for name, v, _, step in each if isinstance(v, list)
        ):
            with _go_on_without(file):
                if file not in {f.path for f in self.client.list_artifacts(self.id, "samples")}:
                    self.client.log_table(
                        self.id, {k: [row[k] for row in table] for k in table[0]}, file
                    )

    def log_artifact(self, ref: str, made: Manifest) -> None:
        """Log prompts as a dataset, and a model as one that is also registered. Their files stay where they are."""
        place, log = (
            f"{split_ref(ref)[0]}/{made.root}",
            self._log_data if made.kind == "prompts" else self._log_model,
        )
        with _go_on_without(ref):
            log(made, place, {REF: ref, "tuneloop.run": str(self.run.info.run_name)})

    def _log_data(self, made: Manifest, place: str, tags: dict[str, str]) -> None:
        """Log a dataset as an input of the run; MLflow takes the same one once, and of a digest 36 characters."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        kind = place.partition(":")[0].replace("file", "local")  # as MLflow calls it
        source, profile = json.dumps({"uri": place}), json.dumps(made.facts)
        data = Dataset(
            made.place, made.digest.partition(":")[2][:36], kind, source, profile=profile
        )
        listed = [InputTag(*each) for each in {"mlflow.data.context": "training", **tags}.items()]
        self.client.log_inputs(self.id, [DatasetInput(data, listed)])

    def _log_model(self, made: Manifest, place: str, tags: dict[str, str]) -> None:
        """Log a model as an output of the run, and register it under the experiment's name."""
        from mlflow.entities import LoggedModelOutput
        from mlflow.exceptions import MlflowException

        said = {"version": made.facts.get("version"), "policy": made.inputs.get("policy")}
        tags |= {f"tuneloop.{name}": str(each) for name, each in said.items() if each is not None}
        at, same = (
            [self.run.info.experiment_id],
            f"tags.`{REF}` = '{tags[REF]}' AND source_run_id = '{self.id}'",
        )
        known = self.client.search_logged_models(at, same, max_results=1)
        model = (
            known[0] if known else self.client.create_logged_model(*at, made.place, self.id, tags)
        )
        self.client.finalize_logged_model(model.model_id, "READY")
        outputs = self.client.get_run(self.id).outputs
        if not outputs or model.model_id not in {each.model_id for each in outputs.model_outputs}:
            self.client.log_outputs(self.id, [LoggedModelOutput(model.model_id, 0)])
        name = re.sub("[/:]", "-", self.experiment)
        try:
            self.client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        versions = self.client.search_model_versions(f"name = '{name}' AND run_id = '{self.id}'")
        if tags[REF] not in {each.tags.get(REF) for each in versions}:
            self.client.create_model_version(name, place, self.id, tags, model_id=model.model_id)

    def log_report(self, page: str) -> None:
        """Attach the report as the run's artifact ``report.html``."""
        with _go_on_without("report.html"):
            self.client.log_text(self.id, page, "report.html")

    def close_run(self, phase: str, ended: float, notes: str) -> str:
        self.client.set_tag(self.id, "mlflow.note.content", notes)
        if phase != "running":
            status = {"failed": "FAILED", "interrupted": "KILLED"}.get(phase, "FINISHED")
            self.client.set_terminated(self.id, status, int(ended * 1000))
        return f"{self.address}, experiment {self.experiment}, run {self.run.info.run_name}"


@contextmanager
def _go_on_without(what: str) -> Iterator[None]:
    """Say what a server does not take, be it for want of a place for files, or a registry; the curves are there."""
    try:
        yield
    except Exception as error:
        print_diagnostic(f"mlflow: {what}: {error}", 0)
