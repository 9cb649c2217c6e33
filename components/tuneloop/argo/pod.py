"""Pods of a local run: containers, scripts and daemons as process groups; their outputs, deadlines and readiness."""

from __future__ import annotations

import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuneloop.argo.box import Box
from tuneloop.argo.expressions import text
from tuneloop.argo.processes import Process
from tuneloop.argo.spec import seconds
from tuneloop.argo.state import Node

if TYPE_CHECKING:
    from tuneloop.argo.executor import Session

LIGHT = ("tuneloop.data_prep", "tuneloop.reward", "tuneloop.export")
"""Stages that import no torch: they do not wait for the warm process."""
POLL = 0.02


@dataclass
class Result:
    """What a node came to.

    Attributes:
        phase: one of `tuneloop.argo.state.DONE`, or ``Running`` for a daemon that is ready.
        parameters: output parameters; ``result`` is a script's standard output.
        artifacts: output artifacts, where they lie.
    """

    phase: str
    message: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, Path | str] = field(default_factory=dict)
    exit_code: int | None = None
    daemon: Daemon | None = None

    @property
    def broken(self) -> bool:
        return self.phase in ("Failed", "Error")


@dataclass
class Daemon:
    """A pod that outlives its node; it ends with the template that started it."""

    node: Node
    process: Process
    session: Session
    grace: float
    closing: bool = False

    def watch(self) -> None:
        """Record the end of the process, whoever ends it."""
        self.process.ended.wait()
        self.node.exit_code = self.process.code
        phase = "Succeeded" if self.closing or self.process.code == 0 else "Failed"
        message = "" if self.closing else f"the daemon ended by itself (exit code {self.process.code})"
        self.session.finish(self.node, phase, message)

    def close(self) -> None:
        """SIGTERM, then SIGKILL after the grace period."""
        self.closing = True
        end(self.process, self.grace)


def end(process: Process, grace: float) -> None:
    """End a process group."""
    process.signal(signal.SIGTERM)
    if not process.ended.wait(grace):
        process.signal(signal.SIGKILL)
        process.ended.wait()


def run_pod(session: Session, template: Mapping[str, Any], node: Node, artifacts: Mapping[str, Path | str]) -> Result:
    """Run the container or script of a template whose tags are substituted already."""
    container = template.get("container") or template["script"]
    home = session.workdir / "nodes" / node.id
    box = Box(home, template)
    box.place(artifacts)
    node.log = f"logs/{node.id}.log"
    log = session.workdir / node.log
    log.parent.mkdir(exist_ok=True)
    log.write_bytes(b"")
    stdout = home / "stdout" if "script" in template else log
    command = [box.translate(word) for word in [*container.get("command", []), *container.get("args", [])]]
    if "script" in template:
        source = home / "source"
        source.write_text(box.translate(container["source"]))
        command.append(str(source))
    env = session.environment(container, node, box)
    with session.slot(template.get("daemon", False)):
        if session.stopping.is_set():
            return Result("Failed", "stopped before it started")
        session.start(node)
        patient = not set(command[:3]) & set(LIGHT)
        process = session.launcher.start(command, env, session.cwd, stdout, log, patient)
        grace = float(template.get("terminationGracePeriodSeconds") or session.grace)
        with session.watched(node, process, grace):
            if template.get("daemon"):
                return _become_daemon(session, container, node, process, grace)
            deadline = _deadline(template)
            if not process.ended.wait(deadline):
                end(process, grace)
                return Result("Failed", f"exceeded its deadline of {deadline:g} s", exit_code=process.code)
    if stdout != log and stdout.exists():
        with log.open("ab") as file:
            file.write(stdout.read_bytes())
    return _collect(template, box, process.code, stdout if "script" in template else None)


def _collect(template: Mapping[str, Any], box: Box, code: int, stdout: Path | None) -> Result:
    parameters, no_parameter = box.parameters()
    found, no_artifact = box.artifacts()
    if stdout is not None and stdout.exists():
        parameters["result"] = stdout.read_text(errors="replace").strip()
    everything = Result("Succeeded", parameters=parameters, artifacts=dict(found), exit_code=code)
    if code != 0:
        everything.phase, everything.message = "Failed", f"exit code {code}"
    elif no_parameter or no_artifact:
        everything.phase, everything.message = "Error", f"did not write {', '.join(no_parameter + no_artifact)}"
    return everything


def _deadline(template: Mapping[str, Any]) -> float | None:
    given = [template[key] for key in ("timeout", "activeDeadlineSeconds") if template.get(key)]
    return min(map(seconds, given)) if given else None


def _become_daemon(
    session: Session, container: Mapping[str, Any], node: Node, process: Process, grace: float
) -> Result:
    probe = container.get("readinessProbe")
    time.sleep(float((probe or {}).get("initialDelaySeconds", 0)))
    while probe is not None and not _ready(probe):
        if process.ended.wait(min(float(probe.get("periodSeconds", 1)), 0.2)):
            return Result("Failed", f"ended before it was ready (exit code {process.code})", exit_code=process.code)
        if session.stopping.is_set():
            end(process, grace)
            return Result("Failed", "stopped", exit_code=process.code)
    daemon = Daemon(node, process, session, grace)
    node.daemoned = True
    session.tell(node)
    threading.Thread(target=daemon.watch, daemon=True).start()
    return Result("Running", daemon=daemon)


def _ready(probe: Mapping[str, Any]) -> bool:
    patience = float(probe.get("timeoutSeconds", 1))
    try:
        if get := probe.get("httpGet"):
            url = f"{str(get.get('scheme', 'http')).lower()}://127.0.0.1:{get['port']}{get.get('path', '/')}"
            headers = {h["name"]: h["value"] for h in get.get("httpHeaders", [])}
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=patience) as answer:
                return 200 <= answer.status < 400
        if tcp := probe.get("tcpSocket"):
            socket.create_connection(("127.0.0.1", int(tcp["port"])), timeout=patience).close()
            return True
    except (OSError, urllib.error.URLError):
        return False
    import subprocess

    return subprocess.run(probe["exec"]["command"], capture_output=True).returncode == 0


def suspend(session: Session, template: Mapping[str, Any], node: Node) -> Result:
    """Wait for a duration, or for a person who supplies the template's ``valueFrom.supplied`` outputs."""
    session.start(node)
    duration = (template["suspend"] or {}).get("duration")
    if duration is not None:
        session.stopping.wait(seconds(duration))
        return Result("Succeeded")
    wanted = {
        p["name"]: {key: p.get(key) for key in ("description", "enum", "default")}
        for p in template.get("inputs", {}).get("parameters", [])
    }
    supplied = {
        p["name"] for p in template.get("outputs", {}).get("parameters", []) if "supplied" in p.get("valueFrom", {})
    }
    answers = session.ask(node, {name: wanted.get(name, {}) for name in sorted(supplied)})
    return Result("Succeeded", parameters={name: text(value) for name, value in answers.items()})
