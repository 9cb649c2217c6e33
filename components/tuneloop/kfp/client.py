"""Runs of compiled pipelines on a Kubeflow Pipelines backend, through its API. Submitting a run's name again resumes
it: its committed stages end at once. Errors of the client library become one line (`UserError`, `Retryable`)."""

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
from tuneloop.core.json_types import JsonObject
from tuneloop.kfp.api import DONE, match_name
from tuneloop.kube.connection import list_status_nodes, read_api_message

EXPERIMENT = "tuneloop"
FOUND = "address taken from the kubeconfig"
ADDRESS = "--endpoint or KF_PIPELINES_ENDPOINT names the API's address"
TIMEOUT_S = 30  # as Argo's; the client library itself would wait for ever
INNER = re.compile(r"executor|root|entrypoint|.+-driver|.+\.onExit")
"""Nodes that KFP adds to each task; they are not shown to people."""
ATTEMPT = re.compile(r"\((\d+)\)$")
"""The number of an attempt at the end of the name of a retried node's child. KFP 2.17's manifests retry every template,
so that each node has a parent of the same name."""


@dataclass(frozen=True)
class TaskStatus:
    """One task of a run: its name in the graph, KFP's state, seconds from start to end (or 0 before the end)."""

    name: str
    state: str
    seconds: float
    error: str


def connect_to_kfp(endpoint: str | None = None, field: str = "kfp", remedy: str = ADDRESS) -> Any:
    """Connect to the API at `endpoint` (default: ``KF_PIPELINES_ENDPOINT``, else by kubeconfig). Raises UserError if
    kfp is not installed, or the endpoint does not answer."""
    check_kfp_is_installed()
    from kfp import Client
    from kfp_server_api import ApiException
    from urllib3 import Retry, exceptions

    class Once(Client):  # type: ignore[misc]  # the library has no types
        """Checks the backend's health once, where kfp would five times with tracebacks, and with a timeout."""

        def get_kfp_healthz(self, sleep_duration: int = 0) -> Any:
            api = self._healthz_api.api_client.rest_client
            api.request = lambda *args, **how: type(api).request(
                api, *args, **how | {"_request_timeout": TIMEOUT_S}
            )
            api.pool_manager.connection_pool_kw["retries"] = Retry(connect=0, read=0)
            return self._healthz_api.healthz_service_get_healthz()

    with warnings.catch_warnings(), translate_api_errors(endpoint, field):
        warnings.simplefilter("ignore", FutureWarning)
        try:
            with redirect_stdout(
                io.StringIO()
            ):  # it prints "Failed to load kube config." even if it needs none
                client = Once(host=endpoint)
            client.get_kfp_healthz()
        except ApiException as error:
            if error.status != 404:
                raise
            told = f"has no Kubeflow Pipelines ({read_api_message(error)}); {remedy}"
            raise UserError(field, endpoint or FOUND, told) from error
        except exceptions.HTTPError as error:
            raise UserError(
                field, endpoint or FOUND, f"does not answer ({type(error).__name__}); {remedy}"
            ) from error
    return client


def check_kfp_is_installed() -> None:
    """Raise UserError if kfp is not installed."""
    if find_spec("kfp") is None:
        raise UserError("kfp", None, "needs Kubeflow Pipelines' SDK: pip install 'tuneloop[kfp]'")


@contextmanager
def translate_api_errors(asked: str | None, field: str = "kfp") -> Iterator[None]:
    """Raise errors of the client library as UserError, or as Retryable where the API may answer later."""
    from kfp_server_api import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        message = read_api_message(error)
        if error.status in (429, 502, 503, 504):
            raise Retryable(f"kfp: {message}") from error
        raise UserError(field, asked or FOUND, f"refused ({error.status}): {message}") from error
    except HTTPError as error:
        raise Retryable(f"kfp: the API does not answer ({type(error).__name__})") from error


def compile_to(built: Any, path: Path, *, manifest: bool = False) -> None:
    """Write a pipeline's YAML."""
    from kfp import compiler
    from kfp.compiler.compiler_utils import KubernetesManifestOptions

    options: JsonObject = {}
    if manifest:
        named = KubernetesManifestOptions(pipeline_name=built.name, include_pipeline_manifest=True)
        options = {"kubernetes_manifest_format": True, "kubernetes_manifest_options": named}
    with _plain_yaml():
        compiler.Compiler().compile(built, str(path), **options)


@contextmanager
def _plain_yaml() -> Iterator[None]:
    """Write text as PyYAML does: hera, once imported, changes that for the whole process (``'n'`` for ``n``)."""
    import yaml

    known: Any = yaml.Dumper.yaml_representers
    plain: Any = yaml.representer.Representer.represent_str
    yaml.Dumper.yaml_representers = {**known, str: plain}
    try:
        yield
    finally:
        yaml.Dumper.yaml_representers = known


def submit_run(
    client: Any,
    built: Any,
    *,
    run: str,
    store: str,
    root: str | None = None,
    cache: bool = True,
    experiment: str = EXPERIMENT,
) -> str:
    """Start a run, or resume the one of that name, and return its id. Raises UserError if a run of that name is active.
    With `cache` KFP skips tasks that it has run before; committed stages are skipped in any case."""
    if active := [each for each in _named(client, run) if each.state not in DONE]:
        remedy = f"is under way as {active[0].run_id}; `tuneloop kfp stop {run}` it, or choose another name"
        raise UserError("run", run, remedy)
    with compiled_package(built) as package, translate_api_errors(run):
        made = client.create_run_from_pipeline_package(
            package,
            arguments={"run": run, "store": store},
            run_name=run,
            experiment_name=experiment,
            pipeline_root=root,
            enable_caching=None if cache else False,
        )
    return str(made.run_id)


