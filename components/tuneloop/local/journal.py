"""The files in the work directory of a local run, and how to read them, also while it runs.

``nodes.jsonl``
    One JSON object a line, appended. ``{"kind": "workflow", …}`` (see `Workflow`) opens a session
    (phase ``Running``) and closes it; ``{"kind": "node", …}`` (see `Node`) is a whole node at that
    moment; the newest line of an id counts. A line ends with ``"sum"``, the xxh3-64 of what is
    before it; lines that are damaged or torn are skipped. A resumed run appends a session, and
    nodes of earlier ones are history, except where a run has several workflows: the sessions of
    those that succeeded and go on (output ``next``) count, too.
``ended.json``
    The end of the newest session that has one, and the size of the journal then, in bytes. From it
    a reader sees whether a journal was cut off since, or its executor was killed.
``logs/<node id>.log``
    Standard output and error of a pod, raw.
``nodes/<node id>/``
    The pod's private directory: output files, progress file.
``lock``
    Held (flock) by the executor while it lives; shared, for a moment, by a process that looks for
    an executor.

The executor is the only writer. Readers are `status`, the page and the tracker, in other processes
and perhaps of a newer release: a field of `Node` or `Workflow` that is added needs a default.
"""

import fcntl
import functools
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TypeVar, cast

import xxhash
from pydantic import BaseModel, ValidationError

from tuneloop.core.artifacts import dump_checked_json, get_adapter, load_checked_json
from tuneloop.core.errors import UserError, choose_exit_code, print_diagnostic
from tuneloop.core.json_types import JsonObject
from tuneloop.core.wording import format_count

DONE = ("Succeeded", "Failed", "Error", "Skipped", "Omitted")
"""Phases that a node does not leave; ``Pending`` and ``Running`` are those before."""
BROKEN = ("Failed", "Error")
NODES = "nodes.jsonl"
END = "ended.json"
KIND = b'{"kind": "node", '
NODE = KIND + b'"id": "'
"""The start of a node's line. So `kind` is the first field of a record, and `id` the first of
`Node`."""
SUM = b', "sum": "'
"""The text before the digest at the end of any line."""

T = TypeVar("T")

STOPPED = "stopped by"
"""Begins the message of a workflow that a signal has ended. `runs/run_record.py: Run.phase` tells
by it that a run was interrupted and has not failed."""


@dataclass
class Node:
    """One node of a run, named as the Argo controller names it.

    `local/execution.py: Execution.create_node` makes those of this machine, and `cluster/watch.py:
    _read_node` those of a cluster.

    Attributes:
        id: unique in the run, stable over resumes, fit for a file name.
        name: the path through the graph, ``grpo.loop(0).update``.
        type: ``Pod DAG TaskGroup Retry Skipped``.
        phase: ``Pending Running`` or one of `DONE`.
        parent: id of the DAG, group or retry node it belongs to; empty at the root.
        daemoned: a daemon that is ready, and running as long as its scope.
        started, finished: Unix seconds; 0.0 when not yet.
        exit_code: of a pod; None when it has none (yet). Ended by signal n: 128 + n.
        progress: ``N/M`` as the pod wrote it to ``$ARGO_PROGRESS_FILE``.
        log: path of the log below the work directory; empty for nodes without a pod.
    """

    id: str
    name: str
    display_name: str
    template: str
    type: str
    phase: str = "Pending"
    parent: str = ""
    message: str = ""
    daemoned: bool = False
    started: float = 0.0
    finished: float = 0.0
    exit_code: int | None = None
    progress: str = ""
    log: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)


@dataclass
class Workflow:
    """The run as a whole; `phase` is ``Running``, ``Succeeded``, ``Failed`` or ``Error``.

    One with the output ``next`` (`workflow/settings.py: NEXT`) goes on in another workflow. It is
    found by this text here and in `runs/run_record.py: Run.phase`.
    """

    name: str
    phase: str = "Running"
    message: str = ""
    started: float = 0.0
    finished: float = 0.0
    pid: int = 0
    parameters: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)


