"""Several stages in one pod: the local executor, at work on a graph that the pod was given.

    python -m tuneloop.local.segment --graph JSON --argument iteration=1 --argument policy=REF …

The graph is a Workflow as `tuneloop.argo.multi_stage_pod` wrote it; its output parameters become the pod's. Its stages
run one after another in this process, each committed and resumable by itself: a pod that takes over finds what stands
and goes on behind it. Exit codes are those of a stage.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tuneloop.core.ends import strip_exit
from tuneloop.core.errors import INTERRUPTED, UserError, failed, write_termination_message
from tuneloop.core.program import write_outputs
from tuneloop.local.executor import Outcome, execute
from tuneloop.local.journal import Node
from tuneloop.local.resident import Resident


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run as a program; never returns."""
    parser = argparse.ArgumentParser(prog="python -m tuneloop.local.segment", description=__doc__)
    parser.add_argument("--graph", required=True, metavar="JSON", help="a Workflow")
    parser.add_argument("--argument", action="append", default=[], metavar="NAME=VALUE", help="of its entry template")
    flags = parser.parse_args(argv)
    try:
        code = run(json.loads(flags.graph), dict(given.partition("=")[::2] for given in flags.argument))
    except UserError as error:
        code = failed(error)
    sys.exit(code)


def run(graph: Mapping[str, Any], arguments: Mapping[str, str]) -> int:
    """Run `graph` to its end, write its outputs, and return the exit code; to be called by the main thread.

    Raises:
        UserError: a graph that the executor can not run.
    """
    resident = Resident()
    ended: list[Outcome | BaseException] = []
    with tempfile.TemporaryDirectory() as work:

        def follow() -> None:
            about: Any = {"launcher": resident, "parallelism": 1, "on_node": tell, "entrypoint": entry}
            try:
                ended.append(execute(graph, workdir=Path(work), arguments=arguments, **about))
            except BaseException as error:
                ended.append(error)
            finally:
                resident.close()

        entry, tell = graph["spec"]["entrypoint"], Telling(arguments)
        previous: dict[int, Any] = {}

        def stop(number: int, frame: object) -> None:
            resident.stop()
            if callable(before := previous.get(number)) and before is not signal.default_int_handler:
                before(number, frame)

        for number in map(int, (signal.SIGTERM, signal.SIGINT)):
            previous[number] = signal.signal(number, stop)
        thread = threading.Thread(target=follow)
        thread.start()
        resident.serve()
        thread.join()
        for number, handler in previous.items():
            signal.signal(number, handler)
    outcome = ended[0]
    if isinstance(outcome, BaseException):
        raise outcome
    if outcome.phase == "Succeeded":
        write_outputs(next(node.outputs for node in outcome.nodes.values() if not node.parent))
    else:
        print(f"segment: {outcome.phase.lower()}: {outcome.message}", file=sys.stderr, flush=True)
        stopped = f"{INTERRUPTED}: segment: stopped by a signal"
        write_termination_message(stopped if resident.stopped.is_set() else strip_exit(outcome.message))
    return outcome.exit_code


class Telling:
    """Says which stages have ended, and how many iterations, for people and in Argo's progress file."""

    def __init__(self, arguments: Mapping[str, str]) -> None:
        first, last = int(arguments.get("iteration", 1)), int(arguments.get("iterations", 0))
        width = int(arguments.get("per-workflow", 1))
        self.total = max(1, min(last, first + -first % width) - first + 1)
        self.done: set[str] = set()
        self.file = os.environ.get("ARGO_PROGRESS_FILE")

    def __call__(self, node: Node) -> None:
        if node.type != "Pod" or node.phase != "Succeeded" or node.id in self.done:
            return
        self.done.add(node.id)
        results = "  ".join(f"{k} {v}" for k, v in node.outputs.items() if "@" not in v)
        print(f"segment: {node.display_name}  {node.finished - node.started:.2f} s  {results}", file=sys.stderr)
        if node.template == "policy-update" and self.file:
            count = sum(name.startswith("policy-update") for name in self.done)
            Path(self.file).write_text(f"{min(count, self.total)}/{self.total}")


if __name__ == "__main__":
    main()
