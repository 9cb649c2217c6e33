"""Runs of compiled pipelines on a Kubeflow Pipelines backend, through its API, for the commands.

Submitting a run's name again resumes it: its committed stages end at once. Errors of the client
library become one line (`UserError`, `Retryable`): each call of the library belongs inside
`translate_api_errors`. The library has no types, so that its clients, runs and pipelines are `Any`
here. The tasks of a run, which have no kfp, ask the same API by `api.py`.

Who calls it: `cli/kfp.py`, `kfp/schedule.py`, `kfp/progress.py`, `kfp/doctor.py`. A backend that is
imitated for tests, also of paths that are read here: `tests/kfp_api.py`.
"""

import io
import json
import math
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.http import is_transient
from tuneloop.core.json_types import JsonObject
from tuneloop.kfp.api import DONE, match_name
from tuneloop.kube.connection import list_status_nodes, read_api_message

EXPERIMENT = "tuneloop"
"""The experiment of a run that names none; the default of ``--experiment`` in `cli/kfp.py` is a
copy."""
KUBECONFIG_ADDRESS = "address taken from the kubeconfig"
"""What messages name in place of an address that was not set."""
ADDRESS_REMEDY = "--endpoint or KF_PIPELINES_ENDPOINT names the API's address"
TIMEOUT_S = 30
"""Seconds for one request of a command, as for Argo; the client library itself would wait for
ever."""
INNER = re.compile(r"executor|root|entrypoint|.+-driver|.+\.onExit")
"""Matches the names of nodes that KFP adds to those of tasks. `list_tasks` leaves them out, unless
the pipeline has a task of that name."""
ATTEMPT = re.compile(r"\((\d+)\)$")
"""The number of an attempt at the end of the name of a retried node's child.

KFP 2.17's manifests retry every template, so that each node has a parent of the same name.
"""
NO_LOG = '{"error_message"'
"""The beginning of an answer with status 200 that is no log: neither pod nor archive has it."""


@dataclass(frozen=True)
class TaskStatus:
    """One task of a run, as ``tuneloop kfp status --json`` prints it.

    Attributes:
        task: its name in the graph.
        phase: KFP's state.
        seconds: from start to end; 0 before the end.
        message: why it failed; empty if it did not.
    """

    task: str
    phase: str
    seconds: float
    message: str


def connect_to_kfp(
    endpoint: str | None = None, field: str = "kfp", remedy: str = ADDRESS_REMEDY
) -> Any:
    """Connect to Kubeflow Pipelines' API.

    Args:
        endpoint: its URL; by default ``KF_PIPELINES_ENDPOINT``, or else what the kubeconfig says.
        field: the setting that names the URL, for messages.
        remedy: what messages advise.

    Raises:
        UserError: kfp is not installed, or the endpoint does not answer.
    """
    check_kfp_is_installed()
    from kfp import Client
    from kfp_server_api import ApiException
    from urllib3 import Retry, exceptions

    class PatientClient(Client):  # type: ignore[misc]  # the library has no types
        """Checks the backend's health once, where kfp would five times with tracebacks, and with a
        timeout.
        """

        def get_kfp_healthz(self, sleep_duration: int = 0) -> Any:
            rest_client = self._healthz_api.api_client.rest_client
            send = type(rest_client).request

            # The library passes no timeout of its own, and has no setting for one.
            def send_with_timeout(*args: Any, **options: Any) -> Any:
                options["_request_timeout"] = TIMEOUT_S
                return send(rest_client, *args, **options)

            rest_client.request = send_with_timeout
            rest_client.pool_manager.connection_pool_kw["retries"] = Retry(connect=0, read=0)
            return self._healthz_api.healthz_service_get_healthz()

    address = endpoint or KUBECONFIG_ADDRESS
    with warnings.catch_warnings(), translate_api_errors(endpoint, field):
        warnings.simplefilter("ignore", FutureWarning)
        try:
            # It prints "Failed to load kube config." even if it needs none.
            with redirect_stdout(io.StringIO()):
                client = PatientClient(host=endpoint)
            client.get_kfp_healthz()
        except ApiException as error:
            if error.status != 404:
                raise
            message = f"has no Kubeflow Pipelines ({read_api_message(error)}); {remedy}"
            raise UserError(field, address, message) from error
        except exceptions.HTTPError as error:
            message = f"does not answer ({type(error).__name__}); {remedy}"
            raise UserError(field, address, message) from error
    return client


def check_kfp_is_installed() -> None:
    """Raise UserError if kfp is not installed."""
    if find_spec("kfp") is None:
        raise UserError("kfp", None, "needs Kubeflow Pipelines' SDK: pip install 'tuneloop[kfp]'")


