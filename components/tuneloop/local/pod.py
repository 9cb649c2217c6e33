"""Pods of a local run: containers and daemons as process groups; their outputs and readiness."""

import contextlib
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath

from tuneloop.argo.lease_sidecar import find_lease_sidecar
from tuneloop.core.ends import TERMINATED, describe_exit, name_signal
from tuneloop.core.errors import TERMINATION_LOG, Retryable, UserError, describe_error
from tuneloop.core.http import Unanswered, send_request
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.server_token import create_token_file
from tuneloop.local.execution import Execution
from tuneloop.local.journal import Node
from tuneloop.local.processes import Process, end_process
from tuneloop.local.results import Result
from tuneloop.sharing.lease_storage import STORED_LEASES, open_lease_group
from tuneloop.sharing.sidecar import parse_arguments
from tuneloop.workflow.manifest import FIELD_PATHS
from tuneloop.workflow.settings import SANDBOX, SANDBOX_TOKEN, TOKEN_KEY

LIGHT = ("tuneloop.stages.data_prep", "tuneloop.stages.reward", "tuneloop.stages.export")
"""Stages that import no torch: they do not wait for the warm process."""
SHARED = ("/tmp", "/dev/shm")


class PodFilesystem:
    """The files of one pod, below `root`, which is emptied first.

    All pods of this machine share its file system. So each path that a template declares (an output parameter's, an
    emptyDir's) is mapped below `root`, by rewriting it in the command, the arguments and the environment. A directory
    that holds declared outputs is mapped where it is a whole value, as in ``TUNELOOP_OUTPUTS=/tmp/tuneloop/outputs``.
    ``/tmp`` and ``/dev/shm`` as emptyDirs are the machine's own."""

    def __init__(self, root: Path, template: JsonMapping) -> None:
        self.root = root
        parameters = template.get("outputs", {}).get("parameters", [])
        self._sources = {
            p["name"]: p["valueFrom"] for p in parameters if "path" in p.get("valueFrom", {})
        }
        mounts = (
            mount["mountPath"].rstrip("/")
            for mount in template["container"].get("volumeMounts", [])
        )
        declared = [source["path"] for source in self._sources.values()]
        empty = {*mounts} - {*SHARED}
        self._paths = sorted({*declared, *empty}, key=len, reverse=True)
        self._parents = {str(PurePosixPath(path).parent) for path in declared} - {"/", *SHARED}
        shutil.rmtree(root, ignore_errors=True)
        for place in (
            root,
            *(self.local_path(path).parent for path in declared),
            *map(self.local_path, empty),
        ):
            place.mkdir(parents=True, exist_ok=True)

    def local_path(self, path: str) -> Path:
        """Return where `path` of the container is on this machine."""
        return self.root / "fs" / path.lstrip("/")

    def translate(self, text: str) -> str:
        """Replace the declared paths in `text` by their places on this machine."""
        head, equals, tail = text.rpartition("=")
        if tail.rstrip("/") in self._parents:
            return f"{head}{equals}{self.local_path(tail)}"
        if not self._paths:
            return text
        pattern = "|".join(map(re.escape, self._paths))
        return re.sub(
            rf"(?<![\w./-])(?:{pattern})(?![\w-])",
            lambda match: str(self.local_path(match[0])),
            text,
        )

    def read_parameters(self) -> tuple[dict[str, str], list[str]]:
        """Return the output parameters that the pod wrote or that have a default, and the names of the missing ones."""
        values = {}
        missing = []
        for name, source in self._sources.items():
            file = self.local_path(source["path"])
            if file.exists():
                values[name] = file.read_text().removesuffix("\n")
            elif "default" in source:
                values[name] = str(source["default"])
            else:
                missing.append(name)
        return values, missing


