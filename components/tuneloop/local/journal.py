"""The files that a local run leaves in its work directory, and how to read them, also while it runs.

``nodes.jsonl``
    One JSON object a line, appended. ``{"kind": "workflow", …}`` (see `Workflow`) opens a session
    (phase ``Running``) and closes it; ``{"kind": "node", …}`` (see `Node`) is a whole node at that
    moment; the newest line of an id counts. A line ends with ``"sum"``, the xxh3-64 of what is
    before it; lines that are damaged or torn are skipped. A resumed run appends a session, and
    nodes of earlier ones are history, except where a run has several workflows: the sessions of
    those that succeeded and go on (output ``next``) count, too.
``ended.json``
    How the newest session that ended did, and how many bytes the journal had then. So one that was
    cut off since is told from one whose executor was killed.
``logs/<node id>.log``
    Standard output and error of a pod, raw.
``nodes/<node id>/``
    The pod's private directory: output files, progress file.
``lock``
    Held (flock) by the executor while it lives; shared, for a moment, by a process that looks for
    an executor.
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

DONE = ("Succeeded", "Failed", "Error", "Skipped", "Omitted")
"""Phases that a node does not leave. The others are ``Pending`` and ``Running``."""
BROKEN = ("Failed", "Error")
END = "ended.json"
KIND = b'{"kind": "node", '
NODE = KIND + b'"id": "'
SUM = b', "sum": "'
"""The start of a node's line, and the text before the digest at the end of any line."""


T = TypeVar("T")


@dataclass
class Node:
    """One node of a run, named as the Argo controller names it.

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
    """The run as a whole; `phase` is ``Running``, ``Succeeded``, ``Failed`` or ``Error``."""

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
    """Read the state of the run in `workdir`; None when nothing was run there."""
    path = workdir / "nodes.jsonl"
    # In this order: an executor writes how the run ended, then lets go.
    alive = _held(workdir)
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
        note = f"{path}: its last {missing} bytes are missing; how the run ended is read from {END}"
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
    path: Path, size: int, mtime_ns: int
) -> tuple[Workflow | None, dict[str, Node], list[str]]:
    """Read a journal, with the newest line of each node. Size and time are the key of the cache."""
    workflow = None
    parts: list[str] = []
    damaged = 0
    lines: dict[bytes, bytes] = {}
    kept: dict[bytes, bytes] = {}
    with path.open("rb") as file:
        for line in file:
            body, _, rest = line.rpartition(SUM)
            if rest != xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n':
                damaged += (
                    line.endswith(b"\n") and len(line) > 1
                )  # one without an end is being written
            elif line.startswith(NODE):
                lines[line[len(NODE) : line.index(b'"', len(NODE))]] = body
            else:
                try:
                    workflow = _parse(Workflow, body.partition(b", ")[2])
                except ValueError:
                    damaged += 1
                    continue
                if workflow.phase == "Running":
                    lines = dict(kept)
                elif workflow.phase == "Succeeded" and "next" in workflow.outputs:
                    parts.append(workflow.outputs["next"])
                    kept = dict(lines)
    nodes = dict[str, Node]()
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
    return cast(T, get_adapter(record).validate_json(b"{%b}" % fields, strict=True))


@functools.cache
def _report_once(line: str) -> None:
    """Print a line only once: no more than history is missing."""
    print_diagnostic(line, 0)


class Journal:
    """Appends records to ``nodes.jsonl``; each in one write, so a reader sees whole lines."""

    def __init__(self, workdir: Path) -> None:
        self._workdir = workdir
        self._file = os.open(workdir / "nodes.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if os.lseek(self._file, 0, os.SEEK_END):
            os.write(self._file, b"\n")  # ends the torn line of a killed run, if there is one

    def write(self, record: Node | Workflow) -> None:
        kind = "node" if isinstance(record, Node) else "workflow"
        body = json.dumps({"kind": kind, **asdict(record)}, ensure_ascii=False)[:-1].encode(
            errors="replace"
        )
        try:
            os.write(self._file, body + SUM + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n')
            if isinstance(record, Workflow) and record.phase != "Running":
                self._write_end(record)
        except OSError as error:  # this must not end stages
            _report_once(f"nodes.jsonl: {error.strerror}; what `status` says of this run is behind")

    def _write_end(self, workflow: Workflow) -> None:
        end = {"size": os.fstat(self._file).st_size, "workflow": asdict(workflow)}
        partial = self._workdir / f".{END}.{os.getpid()}"
        try:
            partial.write_bytes(dump_checked_json(end, END))
            partial.replace(self._workdir / END)
        finally:
            partial.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._file)


@contextmanager
def lock_workdir(workdir: Path) -> Iterator[None]:
    """Keep other executors off `workdir`. Raises UserError where another one is running there."""
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / "lock").open("a") as file:
        while not _try_lock(file, fcntl.LOCK_EX):
            if not _try_lock(file, fcntl.LOCK_SH):
                raise UserError(
                    "run", str(workdir), "is running already; wait for it, or `tuneloop stop` it"
                )
            fcntl.flock(
                file, fcntl.LOCK_UN
            )  # its holder only checks whether an executor is running
            time.sleep(0.01)
        yield


def _held(workdir: Path) -> bool:
    try:
        with (workdir / "lock").open() as file:
            return not _try_lock(file, fcntl.LOCK_SH)
    except OSError:
        return False


def _try_lock(file: IO[str], how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def outcome_code(phase: str, nodes: Mapping[str, Node], stopped_by: int | None) -> int:
    """Return a run's exit code.

    It is 0; 130 or 75 if a signal stopped it; 2, 3 or 75 if a pod failed it so; else 1.
    """
    if stopped_by is not None:
        return 130 if stopped_by == signal.SIGINT else 75
    if phase == "Succeeded":
        return 0
    return choose_exit_code(
        {n.exit_code for n in nodes.values() if n.type == "Pod" and _broke_the_run(n, nodes)}
    )


def _broke_the_run(node: Node, nodes: Mapping[str, Node]) -> bool:
    """Return whether all nodes above a node failed, too: no other attempt and no other task has
    made up for it.
    """
    return node.phase in BROKEN and (
        node.parent not in nodes or _broke_the_run(nodes[node.parent], nodes)
    )
