"""Pods of a local run: containers and daemons as process groups; their outputs and readiness.

Which fields of a pod are accepted here is decided before a run by `workflow/manifest.py:
check_workflow`, with the list ``workflow/local_fields.yaml``: a field that is read here has to be
in that list. Init containers and sidecars are not run; an extension does what they do
(`_hold_pod`).
"""

import contextlib
import json
import os
import re
import shutil
import socket
import threading
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from tuneloop.core import store_credentials
from tuneloop.core.ends import TERMINATED, describe_exit, name_signal
from tuneloop.core.errors import TERMINATION_LOG, Retryable, UserError, describe_error
from tuneloop.core.http import Unanswered, send_request
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.server_token import create_token_file
from tuneloop.core.store_credentials import IDENTITIES
from tuneloop.local.execution import Execution
from tuneloop.local.journal import Node
from tuneloop.local.processes import Process, end_process
from tuneloop.local.results import Result, list_outputs
from tuneloop.workflow.pod_hook import MachinePod, list_pod_hooks
from tuneloop.workflow.settings import SANDBOX, SANDBOX_TOKEN, TOKEN_KEY

LIGHT = ("tuneloop.stages.data_prep", "tuneloop.stages.reward", "tuneloop.stages.export")
"""Stages that import no torch: they do not wait for the warm process. A stage that comes to
import it has to leave this list, else it imports it afresh while the warm process still starts."""
PODS_ALONE = {
    "TUNELOOP_IMAGE",
    store_credentials.VARIABLE,
    *(name for identity in IDENTITIES.values() for name in identity.variables),
}
"""Variables of pods that are left out here: a run records the image of this machine, if any, and
opens stores by the credentials of this machine."""
SHARED = ("/tmp", "/dev/shm")
"""Directories that stay this machine's, also where a template mounts an emptyDir at them."""


class PodFilesystem:
    """The files of one pod, below `root`, which is emptied first.

    All pods of this machine share its file system. So each path that a template declares (an output
    parameter's, an emptyDir's) is mapped below `root`, by rewriting it in the command, the
    arguments and the environment. A directory that holds declared outputs is mapped where it is a
    whole value, as in ``TUNELOOP_OUTPUTS=/tmp/tuneloop/outputs``.
    """

    def __init__(self, root: Path, template: JsonMapping) -> None:
        self.root = root
        self._sources_by_output: dict[str, JsonMapping] = {}
        for parameter in list_outputs(template):
            source = parameter.get("valueFrom", {})
            if "path" in source:
                self._sources_by_output[parameter["name"]] = source
        outputs = {source["path"] for source in self._sources_by_output.values()}
        mounts = template["container"].get("volumeMounts", [])
        directories = {mount["mountPath"].rstrip("/") for mount in mounts}.difference(SHARED)
        # Longer paths first, as one may begin with another.
        self._paths = sorted(outputs | directories, key=len, reverse=True)
        self._parents = {str(PurePosixPath(path).parent) for path in outputs}
        self._parents.difference_update(SHARED, "/")
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True, exist_ok=True)
        for path in outputs:
            self.local_path(path).parent.mkdir(parents=True, exist_ok=True)
        for path in directories:
            self.local_path(path).mkdir(parents=True, exist_ok=True)

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
        # A path counts only whole: neither as the end nor as the beginning of a longer name.
        names = "|".join(map(re.escape, self._paths))
        pattern = rf"(?<![\w./-])(?:{names})(?![\w-])"
        return re.sub(pattern, lambda match: str(self.local_path(match[0])), text)

    def read_parameters(self) -> tuple[dict[str, str], list[str]]:
        """Read the output parameters that the pod wrote.

        Returns:
            Their values, or the defaults; and the names of those that have neither.
        """
        values: dict[str, str] = {}
        missing: list[str] = []
        for name, source in self._sources_by_output.items():
            file = self.local_path(source["path"])
            if file.exists():
                values[name] = file.read_text().removesuffix("\n")
            elif "default" in source:
                values[name] = str(source["default"])
            else:
                missing.append(name)
        return values, missing


