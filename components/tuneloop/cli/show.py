"""Tables of a run, why it failed, and its page written."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tuneloop.argo.state import BROKEN, Node
from tuneloop.cli.live import iteration_of, label
from tuneloop.errors import EXIT_USER, FAILED_FOR_NOW, INTERRUPTED, UNAVAILABLE
from tuneloop.runs import Run
from tuneloop.store import normalize
from tuneloop.summary import clock, newest, size

if TYPE_CHECKING:
    from rich.table import Table

    from tuneloop.argo.executor import Outcome

NAMED = tuple(f"{name}:" for name in ("error", "gave up", INTERRUPTED, UNAVAILABLE, FAILED_FOR_NOW))
"""How a last line begins that names the class of its end."""


def stages(run: Run) -> Table:
    """One row a stage: phase, how often it ended, seconds, retries, its newest result."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "phase", "done", "seconds", "retries", "newest"):
        table.add_column(name, justify="right" if name in ("done", "seconds", "retries") else "left", no_wrap=True)
    pods = [node for node in (run.state.nodes.values() if run.state else ()) if node.type == "Pod"]
    order = dict.fromkeys([*(e.stage for e in run.entries), *(label(node) for node in pods)])
    gone = run.phase == "interrupted"
    for stage in order:
        entries = [e for e in run.entries if e.stage == stage]
        mine = [node for node in pods if label(node) == stage]
        phase = mine[-1].phase if mine else "Committed"
        if mine and phase in ("Running", "Pending"):
            phase = "Interrupted" if gone else "Ready" if mine[-1].daemoned else phase
            phase += f" ({mine[-1].progress})" if mine[-1].progress else ""
        calls = {(iteration_of(node), node.parent if node.display_name.endswith(")") else node.id) for node in mine}
        seconds = sum(e.seconds for e in entries)
        table.add_row(
            stage,
            phase,
            str(len(entries)) if entries else "",
            f"{seconds:.1f}" if entries else "",
            str(len(mine) - len(calls)) if mine else "",
            newest(entries[-1]) if entries else mine[-1].message if mine else "",
        )
    return table


def failure(run: Run, outcome: Outcome) -> str:
    """Which stage ended the run and its last words, in one line."""
    node = culprit(outcome.nodes.values())
    if node is None:
        return f"error: {outcome.message}"
    path = run.directory / node.log
    lines = path.read_text(errors="replace").split("\n") if node.log and path.is_file() else []
    said = next((line.strip() for line in reversed(lines) if line.strip()), node.message)
    at = there(run.store_url)
    then = f"`tuneloop resume {run.name}{at}`"
    if outcome.exit_code == EXIT_USER:
        run.refresh()
        then += ", or another run with other settings" if run.iteration else ", or run it again with other settings"
    return blamed(node, said, f"tuneloop logs {run.name} {label(node)}{at}", then)


def culprit(nodes: Iterable[Node]) -> Node | None:
    """The pod that failed last."""
    broken = [node for node in nodes if node.type == "Pod" and node.phase in BROKEN]
    return max(broken, key=lambda n: n.finished, default=None)


def blamed(node: Node, said: str, look: str, then: str) -> str:
    """A stage's last words as an error, the command that shows more of them, and how to go on."""
    kind = "" if said.startswith(NAMED) else "error: "
    return f"{kind}{said} (in {label(node)}; see `{look}`, then {then})"


def there(store: str) -> str:
    """The option that names a store, where it is not the default."""
    return "" if normalize(store) == normalize("runs") else f" --store {store.removeprefix('file://')}"


def weights(run: Run) -> Table:
    """The checkpoints of a run: version, maker, digest, bytes, age, who used it, which is newest."""
    import time

    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("version", "made by", "digest", "model", "whole", "age", "sampled by"):
        table.add_column(
            name, justify="right" if name in ("version", "model", "whole", "age") else "left", no_wrap=True
        )
    held = run.checkpoints
    for entry in held:
        files = entry.manifest.files
        users = [e.key for e in run.of("rollout", "evaluate") if run.policy_of(e) is entry]
        mark = " latest" if entry is held[-1] else ""
        table.add_row(
            f"{entry.manifest.facts['version']}{mark}",
            entry.key,
            entry.manifest.digest.removeprefix("xxh3-128:")[:12],
            size(sum(f.size for n, f in files.items() if n.startswith("model/"))),
            size(sum(f.size for f in files.values())),
            clock(time.time() - entry.finished) if entry.started else "",
            ", ".join(users),
        )
    return table


def report(run: Run, output: Path | None = None) -> Path:
    """Write the run's page, by default beside its local state."""
    from tuneloop.errors import UserError
    from tuneloop.report import page

    path = output or run.directory / "report.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(run))
    except OSError as error:
        raise UserError("--output", str(path), f"cannot be written ({error.strerror})") from error
    return path


def show(table: Table) -> None:
    """Print a table: as wide as the terminal, or as it likes where nobody looks."""
    from rich.console import Console

    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)
