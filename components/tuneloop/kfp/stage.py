"""Run a stage as a task of KFP: ``python -m tuneloop.kfp.stage tuneloop.stages.sft:sft --executor-input …``

The stage's program runs with the flags of the executor input and ends with its own exit code; a stage of several nodes
is a JobSet, which this program launches and follows. Then the committed artifact is reported to KFP: a *handle*
(reference, digest, version and results, as the metadata of an artifact that holds the manifest), scalars, a preview,
curves. The weights stay in the store.

**The end of a loop.** KFP cannot leave a loop early, so the stages of unrolled iterations after its end run as empty
tasks. The `policy_update` of the iteration whose rewards reach ``target_reward`` marks its handle
``target_reached_at``; a later stage with such an input does nothing, and passes only the policy on. The same applies to
the stages after a loop that another run continues, by the mark ``continued_after``."""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import xxhash

from tuneloop.argo.jobset import build_jobset, pod_spec, ranks_env
from tuneloop.argo.pod_fields import find_role
from tuneloop.cluster.launch import main as follow_job
from tuneloop.core import plugins
from tuneloop.core.artifacts import Manifest, find_manifest, split_ref
from tuneloop.core.component import Component
from tuneloop.core.json_types import JsonObject
from tuneloop.core.program import encode_flags, encode_value
from tuneloop.core.store import Store
from tuneloop.kfp import previews
from tuneloop.kfp.io import Task
from tuneloop.kfp.retry import retry_in_process
from tuneloop.workflow.loop_state import LoopState
from tuneloop.workflow.settings import Cluster

URL = "url"
TARGET = "target_reward"
"""Parameters of the adapter itself: where the output is committed; the mean reward that ends a loop."""
REACHED = "target_reached_at"
CONTINUED = "continued_after"
"""Marks of a handle that name an iteration: the one that ended the loop; the one after which another run continues."""


def main(argv: Sequence[str]) -> int:
    """Run a stage (``module:attribute``) for an executor input, here or as a JobSet; return the exit code."""
    parser = argparse.ArgumentParser(prog="tuneloop.kfp.stage", description=__doc__)
    parser.add_argument("stage")
    parser.add_argument("--executor-input", required=True)
    parser.add_argument(
        "--job",
        type=json.loads,
        help="nodes, processes, cluster and namespace of a JobSet to launch",
    )
    given = parser.parse_args(argv)
    stage: Component = plugins.load_variant("stages", given.stage)
    task = Task.read(given.executor_input)
    if reason := find_reason_to_skip(task):
        report_skipped_stage(stage, task, reason)
        return 0
    url = task.parameters[URL]

    def run() -> int:
        return (given.job and launch_jobset(stage, task, **given.job)) or stage.run(
            build_stage_args(stage, task)
        )

    if code := retry_in_process(run, lambda: " ".join(Store(f"{url}/resume").keys()), url=url):
        return code
    if int(os.environ.get("RANK", "0")) == 0:
        manifest = find_manifest(url)
        assert manifest is not None, "the stage has just committed it"
        report_commit(stage, task, manifest)
    return 0


def launch_jobset(
    stage: Component,
    task: Task,
    *,
    nodes: int,
    processes: int,
    cluster: JsonObject,
    namespace: str,
) -> int:
    """Run the stage as a JobSet, unless its output is committed; return the exit code. The JobSet is named after the
    output, so that an evicted launcher finds the JobSet that it has started."""
    if find_manifest(url := task.parameters[URL]) is not None:
        return 0
    wanted = Cluster(**cluster)
    name = f"{stage.template}-{xxhash.xxh3_64_hexdigest(url.encode())}"
    env = ranks_env(name, nodes, processes)
    role = find_role(stage, task.parameters)
    pod = pod_spec(
        stage.image, role, stage.command(nodes=nodes), build_stage_args(stage, task), wanted, env
    )
    queue = wanted.build_queue_labels(role)
    labels = {"app.kubernetes.io/part-of": "tuneloop", "app.kubernetes.io/component": stage.image}
    manifest = build_jobset(name, pod, nodes, labels=labels, queue=queue, stage=stage.template)
    return follow_job(["--namespace", namespace, "--manifest", json.dumps(manifest)])