@dataclass
class State:
    """A run as `read_state` found it; `workflow` is that of the newest session.

    Attributes:
        nodes: id → node of the newest session, and of workflows before it that go on, in the order
            they appeared.
        alive: an executor holds the work directory; a ``Running`` workflow that is not alive was
            killed.
        parts: in a run of several workflows (`execute_parts`), where each that succeeded is
            continued, as JSON.
        note: what is missing of the journal; empty where nothing is.
    """

    workflow: Workflow
    nodes: dict[str, Node]
    alive: bool
    parts: list[str] = field(default_factory=list)
    note: str = ""


class SessionEnd(BaseModel, frozen=True):
    """The newest end of a session: the `workflow` as it ended, and the `size` of the journal then,
    in bytes.
    """

    size: int
    workflow: Workflow


def read_state(workdir: Path) -> State | None:
    """Read the state of the run in `workdir`; None when nothing was run there.

    As long as the journal does not change, `nodes` and `parts` are the same objects as before
    (`_read_journal` is cached): a caller must not change them.
    """
    path = workdir / NODES
    # In this order: an executor writes how the run ended, and then unlocks the directory.
    alive = _is_locked(workdir)
    end = _read_end(workdir)
    if not path.exists():
        if end is None:
            return None
        note = f"{path}: is missing, so that the stages of the run are not known"
        _report_once(note)
        return State(end.workflow, {}, alive, note=note)
    status = path.stat()
    workflow, nodes, parts = _read_journal(path, status.st_size, status.st_mtime_ns)
    if end and status.st_size < end.size:
        missing = end.size - status.st_size
        note = f"{path}: it lacks the last {format_count(missing, 'byte')}; how the run ended is read from {END}"
        _report_once(note)
        return State(end.workflow, nodes, alive, parts, note)
    return State(workflow, nodes, alive, parts) if workflow else None


def _read_end(workdir: Path) -> SessionEnd | None:
    """Read how the newest session ended; None where none has, or where that file is damaged."""
    path = workdir / END
    if not path.exists():
        return None
    try:
        record = load_checked_json(path.read_bytes(), END, str(workdir), "delete it")
        return SessionEnd.model_validate(record)
    except (UserError, ValidationError):
        _report_once(f"{path}: is damaged; how the run ended is read from nodes.jsonl alone")
        return None


@functools.lru_cache(maxsize=1)
def _read_journal(
    path: Path,
    size: int,
    mtime_ns: int,
) -> tuple[Workflow | None, dict[str, Node], list[str]]:
    """Read a journal.

    Args:
        size, mtime_ns: of the file; they are part of the cache's key.

    Returns:
        The newest workflow, the nodes by id, and where each workflow that goes on is continued.
    """
    workflow = None
    parts: list[str] = []
    damaged = 0
    # Node id → its newest line. Nearly all lines are replaced by a later one, so only the rest is
    # parsed.
    lines: dict[bytes, bytes] = {}
    # The lines of the workflows that go on.
    lines_of_parts: dict[bytes, bytes] = {}
    with path.open("rb") as file:
        for line in file:
            body, _, digest = line.rpartition(SUM)
            if digest != xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n':
                # A line without an end is being written, and an empty one ends a torn one.
                damaged += line.endswith(b"\n") and len(line) > 1
            elif line.startswith(NODE):
                end = line.index(b'"', len(NODE))
                lines[line[len(NODE) : end]] = body
            else:
                try:
                    workflow = _parse(Workflow, body.partition(b", ")[2])
                except ValueError:
                    damaged += 1
                    continue
                if workflow.phase == "Running":
                    lines = dict(lines_of_parts)
                elif workflow.phase == "Succeeded" and "next" in workflow.outputs:
                    parts.append(workflow.outputs["next"])
                    lines_of_parts = dict(lines)
    nodes: dict[str, Node] = {}
    for body in lines.values():
        try:
            node = _parse(Node, body[len(KIND) :])
        except ValueError:
            damaged += 1
        else:
            nodes[node.id] = node
    if damaged:
        _report_once(f"{path}: {damaged} damaged lines are skipped")
    return workflow, nodes, parts


