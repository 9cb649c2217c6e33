"""The checks that are made before a run changes anything, and the choice of settings before them.

A further check belongs in `planning/limits.py: find_limits` if it holds wherever a run is executed:
`run`, `plan`, `lint`, `submit`, `schedule` and `kfp` ask it, `resume` and `fork` do not. It belongs
in `check_local_run` if it is about this machine, and in `cluster/preflight.py` if it is about a
cluster.
"""

import importlib.util
import json
import socket
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import typer

from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.store import Store, local_path, normalize_url
from tuneloop.core.wording import format_count

if TYPE_CHECKING:
    from tuneloop.config.loading import Configured, Files, Pipeline
    from tuneloop.planning.limits import Limit


def check_local_run(config: JsonMapping, workflow: JsonMapping, store: str) -> None:
    """Refuse a run that cannot succeed on this machine.

    Args:
        config: all settings, resolved.
        workflow: as it is rendered from them.
        store: where the run commits, a path or URL.

    Raises:
        UserError: the workflow does not pass the lint or needs a cluster, the store cannot be
            written, a port is taken, or the engine is not installed or lacks an option.
    """
    from tuneloop.argo.lint import lint_workflow
    from tuneloop.inference.engines import check_here
    from tuneloop.workflow import manifest

    problems = lint_workflow(workflow)
    if problems:
        raise UserError(
            "pipeline",
            str(problems[0]),
            f"{format_count(len(problems), 'problem')}; see `tuneloop lint`",
        )
    # A step that only a cluster can execute would fail after hours, when it is reached.
    manifest.check_workflow(workflow["spec"])
    Store(store).check_writable()
    engine = config.get("engine")
    if isinstance(engine, Mapping):
        check_here(engine["kind"], engine.get("args") or {}, "engine.args.")
    for name, port in list_server_ports(workflow):
        if is_port_taken(port):
            raise UserError(
                f"port of {name}", port, "is taken here; stop what listens there, or set another"
            )


def configure_remote(
    pipeline: "Pipeline",
    files: "Files",
    sets: Iterable[str] | None,
    store: str,
    *,
    keeps_promoted: bool = False,
) -> Any:
    """Make the configuration of a run whose pods commit artifacts to `store`, as
    `Pipeline.configure` does.

    The pods may have keys and disks that this machine lacks: then they look up ``run://…``.
    """
    from tuneloop.config.pipeline import check_store

    settings = _look_up_model(pipeline, files, list(sets or ()), store, keeps_promoted)
    check_store(settings, store)
    return settings


def _look_up_model(
    pipeline: "Pipeline", files: "Files", assignments: list[str], store: str, keeps_promoted: bool
) -> Any:
    """Make the configuration of `configure_remote`, with the base model's address if this machine
    can find it.
    """
    root = local_path(normalize_url(store))
    if root is not None and not root.is_dir():
        return pipeline.configure(files, assignments)
    try:
        return pipeline.configure(files, assignments, store, keeps_promoted=keeps_promoted)
    except Retryable as error:
        reason = str(error)
    except UserError as error:
        # The store refuses the keys of this machine. A bucket that is not there is known by the error
        # code that `core/object_stores.py` passes on.
        if error.field != "store" or "NoSuchBucket" in error.remedy:
            raise
        reason = str(error)
    typer.echo(f"note: the pods look up the base model, for which {reason}", err=True)
    return pipeline.configure(files, assignments)


def check_limits(limits: Iterable["Limit"], ignore: bool) -> None:
    """Refuse what a run would break, all of it, before it does any work.

    Args:
        limits: those that the run exceeds, as `tuneloop.planning.limits.find_limits` finds them.
        ignore: only print those that are estimates; notes are only printed in any case.

    Raises:
        UserError: the first of them; the others are printed before it.
    """
    refused: list[UserError] = []
    for limit in limits:
        if limit.is_note or (ignore and limit.is_estimate):
            typer.echo(f"note: {limit.error}", err=True)
            continue
        remedy = limit.error.remedy
        if limit.is_estimate:
            remedy += "; or start it as it is with --ignore-limits"
        refused.append(UserError(limit.error.field, limit.error.value, remedy))
    # The first is raised, and so printed last, where it is read first.
    for error in refused[1:]:
        typer.echo(f"error: {error}", err=True)
    if refused:
        raise refused[0]


def print_followed(configured: "Configured") -> None:
    """Print the settings that follow the base model and the machine, each with its reason.

    What could not be followed is printed as notes on standard error.
    """
    for note in configured.notes:
        typer.echo(f"note: {note}", err=True)
    if not configured.followed:
        return
    typer.echo("settings that follow the base model (docs/defaults.md):")
    assignments = [
        f"{followed.setting}={format_value(followed.value)}" for followed in configured.followed
    ]
    width = max(map(len, assignments))
    for assignment, followed in zip(assignments, configured.followed):
        typer.echo(f"  {assignment:{width}}  {followed.reason}")


def format_value(value: object) -> str:
    """Format a setting's value as `--set` takes it."""
    # JSON is YAML in one line.
    return json.dumps(value, ensure_ascii=False)


def choose_demo_engine() -> tuple[str, str]:
    """Choose the engine for the demo on this machine.

    vLLM is only looked up, as its import takes seconds.

    Returns:
        The engine's name, and the reason in words.

    Raises:
        UserError: the packages for training are not installed.
    """
    for package in ("torch", "transformers", "datasets", "peft"):
        if importlib.util.find_spec(package) is None:
            raise UserError("demo", package, "is not installed; pip install 'tuneloop[train]'")
    if importlib.util.find_spec("vllm") is None:
        return "transformers", "as vLLM is not installed here"
    return "vllm", "as vLLM is installed here; without it: --set engine=transformers"


def list_server_ports(workflow: JsonMapping) -> Iterator[tuple[str, int]]:
    """Yield template and port of every server that the workflow starts.

    The port is that of the server's readiness probe (`argo/template.py: server_template`): a server
    without one is not found here, and its port is not checked.
    """
    for template in workflow["spec"].get("templates", ()):
        container = template.get("container") or {}
        probe = container.get("readinessProbe") or {}
        target = probe.get("httpGet") or probe.get("tcpSocket") or {}
        port = target.get("port")
        # The port of a template may also be a parameter: it is known only in the run.
        if template.get("daemon") and isinstance(port, int):
            yield template["name"], port


def is_port_taken(port: int) -> bool:
    """Return whether a process listens on `port` of this machine."""
    with socket.socket() as probe:
        # Servers set this, too: a port in TIME_WAIT is free for them.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False
