"""A run of several workflows on this machine: what `tuneloop.cluster.continue_run` does on a cluster, by the local
executor.

    outcome = execute_parts(workflow, workdir=Path("runs/a"), arguments={"run": "a", "store": "runs"})

Each part is executed by itself, under the name it would have on a cluster; one work directory holds them all, and
`tuneloop.local.journal.read_state` shows them as one run. A resumed run starts at the part that did not end well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuneloop.local.executor import Outcome, execute_workflow
from tuneloop.local.journal import read_state
from tuneloop.workflow.settings import LOCAL, NEXT


def execute_parts(
    workflow: Mapping[str, Any],
    *,
    workdir: Path,
    arguments: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> Outcome:
    """Run `workflow`, and those that it goes on in, to the end.

    Args:
        workdir, arguments, env, options: as `tuneloop.local.executor.execute_workflow` takes them.

    Returns:
        that of the last part.

    Raises:
        UserError: as `execute_workflow`.
    """
    state = read_state(workdir)
    done = list(state.parts) if state else []
    metadata = workflow.get("metadata", {})
    run = str(metadata.get("name") or metadata.get("generateName", "run-").rstrip("-"))
    while True:
        start = json.loads(done[-1]) if done else {"entrypoint": None, "arguments": {}}
        name = f"{run}-{len(done) + 1}" if done else run
        outcome = execute_workflow(
            {**workflow, "metadata": {**metadata, "name": name}},
            workdir=workdir,
            arguments={**(arguments or {}), **start["arguments"]},
            entrypoint=start["entrypoint"],
            env={**(env or {}), LOCAL: "1"},
            **options,
        )
        if outcome.phase != "Succeeded" or NEXT not in outcome.outputs:
            return outcome
        done.append(outcome.outputs[NEXT])
