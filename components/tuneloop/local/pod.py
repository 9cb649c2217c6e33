"""Pods of a local run: containers and daemons as process groups; their outputs, deadlines and readiness."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tuneloop.core.ends import NO_EXIT_CODE, describe_exit, name_signal
from tuneloop.core.errors import EXIT_RETRY, EXIT_USER, TERMINATION_LOG, Retryable, UserError, name_class
from tuneloop.core.http import Unanswered, request
from tuneloop.local.device_lease import taken
from tuneloop.local.journal import BROKEN, Node
from tuneloop.local.pod_files import Box
from tuneloop.local.processes import Process
from tuneloop.workflow.manifest import seconds

if TYPE_CHECKING:
    from tuneloop.local.executor import Session

LIGHT = ("tuneloop.stages.data_prep", "tuneloop.stages.reward", "tuneloop.stages.export")
"""Stages that import no torch: they do not wait for the warm process."""


@dataclass
class Result:
    """What a node came to.

    Attributes:
        phase: one of `tuneloop.local.journal.DONE`, or ``Running`` for a daemon that is ready.
        parameters: output parameters.
        artifacts: output artifacts: where they lie, or their text.
        everything: of a loop: all items' parameters, as a JSON list of maps.
        phases: of a loop: its items'.
    """

    phase: str
    message: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, Path | str] = field(default_factory=dict)
    exit_code: int | None = None
    daemon: Server | None = None
    everything: str | None = None
    phases: tuple[str, ...] = ()

    @property
    def broken(self) -> bool:
        return self.phase in BROKEN

    @property
    def code(self) -> int:
        """The exit code as the controller gives it: `NO_EXIT_CODE` where there is none."""
        return NO_EXIT_CODE if self.exit_code is None else self.exit_code


class Server(Protocol):
    """What runs on behind a node that is ready.

    Attributes:
        over: set when it has ended for good, whoever ended it; `result` says how.
    """

    over: threading.Event
    result: Result

    def close(self) -> None:
        """End it, and wait for its end."""


class Daemon:
    """A pod that outlives its node's start; it ends with the graph that started it.

    Attributes:
        over: set when it has ended, whoever ended it; `result` says how.
    """

    def __init__(self, session: Session, node: Node, process: Process, grace: float) -> None:
        self.over = threading.Event()
        self.result = Result("Succeeded")
        self._session, self._node, self._process, self._grace = session, node, process, grace
        self._closing = False
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """SIGTERM, then SIGKILL after the grace period."""
        self._closing = True
        end(self._process, self._grace)
        self.over.wait()

    def _watch(self) -> None:
        self._process.ended.wait()
        self.result.exit_code = code = self._process.code
        if not self._closing:
            stopped = self._session.stopping.is_set()
            words = _last_words(self._session.workdir / self._node.log)
            cause = f"server died: {name_signal(code) or describe_exit(code)}{f': {words}' if words else ''}"
            self.result.phase, self.result.message = "Failed", "stopped" if stopped else cause
        self._session.settle(self._node, self.result)
        self.over.set()


def end(process: Process, grace: float) -> None:
    """End a process group: SIGTERM, and SIGKILL after `grace` seconds."""
    process.signal(signal.SIGTERM)
    if not process.ended.wait(grace):
        process.signal(signal.SIGKILL)
        process.ended.wait()


def run_pod(session: Session, template: Mapping[str, Any], node: Node, artifacts: Mapping[str, Path | str]) -> Result:
    """Run the container of a template whose tags are substituted already."""
    container = template["container"]
    home = session.workdir / "nodes" / node.id
    box = Box(home, template)
    box.place(artifacts)
    node.log = f"logs/{node.id}.log"
    log = session.workdir / node.log
    log.parent.mkdir(exist_ok=True)
    log.touch()
    env = session.environment(container, node, box)
    command = [
        _expand(box.translate(word), env) for word in (*container.get("command", []), *container.get("args", []))
    ]
    words = home / "termination-log"
    words.touch()
    env[TERMINATION_LOG] = str(words)
    grace = _grace(template, session.grace)
    with session.slot(bool(template.get("daemon"))), contextlib.ExitStack() as stack:
        try:
            stack.enter_context(taken(session, template, node, box))
        except (UserError, Retryable) as error:
            if isinstance(error, UserError):
                return Result("Failed", str(error), exit_code=EXIT_USER)
            return Result("Failed", f"{name_class(error)}: {error}", exit_code=EXIT_RETRY)
        if session.stopping.is_set() or session.find_end_reason(node.name):
            return Result("Failed", "stopped before it started")
        session.start(node)
        patient = not set(command[:3]) & set(LIGHT)
        process = session.launcher.start(command, env, session.cwd, log, log, patient)
        with session.watched(node, process, grace):
            if template.get("daemon"):
                return _become_daemon(session, container, node, process, grace, env)
            deadline = _deadline(template)
            late = not process.ended.wait(deadline)
            if late:
                end(process, grace)
    result = _collect(box, process.code)
    if session.stopping.is_set() and result.broken:
        result.message = "stopped"
    elif late:
        result.phase, result.message = "Failed", f"Pod was active on the node longer than {deadline:g} s"
    elif result.phase == "Failed":
        said = words.read_text(errors="replace").strip() or _last_words(log)
        result.message = describe_exit(process.code, said)
    return result


def _collect(box: Box, code: int) -> Result:
    parameters, no_parameter = box.parameters()
    found, no_artifact = box.artifacts()
    result = Result("Succeeded" if code == 0 else "Failed", "", parameters, dict(found), code)
    if code == 0 and (no_parameter or no_artifact):
        result.phase, result.message = "Error", f"did not write its output {', '.join(no_parameter + no_artifact)}"
    return result


def _last_words(log: Path) -> str:
    """The end of a log as the reason of a failure."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2000))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[-300:]


