"""MLflow: one run, found again by its tag. ``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME``
are honoured.
"""

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

ANSWER_S = 3.0
"""Seconds within which a server has to answer before a run is opened (`Tracker.find_trouble`)."""
AWAY = (502, 503, 504)
"""The statuses by which a proxy answers for a server that is away."""
REFERENCE_TAG = "tuneloop.artifact"
"""Tag: the reference of a dataset or a model, by which it is found again. Renamed, models would be
registered a second time; the same holds for the tag ``tuneloop_key`` of runs.
"""
VALUE_LENGTH = 6000
"""The characters of a parameter's value that every MLflow takes."""
PARAMETER_BATCH = 100
METRIC_BATCH = 1000
"""The parameters, and the metrics, that MLflow takes in one request."""
DIGEST_LENGTH = 36
"""The characters of a dataset's digest that MLflow takes."""


class Tracker(trackers.Tracker):
    """A tracking server, or a database: ``mlflow+URI``.

    MLflow takes a value of a metric once: a second one of the same step, time and value changes
    nothing.
    """

    def __init__(self, address: str) -> None:
        self.uri = address or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        # What people are shown has neither user nor password.
        self.address = re.sub(r"(?<=://)[^/]*@", "", self.uri)

    def find_trouble(self) -> str:
        """Ask whether the server is there; MLflow's client would try again for minutes."""
        if not self.address.startswith(("http://", "https://")):
            return ""
        problems = ["timed out"]
        # To look up a name has no timeout of its own, so that it is done in a thread.
        request = threading.Thread(
            target=lambda: problems.append(self._request_health()),
            daemon=True,
        )
        request.start()
        request.join(ANSWER_S)
        problem = problems[-1]
        return f"{self.address} does not answer ({problem})" if problem else ""

    def _request_health(self) -> str:
        """Return why the server does not answer; empty if it does."""
        import httpx2

        url = f"{self.address.rstrip('/')}/health"
        try:
            # Through a proxy, as MLflow does, which may also have been told to trust any
            # certificate.
            response = httpx2.get(url, timeout=ANSWER_S, verify=False)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            return str(error)
        return f"status {response.status_code}" if response.status_code in AWAY else ""

    def open_run(
        self,
        key: str,
        name: str,
        pipeline: str,
        settings: Mapping[str, Any],
        started: float,
    ) -> None:
        """Find or make the run, with its settings as parameters; those that are there already
        stay.
        """
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client = MlflowClient(tracking_uri=self.uri)
        self.experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or pipeline
        experiment_id = self._find_experiment()
        # By the key, as a name may be that of another store's run.
        query = f"tags.tuneloop_key = '{key}'"
        runs = list(
            self.client.search_runs(
                [experiment_id],
                query,
                max_results=1,
            )
        )
        if runs:
            self.run = runs[0]
        else:
            tags = {"tuneloop_key": key, "tuneloop.run": name}
            self.run = self.client.create_run(
                experiment_id,
                int(started * 1000),
                tags,
                name,
            )
        self.id = self.run.info.run_id
        # A resumed run goes on in the same one, which may have ended.
        self.client.update_run(self.id, status="RUNNING")
        parameters = [
            Param(name, str(value)[:VALUE_LENGTH])
            for name, value in settings.items()
            if name not in self.run.data.params
        ]
        for start in range(0, len(parameters), PARAMETER_BATCH):
            batch = parameters[start : start + PARAMETER_BATCH]
            self.client.log_batch(self.id, params=batch)

    def _find_experiment(self) -> str:
        """Return the id of the experiment, which is made if there is none of its name."""
        experiment = self.client.get_experiment_by_name(self.experiment)
        if experiment:
            return str(experiment.experiment_id)
        return str(self.client.create_experiment(self.experiment))

    def log_rows(self, rows: trackers.Rows) -> None:
        """Log values as metrics, and each table as a file ``samples/<stage>-<step>.json``."""
        from mlflow.entities import Metric

        metrics: list[Metric] = []
        tables: dict[str, list[dict[str, Any]]] = {}
        for (_, step, at), row in rows.items():
            for name, value in row.items():
                # A value that is neither a table nor a float is passed over (`trackers.Rows`).
                if isinstance(value, list):
                    tables[f"{name}-{step:06}.json"] = value
                elif isinstance(value, float):
                    metrics.append(Metric(name, value, int(at * 1000), step))
        for start in range(0, len(metrics), METRIC_BATCH):
            batch = metrics[start : start + METRIC_BATCH]
            self.client.log_batch(self.id, metrics=batch)
        for file, table in tables.items():
            with _go_on_without(file):
                self._log_table(file, table)

    def _log_table(
        self,
        file: str,
        table: list[dict[str, Any]],
    ) -> None:
        """Log a table, unless it is there: MLflow would add its rows a second time."""
        existing = {artifact.path for artifact in self.client.list_artifacts(self.id, "samples")}
        if file not in existing:
            columns = {name: [row[name] for row in table] for name in table[0]}
            self.client.log_table(self.id, columns, file)

    def log_artifact(self, ref: str, manifest: Manifest) -> None:
        """Log prompts as a dataset, and a model as one that is also registered. Their files stay
        where they are.
        """
        source = f"{split_ref(ref)[0]}/{manifest.root}"
        tags = {REFERENCE_TAG: ref, "tuneloop.run": str(self.run.info.run_name)}
        with _go_on_without(ref):
            # `runs/mirroring.py: Mirror._find_artifacts` gives artifacts of the kinds prompts and
            # model, and the input `prompts` of any other.
            if manifest.kind == "prompts":
                self._log_data(manifest, source, tags)
            else:
                self._log_model(manifest, source, tags)

    def _log_data(
        self,
        manifest: Manifest,
        source: str,
        tags: dict[str, str],
    ) -> None:
        """Log a dataset as an input of the run; MLflow takes the same one once.

        Args:
            manifest: of the prompts.
            source: the URL of their files.
            tags: name → value.
        """
        from mlflow.entities import Dataset, DatasetInput, InputTag

        dataset = Dataset(
            name=manifest.place,
            digest=manifest.digest.partition(":")[2][:DIGEST_LENGTH],
            # MLflow's own name for a directory.
            source_type=source.partition(":")[0].replace("file", "local"),
            source=json.dumps({"uri": source}),
            profile=json.dumps(manifest.facts),
        )
        input_tags = [InputTag("mlflow.data.context", "training")]
        input_tags += [InputTag(name, value) for name, value in tags.items()]
        self.client.log_inputs(
            self.id,
            [DatasetInput(dataset, input_tags)],
        )

    def _log_model(
        self,
        manifest: Manifest,
        source: str,
        tags: dict[str, str],
    ) -> None:
        """Log a model as an output of the run, and register it under the experiment's name."""
        from mlflow.entities import LoggedModelOutput

        origin = {
            "version": manifest.version,
            "policy": manifest.inputs.get("policy"),
        }
        for name, value in origin.items():
            if value is not None:
                tags[f"tuneloop.{name}"] = str(value)
        model_id = self._find_model(manifest, tags)
        self.client.finalize_logged_model(model_id, "READY")
        # A model is an output of its run once, also if it is logged again.
        outputs = self.client.get_run(self.id).outputs
        logged = {output.model_id for output in outputs.model_outputs} if outputs else set()
        if model_id not in logged:
            self.client.log_outputs(self.id, [LoggedModelOutput(model_id, 0)])
        self._register_model(model_id, source, tags)

    def _find_model(self, manifest: Manifest, tags: dict[str, str]) -> str:
        """Return the id of a model in MLflow, which is made if the run has none of this
        reference.
        """
        experiment_id = self.run.info.experiment_id
        query = f"tags.`{REFERENCE_TAG}` = '{tags[REFERENCE_TAG]}' AND source_run_id = '{self.id}'"
        models = self.client.search_logged_models([experiment_id], query, max_results=1)
        if models:
            return str(models[0].model_id)
        model = self.client.create_logged_model(
            experiment_id,
            manifest.place,
            self.id,
            tags,
        )
        return str(model.model_id)

    def _register_model(
        self,
        model_id: str,
        source: str,
        tags: dict[str, str],
    ) -> None:
        """Register a model as the newest version under the experiment's name, once."""
        from mlflow.exceptions import MlflowException

        # A registered model's name may have neither of these.
        name = re.sub("[/:]", "-", self.experiment)
        try:
            self.client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        versions = self.client.search_model_versions(f"name = '{name}' AND run_id = '{self.id}'")
        registered = {version.tags.get(REFERENCE_TAG) for version in versions}
        if tags[REFERENCE_TAG] not in registered:
            self.client.create_model_version(name, source, self.id, tags, model_id=model_id)

    def log_report(self, page: str) -> None:
        """Attach the report as the run's artifact ``report.html``."""
        with _go_on_without("report.html"):
            self.client.log_text(self.id, page, "report.html")

    def close_run(self, phase: str, ended: float, notes: str) -> str:
        """Write the notes and how the run ended; return where the run is, and how it is shown."""
        self.client.set_tag(self.id, "mlflow.note.content", notes)
        if phase != "running":
            # Any other phase of `runs/run_record.py: Run.phase` is an end without an error.
            status = {"failed": "FAILED", "interrupted": "KILLED"}.get(phase, "FINISHED")
            self.client.set_terminated(
                self.id,
                status,
                int(ended * 1000),
            )
        location = f"run {self.run.info.run_name} of experiment {self.experiment} in {self.address}"
        if self.address.startswith(("http://", "https://")):
            return f"curves: {location}"
        return f"curves: {location}; `mlflow ui --backend-store-uri {self.address}` shows them"


@contextmanager
def _go_on_without(subject: str) -> Iterator[None]:
    """Print what a server refuses, and go on: one without a place for files, or without a registry,
    still takes the curves.
    """
    try:
        yield
    except Exception as error:
        print_diagnostic(f"mlflow: {subject}: {error}", 0)
