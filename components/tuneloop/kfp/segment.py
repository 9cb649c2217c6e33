"""Several iterations in one task: ``python -m tuneloop.kfp.segment --graph JSON --executor-input …``

The graph is that part of the Argo workflow which `tuneloop.local.segment` runs in one pod; `tuneloop.kfp.grain` wrote
it into the command. Each of its stages commits, and a task that is tried again finds what stands. What the task tells
KFP is said of its last iteration, and its curves go over all that it ran.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuneloop.core.artifacts import Manifest, find
from tuneloop.core.errors import UserError, failed
from tuneloop.core.program import flag
from tuneloop.core.store import Store
from tuneloop.kfp import previews
from tuneloop.kfp.io import Task
from tuneloop.kfp.retry import retry_in_process
from tuneloop.kfp.stage import ended, hand_over, skip, text
from tuneloop.local import segment

RESULTS = {"last_iteration": int, "mean_reward": float}
"""Output parameters: the last iteration that was done, and what its rollouts earned."""


def main(argv: Sequence[str]) -> int:
    """Run the iterations of an executor input; returns the exit code, that of the stage that failed if one did."""
    parser = argparse.ArgumentParser(prog="tuneloop.kfp.segment", description=__doc__)
    parser.add_argument("--graph", required=True, type=json.loads, help="a Workflow")
    parser.add_argument("--executor-input", required=True)
    given = parser.parse_args(argv)
    task = Task.read(given.executor_input)
    if (iteration := ended(task)) is not None:
        skip(task, "checkpoint", RESULTS, iteration)
        return 0
    with tempfile.TemporaryDirectory() as outputs:
        os.environ["TUNELOOP_OUTPUTS"] = outputs

        def run() -> int:
            try:
                return segment.run(given.graph, arguments(task, given.graph))
            except UserError as error:
                return failed(error)

        code = retry_in_process(run, lambda: " ".join(Store(task.parameters["url"]).keys("iterations")))
        if code == 0:
            tell(task, int(Path(outputs, "iteration").read_text()))
    return code


def arguments(task: Task, graph: Mapping[str, Any]) -> dict[str, str]:
    """Parameters of the graph, and of its entry: the task's over those that are written into the graph."""
    store, _, run = task.parameters["url"].rpartition("/")
    written = {each["name"]: each["value"] for each in graph["spec"]["arguments"]["parameters"]}
    refs = {name: handle["ref"] for name, handle in task.inputs.items()}
    return {
        **written,
        **{flag(name): text(value) for name, value in {**task.parameters, **refs, "store": store, "run": run}.items()},
    }


def tell(task: Task, last: int) -> None:
    """Tell KFP what was committed, of which the iteration `last` was the last."""
    urls = {i: f"{task.parameters['url']}/iterations/{i}" for i in range(int(task.parameters["iteration"]), last + 1)}
    rows = [
        {"iteration": i, **_made(f"{url}/reward").scalars, **_made(f"{url}/policy-update").scalars}
        for i, url in urls.items()
    ]
    policy, rewards = f"{urls[last]}/policy-update", f"{urls[last]}/reward"
    update, scored = _made(policy), _made(rewards)
    task.results = {"last_iteration": last, "mean_reward": scored.results["mean_reward"]}
    hand_over(task, "checkpoint", policy, update, scored.results["mean_reward"], last)
    task.describe("results", rows[-1])
    previews.page(task, "preview", rewards, scored)
    previews.confidence(task, "confidence", rewards, scored)
    task.write("curves", previews.charts(rows, "iteration"))
    task.finish()


def _made(url: str) -> Manifest:
    manifest = find(url)
    assert manifest is not None, f"the task has just committed {url}"
    return manifest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