class PodDaemon:
    """A pod that outlives its node's start; it ends with the graph that started it.

    Attributes:
        over: is set once the pod has ended.
        result: how it has ended then.
    """

    def __init__(
        self,
        execution: Execution,
        node: Node,
        process: Process,
        grace: float,
        log: "LogPart",
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
        """Wait for the end of the process, and settle the node with it."""
        self._process.ended.wait()
        code = self._process.code
        self.result.exit_code = code
        if not self._closing:
            self.result.phase = "Failed"
            self.result.message = "stopped"
            if not self._execution.stopping.is_set():
                reason = f"server died: {name_signal(code) or describe_exit(code)}"
                last_words = self._log.read_last_line()
                self.result.message = f"{reason}: {last_words}" if last_words else reason
        self._execution.settle(self._node, self.result)
        self.over.set()


def run_pod(execution: Execution, template: JsonMapping, node: Node) -> Result:
    """Run the container of a template whose tags are substituted already.

    Returns:
        The result with the pod's outputs, once it has ended; of a daemon, once it is ready.

    Raises:
        RuntimeError: the process that starts pods has ended.
    """
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
    words = list(container.get("command", [])) + list(container.get("args", []))
    command = [_expand_variables(files.translate(word), env) for word in words]
    termination_log = home / "termination-log"
    termination_log.write_text("")
    env[TERMINATION_LOG] = str(termination_log)
    grace = _read_grace(template, execution.grace)
    with contextlib.ExitStack() as stack:
        # A daemon runs as long as its graph, so it would keep a slot from the tasks that need it.
        if not template.get("daemon"):
            stack.enter_context(execution.slots)
        try:
            stack.enter_context(_hold_pod(execution, template, node, files))
        except (UserError, Retryable) as error:
            message, code = describe_error(error)
            return Result("Failed", message.removeprefix("error: "), exit_code=code)
        if execution.stopping.is_set() or execution.find_end_reason(node.name):
            return Result("Failed", "stopped before it started")
        execution.start(node)
        # Those that import torch gain more by the warm process than they lose by waiting for it.
        patient = not set(command[:3]) & set(LIGHT)
        process = execution.launcher.start(command, env, execution.cwd, log, log, patient)
        with execution.watch_pod(node, process, grace):
            if template.get("daemon"):
                return _become_daemon(execution, container, node, process, grace, log_part)
            process.ended.wait()
    parameters, missing = files.read_parameters()
    result = Result(
        phase="Succeeded" if process.code == 0 else "Failed",
        parameters=parameters,
        exit_code=process.code,
    )
    if process.code == 0 and missing:
        result.phase = "Error"
        result.message = f"did not write its output {', '.join(missing)}"
    # A pod that a stopped run has ended is no fault of its program.
    if execution.stopping.is_set() and result.broken:
        result.message = "stopped"
    elif result.phase == "Failed":
        last_words = termination_log.read_text(errors="replace").strip()
        # What a program that was asked to end had printed last is not why it ended.
        if not last_words and process.code != TERMINATED:
            last_words = log_part.read_last_line()
        result.message = describe_exit(process.code, last_words)
    return result


def _expand_variables(text: str, env: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` as Kubernetes does: ``$$`` is a dollar, and an unknown name stays."""

    def expand(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return env.get(match[1], match[0])

    return re.sub(r"\$\$|\$\((\w+)\)", expand, text)


def _build_environment(
    execution: Execution,
    container: JsonMapping,
    node: Node,
    files: PodFilesystem,
) -> dict[str, str]:
    """Build a pod's environment: the machine's, then the container's.

    Of ``envFrom`` nothing is taken: it names Secrets and ConfigMaps, which this machine lacks.
    """
    env = dict(execution.env)
    env["ARGO_PROGRESS_FILE"] = str(execution.workdir / "nodes" / node.id / "progress")
    # What the downward API tells a pod. `FIELD_PATHS` of `workflow/manifest.py` lists the same
    # fields, and refuses any other.
    fields = {
        "metadata.name": node.id,
        "metadata.namespace": "local",
        "metadata.uid": node.id,
        "spec.nodeName": socket.gethostname(),
        "spec.serviceAccountName": "local",
        "status.podIP": execution.get_address(node),
        "status.hostIP": "127.0.0.1",
    }
    for variable in container.get("env", []):
        name = variable["name"]
        source = variable.get("valueFrom") or {}
        path = source.get("fieldRef", {}).get("fieldPath")
        if "value" in variable and name not in PODS_ALONE:
            env[name] = files.translate(str(variable["value"]))
        elif path:
            env[name] = fields[path]
    return env


def _mount_token(execution: Execution, template: JsonMapping, files: PodFilesystem) -> None:
    """Link tokens to where a template mounts their Secrets.

    They are those of the run's servers and of this machine's sandbox.
    """
    mounts = template["container"].get("volumeMounts", [])
    directories = {mount["name"]: mount["mountPath"] for mount in mounts}
    for volume in template.get("volumes", []):
        if "secret" in volume:
            if volume["secret"]["secretName"] == SANDBOX[0]:
                token = Path(os.environ.get(SANDBOX_TOKEN, os.devnull))
            else:
                token = execution.workdir / "server-token"
                create_token_file(token)
            directory = files.local_path(directories[volume["name"]])
            (directory / TOKEN_KEY).symlink_to(token.absolute())


class LogPart:
    """The part of its node's log that one attempt writes.

    Earlier sessions of the run have written to the same file.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._start = log.stat().st_size

    def read_last_line(self) -> str:
        """Return the end of the last line, as the reason of a failure."""
        # A log may have gigabytes, so its end is read alone.
        size = self._log.stat().st_size
        with self._log.open("rb") as file:
            file.seek(max(self._start, size - 2000))
            text = file.read().decode(errors="replace")
        for line in reversed(text.split("\n")):
            if line.strip():
                return line.strip()[-300:]
        return ""


def _read_grace(template: JsonMapping, default: float) -> float:
    """Return the seconds between SIGTERM and SIGKILL, at most `default`.

    Argo has terminationGracePeriodSeconds only in ``podSpecPatch``.
    """
    try:
        patch = json.loads(template.get("podSpecPatch") or "{}")
    except json.JSONDecodeError:
        # A patch may be YAML, which only somebody else's workflow has.
        return default
    grace = float(patch.get("terminationGracePeriodSeconds", default))
    return min(grace, default)


def _become_daemon(
    execution: Execution,
    container: JsonMapping,
    node: Node,
    process: Process,
    grace: float,
    log: LogPart,
) -> Result:
    """Wait until the readiness probe of a daemon succeeds, or the daemon has ended."""
    probe = container.get("readinessProbe") or {}
    pause = min(float(probe.get("periodSeconds", 1)), 0.1)
    address = execution.get_address(node)
    has_ended = process.ended.is_set()
    while not has_ended and not _is_ready(probe, container, address):
        if execution.stopping.is_set():
            end_process(process, grace)
            return Result("Failed", "stopped", exit_code=process.code)
        has_ended = process.ended.wait(pause)
    if has_ended:
        reason = describe_exit(process.code, log.read_last_line())
        message = f"ended before it was ready: {reason}"
        return Result("Failed", message, exit_code=process.code)
    daemon = PodDaemon(execution, node, process, grace, log)
    return Result("Running", daemon=daemon, address=address)


def _is_ready(probe: JsonMapping, container: JsonMapping, address: str) -> bool:
    """Return whether a server answers its readiness probe; one without a probe is ready."""
    request = probe.get("httpGet")
    if not request:
        return True
    # A probe names its port by number, or as the container does.
    numbers = {port.get("name"): port["containerPort"] for port in container.get("ports", [])}
    port = numbers.get(request["port"], request["port"])
    path = str(request.get("path", "")).removeprefix("/")
    url = f"http://{address}:{port}/{path}"
    timeout_s = float(probe.get("timeoutSeconds", 1))
    try:
        status, _ = send_request("GET", url, timeout_s=timeout_s)
    except (OSError, Unanswered):
        return False
    # As the kubelet has it: any status from 200 to 399 is a success.
    return status < 400


def _hold_pod(
    execution: Execution, template: JsonMapping, node: Node, files: PodFilesystem
) -> contextlib.ExitStack:
    """Hold what extensions need while a pod runs, until the stack that is returned is closed.

    Raises:
        UserError, Retryable: as `tuneloop.workflow.pod_hook.PodHook.hold_pod`.
    """

    def show_message(text: str) -> None:
        if node.message != text:
            execution.set_message(node, text)

    # A workflow of somebody else's may have no such parameter.
    store = execution.parameters.get("store", "")
    pod = MachinePod(
        template=template,
        store=store if "://" in store else str(execution.cwd / store),
        stopping=execution.stopping,
        show_message=show_message,
        local_path=files.local_path,
    )
    with contextlib.ExitStack() as stack:
        for hook in list_pod_hooks():
            stack.enter_context(hook.hold_pod(pod))
        return stack.pop_all()