@contextmanager
def translate_api_errors(value: str | None, field: str = "kfp") -> Iterator[None]:
    """Raise errors of the client library as UserError, or as Retryable where the API may answer
    later.

    Args:
        value: what the request is for, such as the name of a run.
        field: the setting or argument that has the value.
    """
    from kfp_server_api import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        message = read_api_message(error)
        if is_transient(error.status):
            raise Retryable(f"kfp: {message}") from error
        remedy = f"refused ({error.status}): {message}"
        raise UserError(field, value or KUBECONFIG_ADDRESS, remedy) from error
    except HTTPError as error:
        raise Retryable(f"kfp: the API does not answer ({type(error).__name__})") from error


def compile_to(pipeline: Any, path: Path, *, manifest: bool = False) -> None:
    """Write a pipeline's YAML.

    Args:
        pipeline: as `tuneloop.kfp.pipeline.build_pipeline` returns it.
        path: of the file.
        manifest: write the Kubernetes objects Pipeline and PipelineVersion instead.
    """
    from kfp import compiler
    from kfp.compiler.compiler_utils import KubernetesManifestOptions

    options: JsonObject = {}
    if manifest:
        options["kubernetes_manifest_format"] = True
        options["kubernetes_manifest_options"] = KubernetesManifestOptions(
            pipeline_name=pipeline.name, include_pipeline_manifest=True
        )
    with _plain_yaml():
        compiler.Compiler().compile(pipeline, str(path), **options)


@contextmanager
def compiled_package(pipeline: Any, *, manifest: bool = False) -> Iterator[str]:
    """Yield the path of a pipeline's compiled file, which is deleted after the block."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{pipeline.name}.yaml"
        compile_to(pipeline, path, manifest=manifest)
        yield str(path)


@contextmanager
def _plain_yaml() -> Iterator[None]:
    """Write text as PyYAML does: hera, once imported, changes that for the whole process (``'n'``
    for ``n``).
    """
    import yaml

    dumper: Any = yaml.Dumper
    representers = dumper.yaml_representers
    dumper.yaml_representers = dict(representers)
    dumper.yaml_representers[str] = yaml.representer.Representer.represent_str
    try:
        yield
    finally:
        dumper.yaml_representers = representers


def submit_run(
    client: Any,
    pipeline: Any,
    *,
    run: str,
    store: str,
    root: str | None = None,
    cache: bool = True,
    experiment: str = EXPERIMENT,
) -> str:
    """Start a run, or resume the one of that name.

    Args:
        client: of the backend.
        pipeline: what to run. Its parameters ``run`` and ``store`` are set, all others keep the
            defaults with which it was compiled.
        run: the name of the run.
        store: the URL of the store, as pods reach it.
        root: where KFP has handles and previews; by default the backend's.
        cache: KFP skips tasks that it has run before; committed stages are skipped in any case.
        experiment: what lists the run.

    Returns:
        The id that KFP gives the run.

    Raises:
        UserError: a run of that name is active.
    """
    for record in _list_runs(client, run):
        if record.state not in DONE:
            remedy = (
                f"is under way as {record.run_id}; "
                f"`tuneloop kfp stop {run}` it, or choose another name"
            )
            raise UserError("run", run, remedy)
    with compiled_package(pipeline) as package, translate_api_errors(run):
        record = client.create_run_from_pipeline_package(
            package,
            arguments={"run": run, "store": store},
            run_name=run,
            experiment_name=experiment,
            pipeline_root=root,
            # None leaves each task's own setting as it is.
            enable_caching=None if cache else False,
        )
    return str(record.run_id)


def find_run(client: Any, run: str) -> Any:
    """Find the newest run of that name, with its details. Raises UserError if there is none."""
    records = _list_runs(client, run)
    if not records:
        raise UserError("run", run, "no run of that name on this backend")
    with translate_api_errors(run):
        return client.get_run(records[0].run_id)


def stop_run(client: Any, run: str) -> bool:
    """Stop the run of that name, and return whether it was active."""
    record = find_run(client, run)
    if record.state in DONE:
        return False
    with translate_api_errors(run):
        client.terminate_run(record.run_id)
    return True


def list_tasks(run: Any) -> list[TaskStatus]:
    """List the tasks of a run by start, as its graph names them."""
    details = (run.run_details and run.run_details.task_details) or []
    names = _read_task_names(run)
    detail_by_task: JsonObject = {}
    # The node above all attempts comes last, and so replaces them.
    for detail in sorted(details, key=_read_attempt):
        name = ATTEMPT.sub("", detail.display_name or "root")
        if name in names or not _is_added_by_kfp(name, detail):
            detail_by_task[name] = detail
    tasks: list[TaskStatus] = []
    for name in sorted(detail_by_task, key=lambda name: _read_start(detail_by_task[name])):
        detail = detail_by_task[name]
        seconds = 0.0
        if detail.state in DONE and detail.end_time and detail.start_time:
            seconds = (detail.end_time - detail.start_time).total_seconds()
        error = (detail.error and detail.error.message) or ""
        tasks.append(TaskStatus(names.get(name, name), detail.state or "PENDING", seconds, error))
    return tasks


def _read_attempt(detail: Any) -> float:
    """Return the number of a node's attempt; infinite for the node above all attempts."""
    match = ATTEMPT.search(detail.display_name or "")
    return int(match[1]) if match else math.inf