def find_run(client: Any, run: str) -> Any:
    """Find the newest run of that name, with its details. Raises UserError where there is none."""
    if not (found := _named(client, run)):
        raise UserError("run", run, "no run of that name on this backend")
    with translate_api_errors(run):
        return client.get_run(found[0].run_id)


def stop_run(client: Any, run: str) -> bool:
    """Stop the run of that name, and return whether it was active."""
    found = find_run(client, run)
    if found.state in DONE:
        return False
    with translate_api_errors(run):
        client.terminate_run(found.run_id)
    return True


def list_tasks(run: Any) -> list[TaskStatus]:
    """List the tasks of a run by start, as its graph names them."""
    details = (run.run_details and run.run_details.task_details) or []
    names = _names(run)
    nodes: JsonObject = {}

    def attempt_of(each: Any) -> float:
        match = ATTEMPT.search(each.display_name or "")
        return int(match[1]) if match else math.inf

    for each in sorted(details, key=attempt_of):  # the node above all attempts comes last
        name = ATTEMPT.sub("", each.display_name or "root")
        pods = [child.pod_name or "" for child in each.child_tasks or ()]
        # KFP adds nodes; that of the whole workflow has the workflow's name, with which its pods' names begin.
        if name in names or not (
            INNER.fullmatch(name) or any(pod.startswith(f"{name}-") for pod in pods)
        ):
            nodes[name] = each
    started = sorted(
        nodes.items(), key=lambda item: (item[1].start_time is None, str(item[1].start_time))
    )
    listed = []
    for name, each in started:
        ended = each.state in DONE and each.end_time and each.start_time
        seconds = (each.end_time - each.start_time).total_seconds() if ended else 0.0
        error = (each.error and each.error.message) or ""
        listed.append(TaskStatus(names.get(name, name), each.state or "PENDING", seconds, error))
    return listed


def read_logs(client: Any, run: str, task: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield (task, line) of the stages' logs, task by task, without pods whose log is gone."""
    found = find_run(client, run)
    names = _names(found)
    for node, pod in _pods(client, found.run_id):
        name = names.get(node, node)
        if task in (None, name):
            text = _get(client, f"/apis/v1alpha1/runs/{found.run_id}/nodes/{pod}/log") or ""
            if not text.startswith(
                '{"error_message"'
            ):  # an error with status 200: neither pod nor archive has the log
                yield from ((name, line) for line in text.splitlines())


def _pods(client: Any, run_id: str) -> list[tuple[str, str]]:
    """List (task, pod) by start, from API v1: only that returns the Argo workflow, which has the pods of tasks."""
    detail = _get(client, f"/apis/v1beta1/runs/{run_id}")
    manifest = (
        json.loads(detail or "{}").get("pipeline_runtime", {}).get("workflow_manifest") or "{}"
    )
    workflow = json.loads(manifest)
    pods = [node for node in list_status_nodes(workflow) if node.get("type") == "Pod"]
    pods = [
        node for node in pods if not ATTEMPT.sub("", node.get("displayName", "")).endswith("driver")
    ]
    ordered = sorted(pods, key=lambda node: str(node.get("startedAt")))
    # Argo's rule for the name of a node's pod (its pod-name format v2).
    names = [f"{node['templateName']}-{str(node['id']).rpartition('-')[2]}" for node in ordered]
    # ``wf.root.sft.executor`` is of the task ``sft``, as is ``wf(0).root(0).sft(0).executor(0)``.
    paths = [[ATTEMPT.sub("", part) for part in node["name"].split(".")] for node in ordered]
    tasks = [next(part for part in reversed(path) if part != "executor") for path in paths]
    return [(task, f"{workflow['metadata']['name']}-{name}") for task, name in zip(tasks, names)]


def _get(client: Any, path: str) -> str | None:
    """Return the API's answer at `path`, over the client's own connection; None if there is nothing."""
    from kfp_server_api import ApiException

    with translate_api_errors(path):
        try:
            reply = client._run_api.api_client.call_api(
                path,
                "GET",
                _preload_content=False,
                _return_http_data_only=True,
                auth_settings=["Bearer"],
            )
        except ApiException as error:
            if error.status in (400, 404, 500):  # the API's statuses for a deleted pod
                return None
            raise
        return str(reply.data.decode(errors="replace"))


def _named(client: Any, run: str) -> list[Any]:
    """List the runs of a name, newest first."""
    with translate_api_errors(run):
        listed = client.list_runs(page_size=100, sort_by="created_at desc", filter=match_name(run))
    return list(listed.runs or [])


def _names(run: Any) -> dict[str, str]:
    """Return task name in the compiled graph, which states and logs use → its name in the pipeline."""
    given = run.pipeline_spec or {}
    spec = given.get("pipeline_spec", given)
    graphs = [spec.get("root", {}), *spec.get("components", {}).values()]
    tasks = [item for graph in graphs for item in graph.get("dag", {}).get("tasks", {}).items()]
    return {name: task["taskInfo"]["name"] for name, task in tasks}


@contextmanager
def compiled_package(built: Any, *, manifest: bool = False) -> Iterator[str]:
    """Yield the path of a pipeline's compiled file, which is deleted after the block."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{built.name}.yaml"
        compile_to(built, path, manifest=manifest)
        yield str(path)