def _expand(word: str, env: Mapping[str, str]) -> str:
    """Kubernetes' ``$(NAME)`` in commands and arguments; ``$$`` is a dollar; an unknown name stays."""
    return re.sub(r"\$\$|\$\((\w+)\)", lambda m: "$" if m[0] == "$$" else env.get(m[1], m[0]), word)


def _deadline(template: Mapping[str, Any]) -> float | None:
    given = [template[key] for key in ("timeout", "activeDeadlineSeconds") if template.get(key)]
    return min(map(seconds, given)) if given else None


def _grace(template: Mapping[str, Any], default: float) -> float:
    """terminationGracePeriodSeconds, which Argo has only in ``podSpecPatch``."""
    try:
        patch = json.loads(template.get("podSpecPatch") or "{}")
    except json.JSONDecodeError:  # it may be YAML; a cluster's reader takes care of it
        return default
    return float(patch.get("terminationGracePeriodSeconds", default))


def _become_daemon(
    session: Session, container: Mapping[str, Any], node: Node, process: Process, grace: float, env: Mapping[str, str]
) -> Result:
    probe = container.get("readinessProbe") or {}
    pause = min(float(probe.get("periodSeconds", 1)), 0.1)
    over = process.ended.wait(float(probe.get("initialDelaySeconds", 0)))
    while not over and not _ready(probe, container, session.cwd, env):
        if session.stopping.is_set():
            end(process, grace)
            return Result("Failed", "stopped", exit_code=process.code)
        over = process.ended.wait(pause)
    if over:
        said = _last_words(session.workdir / node.log)
        message = f"ended before it was ready: {describe_exit(process.code, said)}"
        return Result("Failed", message, exit_code=process.code)
    return Result("Running", daemon=Daemon(session, node, process, grace))


def _ready(probe: Mapping[str, Any], container: Mapping[str, Any], cwd: Path, env: Mapping[str, str]) -> bool:
    patience = float(probe.get("timeoutSeconds", 1))
    try:
        if get := probe.get("httpGet"):
            place = f"127.0.0.1:{_port(get['port'], container)}/{str(get.get('path', '')).removeprefix('/')}"
            headers = {h["name"]: h["value"] for h in get.get("httpHeaders", [])}
            url = f"{str(get.get('scheme', 'http')).lower()}://{place}"
            return request("GET", url, headers=headers, timeout_s=patience).status_code < 400
        if tcp := probe.get("tcpSocket"):
            socket.create_connection(("127.0.0.1", _port(tcp["port"], container)), timeout=patience).close()
        if command := probe.get("exec"):
            subprocess.run(command["command"], check=True, capture_output=True, timeout=patience, cwd=cwd, env=env)
    except (OSError, Unanswered, subprocess.SubprocessError):
        return False
    return True


def _port(port: int | str, container: Mapping[str, Any]) -> int:
    named = {p.get("name"): p["containerPort"] for p in container.get("ports", [])}
    return int(named.get(port, port))