def _parse(record: type[T], fields: bytes) -> T:
    """Parse the fields of a line after its kind. Raises ValueError if they are not a record's."""
    return cast(T, get_adapter(record).validate_json(b"{%b}" % fields, strict=True))


@functools.cache
def _report_once(line: str) -> None:
    """Print a line only once: no more than history is missing."""
    print_diagnostic(line, 0)


class Journal:
    """Appends records to ``nodes.jsonl``; each in one write, so a reader sees whole lines."""

    def __init__(self, workdir: Path) -> None:
        self._workdir = workdir
        self._file = os.open(workdir / NODES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if os.lseek(self._file, 0, os.SEEK_END):
            # A run that was killed may have left a torn line, which this ends.
            os.write(self._file, b"\n")

    def write(self, record: Node | Workflow) -> None:
        """Append a record; a file system that refuses it does not end the run."""
        fields: JsonObject = {"kind": "node" if isinstance(record, Node) else "workflow"}
        fields |= asdict(record)
        # The digest takes the place of the closing brace.
        text = json.dumps(fields, ensure_ascii=False).removesuffix("}")
        body = text.encode(errors="replace")
        try:
            os.write(self._file, body + SUM + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n')
            if isinstance(record, Workflow) and record.phase != "Running":
                self._write_end(record)
        except OSError as error:
            _report_once(f"nodes.jsonl: {error.strerror}; what `status` says of this run is behind")

    def _write_end(self, workflow: Workflow) -> None:
        """Write ``ended.json`` in one step, so that a reader never sees a part of it."""
        end = {"size": os.fstat(self._file).st_size, "workflow": asdict(workflow)}
        partial = self._workdir / f".{END}.{os.getpid()}"
        try:
            partial.write_bytes(dump_checked_json(end, END))
            partial.replace(self._workdir / END)
        finally:
            partial.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; nothing is written after this."""
        os.close(self._file)


@contextmanager
def lock_workdir(workdir: Path) -> Iterator[None]:
    """Keep other executors off `workdir`. Raises UserError where another one is running there."""
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / "lock").open("a") as file:
        while not _try_lock(file, fcntl.LOCK_EX):
            if not _try_lock(file, fcntl.LOCK_SH):
                remedy = "is running already; wait for it, or `tuneloop stop` it"
                raise UserError("run", str(workdir), remedy)
            # A shared lock could be had, so its holder only looks for an executor.
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(0.01)
        yield


def _is_locked(workdir: Path) -> bool:
    """Return whether an executor holds the work directory."""
    try:
        with (workdir / "lock").open() as file:
            return not _try_lock(file, fcntl.LOCK_SH)
    except OSError:
        return False


def _try_lock(file: IO[str], operation: int) -> bool:
    """Lock a file, shared or exclusive; return False, and do not wait, if it is locked."""
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def outcome_code(phase: str, nodes: Mapping[str, Node], stopped_by: int | None) -> int:
    """Return a run's exit code.

    It is 0; 130 or 75 if a signal stopped it; 2, 3 or 75 if a pod failed it so; else 1. That of a
    run on a cluster is `cluster/submit.py: exit_code`.
    """
    if stopped_by is not None:
        return 130 if stopped_by == signal.SIGINT else 75
    if phase == "Succeeded":
        return 0
    pods = [node for node in nodes.values() if node.type == "Pod"]
    return choose_exit_code({pod.exit_code for pod in pods if _has_broken_run(pod, nodes)})


def _has_broken_run(node: Node, nodes: Mapping[str, Node]) -> bool:
    """Return whether a node and all nodes above it failed.

    Else another attempt, or another task, has made up for it.
    """
    if node.phase not in BROKEN:
        return False
    return node.parent not in nodes or _has_broken_run(nodes[node.parent], nodes)