def _read_start(detail: Any) -> tuple[bool, str]:
    """Return what nodes are sorted by: those that have not started yet come last."""
    return detail.start_time is None, str(detail.start_time)


def _is_added_by_kfp(name: str, detail: Any) -> bool:
    """Return whether a node is none of the pipeline's tasks."""
    if INNER.fullmatch(name):
        return True
    # The node of the whole workflow has the workflow's name, with which its pods' names begin.
    pods = [child.pod_name or "" for child in detail.child_tasks or ()]
    return any(pod.startswith(f"{name}-") for pod in pods)


def read_logs(client: Any, run: str, task: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield (task, line) of the stages' logs, task by task, without pods whose log is gone."""
    record = find_run(client, run)
    names = _read_task_names(record)
    for node, pod in _list_pods(client, record.run_id):
        name = names.get(node, node)
        if task not in (None, name):
            continue
        text = _get(client, f"/apis/v1alpha1/runs/{record.run_id}/nodes/{pod}/log") or ""
        if not text.startswith(NO_LOG):
            yield from ((name, line) for line in text.splitlines())


def _list_pods(client: Any, run_id: str) -> list[tuple[str, str]]:
    """List (task, pod) by start.

    They are read from API v1: only that returns the Argo workflow, which has the pods of tasks.
    """
    answer = _get(client, f"/apis/v1beta1/runs/{run_id}")
    runtime = json.loads(answer or "{}").get("pipeline_runtime", {})
    workflow = json.loads(runtime.get("workflow_manifest") or "{}")
    nodes = sorted(list_status_nodes(workflow), key=lambda node: str(node.get("startedAt")))
    pods: list[tuple[str, str]] = []
    for node in nodes:
        is_driver = ATTEMPT.sub("", node.get("displayName", "")).endswith("driver")
        if node.get("type") != "Pod" or is_driver:
            continue
        # ``wf.root.sft.executor`` is of the task ``sft``, as is ``wf(0).root(0).sft(0).executor(0)``.
        path = [ATTEMPT.sub("", part) for part in node["name"].split(".")]
        task = next(part for part in reversed(path) if part != "executor")
        # Argo's rule for the name of a node's pod (its pod-name format v2).
        digits = str(node["id"]).rpartition("-")[2]
        pods.append((task, f"{workflow['metadata']['name']}-{node['templateName']}-{digits}"))
    return pods


def _get(client: Any, path: str) -> str | None:
    """Return the API's answer at `path`, over the client's own connection; None if there is
    nothing.
    """
    from kfp_server_api import ApiException

    with translate_api_errors(path):
        try:
            # The library has no method for these paths, and its own connection has the token.
            reply = client._run_api.api_client.call_api(
                path,
                "GET",
                _preload_content=False,
                _return_http_data_only=True,
                auth_settings=["Bearer"],
            )
        except ApiException as error:
            # The API's statuses for a deleted pod.
            if error.status in (400, 404, 500):
                return None
            raise
        return str(reply.data.decode(errors="replace"))


def _list_runs(client: Any, name: str) -> list[Any]:
    """List the runs of a name, newest first."""
    with translate_api_errors(name):
        page = client.list_runs(page_size=100, sort_by="created_at desc", filter=match_name(name))
    return list(page.runs or [])


def _read_task_names(run: Any) -> dict[str, str]:
    """Return name of a task in the compiled graph → its name in the pipeline.

    The states of tasks and their pods have the first, people see the second.
    """
    spec = run.pipeline_spec or {}
    # A pipeline with settings of its platform is one level deeper.
    spec = spec.get("pipeline_spec", spec)
    graphs = [spec.get("root", {})]
    graphs += spec.get("components", {}).values()
    names: dict[str, str] = {}
    for graph in graphs:
        for name, task in graph.get("dag", {}).get("tasks", {}).items():
            names[name] = task["taskInfo"]["name"]
    return names