class PodDaemon:
    """A pod that outlives its node's start; it ends with the graph that started it."""

    def __init__(
        self, execution: Execution, node: Node, process: Process, grace: float, log: "LogPart"
    ) -> None:
        self._log = log
        self.over = threading.Event()
        self.result = Result("Succeeded")
        self._execution = execution
        self._node = node
        self._process = process
        self._grace = grace
        self._closing = False
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Send SIGTERM, then SIGKILL after the grace period."""
        self._closing = True
        end_process(self._process, self._grace)
        self.over.wait()

    def _watch(self) -> None:
        self._process.ended.wait()
        self.result.exit_code = code = self._process.code
        if not self._closing:
            stopped = self._execution.stopping.is_set()
            words = self._log.read_last_line()
            cause = f"server died: {name_signal(code) or describe_exit(code)}{f': {words}' if words else ''}"
            self.result.phase = "Failed"
            self.result.message = "stopped" if stopped else cause
        self._execution.settle(self._node, self.result)
        self.over.set()


def run_pod(execution: Execution, template: JsonMapping, node: Node) -> Result:
    """Run the container of a template whose tags are substituted already."""
    container = template["container"]
    home = execution.workdir / "nodes" / node.id
    files = PodFilesystem(home, template)
    node.log = f"logs/{node.id}.log"
    log = execution.workdir / node.log
    log.parent.mkdir(exist_ok=True)
    log.touch()
    log_part = LogPart(log)
    _mount_token(execution, template, files)
    env = _build_environment(execution, container, node, files)
    given = (*container.get("command", []), *container.get("args", []))
    # Kubernetes' ``$(NAME)`` is replaced; ``$$`` is a dollar; an unknown name stays.
    named = partial(
        re.sub, r"\$\$|\$\((\w+)\)", lambda m: "$" if m[0] == "$$" else env.get(m[1], m[0])
    )
    command = [named(files.translate(word)) for word in given]
    words = home / "termination-log"
    # An earlier session may have left its own: nodes have the same places in all.
    words.write_text("")
    env[TERMINATION_LOG] = str(words)
    grace = _grace(template, execution.grace)
    with contextlib.ExitStack() as stack:
        if not template.get("daemon"):
            stack.enter_context(execution.slots)
        try:
            stack.enter_context(_hold_device_lease(execution, template, node, files))
        except (UserError, Retryable) as error:
            message, code = describe_error(error)
            return Result("Failed", message.removeprefix("error: "), exit_code=code)
        if execution.stopping.is_set() or execution.find_end_reason(node.name):
            return Result("Failed", "stopped before it started")
        execution.start(node)
        patient = not set(command[:3]) & set(LIGHT)
        process = execution.launcher.start(command, env, execution.cwd, log, log, patient)
        with execution.watch_pod(node, process, grace):
            if template.get("daemon"):
                return _become_daemon(execution, container, node, process, grace, log_part)
            process.ended.wait()
    parameters, missing = files.read_parameters()
    result = Result("Succeeded" if process.code == 0 else "Failed", "", parameters, process.code)
    if process.code == 0 and missing:
        result.phase = "Error"
        result.message = f"did not write its output {', '.join(missing)}"
    if execution.stopping.is_set() and result.broken:
        result.message = "stopped"
    elif result.phase == "Failed":
        last_words = words.read_text(errors="replace").strip()
        # What a program that was asked to end had printed last is not why it ended.
        if not last_words and process.code != TERMINATED:
            last_words = log_part.read_last_line()
        result.message = describe_exit(process.code, last_words)
    return result


def _build_environment(
    execution: Execution, container: JsonMapping, node: Node, files: PodFilesystem
) -> dict[str, str]:
    """Build a pod's environment: the machine's, then the container's."""
    env = {
        **execution.env,
        "ARGO_PROGRESS_FILE": str(execution.workdir / "nodes" / node.id / "progress"),
    }
    values = (
        node.id,
        "local",
        node.id,
        socket.gethostname(),
        "local",
        execution.get_address(node),
        "127.0.0.1",
    )
    fields = dict(zip(FIELD_PATHS, values))
    for item in container.get("env", []):
        if (
            "value" in item and item["name"] != "TUNELOOP_IMAGE"
        ):  # the image is that of this machine, if any
            env[item["name"]] = files.translate(str(item["value"]))
        elif path := (item.get("valueFrom") or {}).get("fieldRef", {}).get("fieldPath"):
            env[item["name"]] = fields[path]
    return env