def build_stage_args(stage: Component, task: Task) -> list[str]:
    """Build the command line of the stage's program."""
    given: JsonObject = {
        name: task.inputs[name]["ref"] for name in stage.inputs if name in task.inputs
    }
    given[stage.output] = task.parameters[URL]
    given |= {k: _whole(v) for k, v in task.parameters.items() if k in stage.Params.model_fields}
    return encode_flags(given)


def find_reason_to_skip(task: Task) -> str:
    """Return why this task has nothing to do (the loop has ended before it, or not yet in this run), or ``""``."""
    for handle in task.inputs.values():
        last = handle.get(REACHED)
        if last is not None and ("ref" not in handle or last < task.parameters.get("iteration", 0)):
            return f"the loop ended with iteration {last:.0f}"
        if CONTINUED in handle:
            return f"after iteration {handle[CONTINUED]:.0f} the loop continues in the next run"
    return ""


def report_skipped_stage(stage: Component, task: Task, reason: str) -> None:
    """Report to KFP that the stage was skipped: no reference is passed on except the policy's, unchanged."""
    said = f"nothing was done here: {reason}"
    print(said, file=sys.stderr)
    marks = {
        k: v
        for handle in task.inputs.values()
        for k, v in handle.items()
        if k in (REACHED, CONTINUED)
    }
    policy = task.inputs.get("policy", {}) if stage.output.startswith("checkpoint") else {}
    task.describe(stage.output, {**policy, **marks})
    for name in task.outputs:
        task.write(name, f"{said}\n")
    task.results = {get_result_name(stage, name): kind() for name, kind in stage.results.items()}
    task.finish()


def report_commit(stage: Component, task: Task, manifest: Manifest) -> None:
    """Report the committed artifact to KFP."""
    url = split_ref(task.parameters[URL])[0]
    reward = task.inputs.get("rewards", {}).get("mean_reward")
    mark: dict[str, int] = {}
    if reward is not None:
        iteration = int(task.parameters["iteration"])
        state = LoopState(target_reward=task.parameters.get(TARGET, math.inf))
        if state.after(iteration, reward).is_over:
            mark = {REACHED: iteration}
    task.describe(stage.output, {**build_handle(url, manifest), **mark})
    task.write(stage.output, manifest.model_dump_json(indent=1))
    if "results" in task.outputs:
        task.describe("results", manifest.scalars)
    for name, draw in (
        ("preview", previews.write_artifact_page),
        ("curves", previews.write_curves),
    ):
        if name in task.outputs:
            draw(task, name, url, manifest)
    # KFP's parameters have no null: a result that is not there has the value of a skipped task's.
    task.results = {
        get_result_name(stage, name): stage.results[name]() if value is None else value
        for name, value in manifest.results.items()
    }
    task.finish()


def build_handle(url: str, manifest: Manifest) -> JsonObject:
    """Build an artifact's handle, which one task passes to the next; KFP's metadata cannot hold nulls."""
    version = {} if manifest.version is None else {"version": manifest.version}
    return {
        "ref": f"{url}@{manifest.digest}",
        "digest": manifest.digest,
        "stage": manifest.stage,
        "inputs": dict(manifest.inputs),
        **version,
        **{name: value for name, value in manifest.results.items() if value is not None},
    }


def get_result_name(stage: Component, name: str) -> str:
    """Return the output parameter of a result, renamed where a parameter has that name."""
    return f"{name}_result" if name in stage.Params.model_fields else name


def encode_parameter(value: Any) -> str:
    return encode_value(_whole(value))


def _whole(value: Any) -> Any:
    """Turn integral floats into integers, also inside lists and maps: all of KFP's numbers are floats."""
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
