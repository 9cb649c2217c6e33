"""Whether a run that was disturbed and has ended is the undisturbed one, and left nothing behind."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.certify.attempts import Violation, run_apart
from tuneloop.core.store import Store
from tuneloop.runs.audit import audit_run, compute_root
from tuneloop.runs.retention import delete_leftovers, find_leftovers
from tuneloop.runs.run_record import Run

CHANCE = re.compile(r"data-[0-9a-f]{12,16}")
SPARED = ("/state/", "weights/published/")
"""What an attempt writes after it has committed, and no later one writes again: the trainer's state, without which
updates are repeated (docs/ends.md), and how long publishing took."""

LOCK = ".lock"
"""Of a key that is swapped: where the store is a directory, it stays."""


@dataclass(frozen=True)
class Standing:
    """What stands below a run's URL.

    Attributes:
        root: of the audit.
        keys: all files, without what is drawn by chance.
        left: how many places of attempts that died `gc` named and deleted.
        problems: whatever does not fit, a line each.
    """

    root: str
    keys: tuple[str, ...]
    left: int = 0
    problems: tuple[str, ...] = ()


def inspect_run(name: str, store: str) -> Standing:
    """Audit a run, delete what `gc` finds, and audit it again."""
    run, problems = Run.open(name, store), list[str]()
    problems += [
        f"audit: {proof.key}: {each}" for proof in audit_run(run) for each in proof.problems
    ]
    root = compute_root(run)
    leftovers = find_leftovers(run, idle=-60)
    delete_leftovers(run, leftovers)
    if leftovers:
        run = Run.open(name, store)
        problems += [
            f"after gc: {proof.key}: {each}" for proof in audit_run(run) for each in proof.problems
        ]
        if compute_root(run) != root:
            problems.append(f"gc changed the root from {root}")
    files = Store(run.url).keys("")
    keys = tuple(sorted({CHANCE.sub("data", key) for key in files if not key.endswith(LOCK)}))
    problems += [f"still locked: {path}" for path in _find_held_locks(run)]
    return Standing(root, keys, len(leftovers), tuple(problems))


def inspect_apart(
    name: str, store: str, scratch: Path, prepare: Callable[[], int | None] = lambda: None
) -> Standing:
    """Inspect a run in a process of its own, which does `prepare` first. Raises `Violation` where that fails."""
    told = scratch / "standing"

    def work() -> int:
        if code := prepare():
            return code
        told.write_text(json.dumps(asdict(inspect_run(name, store))))
        return 0

    ended = run_apart(work, scratch)
    if ended.code:
        raise Violation(f"a look at the run ended with {ended.code}: {ended.output}")
    found = json.loads(told.read_text())
    return Standing(found["root"], tuple(found["keys"]), found["left"], tuple(found["problems"]))


def _find_held_locks(run: Run) -> list[str]:
    held = []
    locks = run.directory.rglob("*lock") if run.directory.is_dir() else ()
    for path in locks:
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                held.append(str(path))
    return held


def compare(found: Standing, calm: Standing) -> list[str]:
    """List what differs from the undisturbed run."""
    problems = list(found.problems)
    if found.root != calm.root:
        problems.append(f"the root is {found.root}, of the undisturbed run {calm.root}")
    problems += [f"leaked: {key}" for key in sorted({*found.keys} - {*calm.keys})]
    problems += [
        f"missing: {key}" for key in sorted({*calm.keys} - {*found.keys}) if not _is_spared(key)
    ]
    return problems


def _is_spared(key: str) -> bool:
    return any(part in key for part in SPARED)


def list_temporary(tmp: Path) -> list[str]:
    """List what attempts have left in their temporary directory, but for what the workflow engine gives a pod."""
    return sorted(path.name for path in tmp.iterdir() if not path.name.startswith("outputs-"))