def _mount_token(execution: Execution, template: JsonMapping, files: PodFilesystem) -> None:
    """Link the tokens of the run's servers and of this machine's sandbox to where a template mounts their Secrets."""
    mounted = {
        mount["name"]: mount["mountPath"] for mount in template["container"].get("volumeMounts", ())
    }
    for volume in template.get("volumes", ()):
        if "secret" in volume:
            token = Path(os.environ.get(SANDBOX_TOKEN, os.devnull))
            if volume["secret"]["secretName"] != SANDBOX[0]:
                create_token_file(token := execution.workdir / "server-token")
            (files.local_path(mounted[volume["name"]]) / TOKEN_KEY).symlink_to(token.absolute())


class LogPart:
    """What one attempt adds to the log of its node, which earlier sessions of the run have written to as well."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._start = log.stat().st_size

    def read_last_line(self) -> str:
        """Return the end of the last line, as the reason of a failure."""
        with self._log.open("rb") as file:
            file.seek(max(self._start, self._log.stat().st_size - 2000))
            lines = file.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[-300:]


def _grace(template: JsonMapping, default: float) -> float:
    """Read terminationGracePeriodSeconds, which Argo has only in ``podSpecPatch``; it is `default` at most."""
    try:
        patch = json.loads(template.get("podSpecPatch") or "{}")
    except json.JSONDecodeError:  # it may be YAML; a cluster's reader takes care of it
        return default
    return min(float(patch.get("terminationGracePeriodSeconds", default)), default)


def _become_daemon(
    execution: Execution,
    container: JsonMapping,
    node: Node,
    process: Process,
    grace: float,
    log: LogPart,
) -> Result:
    probe = container.get("readinessProbe") or {}
    pause = min(float(probe.get("periodSeconds", 1)), 0.1)
    address = execution.get_address(node)
    over = process.ended.is_set()
    while not over and not _is_ready(probe, container, address):
        if execution.stopping.is_set():
            end_process(process, grace)
            return Result("Failed", "stopped", exit_code=process.code)
        over = process.ended.wait(pause)
    if over:
        reason = describe_exit(process.code, log.read_last_line())
        message = f"ended before it was ready: {reason}"
        return Result("Failed", message, exit_code=process.code)
    return Result(
        "Running", daemon=PodDaemon(execution, node, process, grace, log), address=address
    )


def _is_ready(probe: JsonMapping, container: JsonMapping, address: str) -> bool:
    get = probe.get("httpGet")
    if not get:
        return True
    named = {port.get("name"): port["containerPort"] for port in container.get("ports", [])}
    url = f"http://{address}:{named.get(get['port'], get['port'])}/{str(get.get('path', '')).removeprefix('/')}"
    try:
        return send_request("GET", url, timeout_s=float(probe.get("timeoutSeconds", 1)))[0] < 400
    except (OSError, Unanswered):
        return False


@contextlib.contextmanager
def _hold_device_lease(
    execution: Execution, template: JsonMapping, node: Node, files: PodFilesystem
) -> Iterator[None]:
    """Hold a device lease as the sidecar of `template` does on a cluster: its group's document lies in the store."""
    container = find_lease_sidecar(template)
    if container is None:
        yield
        return
    wanted = parse_arguments(container["args"])
    store = execution.parameters["store"]
    root = store if "://" in store else str(execution.cwd / store)
    url = f"{root}/{STORED_LEASES}/{wanted.group}"
    group = open_lease_group(url, who=wanted.run, policy=wanted.policy, patience=wanted.patience)
    if group.read().holder:
        execution.set_message(node, f"waits for the lease of group {wanted.group}")
    with group.acquire(stop=execution.stopping, file=files.local_path(wanted.file)):
        if node.message:
            execution.set_message(node, "")
        yield
