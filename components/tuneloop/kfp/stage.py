"""Run a stage as a task of KFP: ``python -m tuneloop.kfp.stage tuneloop.stages.sft:sft …``

The stage's program runs with the flags of the executor input and ends with its own exit code; a
stage of several nodes is a JobSet, which this program launches and follows. Then the committed
artifact is reported to KFP: a *handle* (reference, digest, version and results, as the metadata of
an artifact that holds the manifest), and what the UI shows (`kfp/ui_outputs.py`). The weights stay
in the store.

**The end of a loop.** KFP cannot leave a loop early, so the stages of unrolled iterations after its
end run as empty tasks. The `policy_update` of the iteration whose rewards reach ``target_reward``
marks its handle ``target_reached_at``; a later stage with such an input does nothing, and passes
only the policy on. The same applies to the stages after a loop that another run continues, by the
mark ``continued_after``.
"""

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
from tuneloop.config.extended import extend_cluster
from tuneloop.core import plugins
from tuneloop.core.artifacts import Manifest, find_manifest, split_ref
from tuneloop.core.component import Component
from tuneloop.core.errors import report_errors
from tuneloop.core.json_types import JsonObject
from tuneloop.core.program import encode_flags, encode_value
from tuneloop.core.store import Store
from tuneloop.kfp.io import Task
from tuneloop.kfp.retry import retry_in_process
from tuneloop.kfp.ui_outputs import CommittedArtifact, write_stage_outputs
from tuneloop.workflow.loop_state import LoopState
from tuneloop.workflow.settings import Cluster

# Parameters of this program, which no stage may have: `template.py: stage_signature` declares them,
# and `check_names` there refuses a stage that has one.
URL = "url"
"""Parameter: where the output is committed."""
TARGET = "target_reward"
"""Parameter: the mean reward that ends a loop whose stages are tasks. `kfp/loop.py: iterate` passes
it; `kfp/iterations.py` reads the name on its own."""
CHANGES = "changed_settings"
"""Parameter: what is otherwise than it was compiled, as JSON; null stands for a parameter that is
no longer set. An output of the first task (`configure.py: find_changes`)."""
REACHED = "target_reached_at"
"""Mark of a handle: the iteration that ended the loop."""
CONTINUED = "continued_after"
"""Mark of a handle: the iteration after which another run continues."""
HANDLE_KEYS = ("ref", "digest", "stage", "inputs", REACHED, CONTINUED)
"""Keys of a handle (`build_handle`) that no result of a stage may have: it would replace the value.
`template.py: check_names` refuses such a stage. A result ``version`` is that of the policy."""
REWARDS_INPUT = "rewards"
"""Input of a trainer: the artifact of the scorer, whose result decides whether a loop ends."""
MEAN_REWARD = "mean_reward"
"""Result of a scorer that is compared with `TARGET`. `loop.py` refuses to unroll a loop in which
these two have other names."""


def main(argv: Sequence[str]) -> int:
    """Run a stage (``module:attribute``) for an executor input, here or as a JobSet; return the
    exit code.
    """
    parser = argparse.ArgumentParser(prog="tuneloop.kfp.stage", description=__doc__)
    parser.add_argument("stage")
    parser.add_argument("--executor-input", required=True)
    parser.add_argument(
        "--job",
        type=json.loads,
        help="nodes, processes, cluster and namespace of a JobSet to launch",
    )
    options = parser.parse_args(argv)
    stage: Component = plugins.load_variant("stages", options.stage)
    task = Task.read(options.executor_input)
    task.parameters |= json.loads(task.parameters.pop(CHANGES, "{}"))
    reason = find_reason_to_skip(task)
    if reason:
        report_skipped_stage(stage, task, reason)
        return 0
    url = task.parameters[URL]

    def run_stage() -> int:
        if options.job:
            code = launch_jobset(stage, task, **options.job)
            if code:
                return code
        # After a JobSet it ends at once, as the output is committed.
        return stage.run(build_stage_args(stage, task))

    def read_progress() -> str:
        return " ".join(Store(f"{url}/resume").keys())

    @report_errors
    def report_output() -> int:
        manifest = find_manifest(url)
        assert manifest is not None, "the stage has just committed it"
        report_commit(stage, task, manifest)
        return 0

    code = retry_in_process(run_stage, read_progress, url=url)
    # The other ranks of torchrun would write the same files.
    if code or int(os.environ.get("RANK", "0")):
        return code
    return retry_in_process(report_output, str)


def launch_jobset(
    stage: Component,
    task: Task,
    *,
    nodes: int,
    processes: int,
    cluster: JsonObject,
    namespace: str,
) -> int:
    """Run the stage as a JobSet, unless its output is committed.

    Args:
        stage: what to run.
        task: its parameters, inputs and output.
        nodes: pods of the JobSet. This argument and those that follow are the keys of the flag
            ``--job``, which `template.py: stage_step` writes.
        processes: ranks in a pod.
        cluster: settings of the pods, those that are not the defaults.
        namespace: where the JobSet runs.

    Returns:
        The exit code.
    """
    url = task.parameters[URL]
    if find_manifest(url) is not None:
        return 0
    manifest = build_stage_jobset(stage, task, nodes, processes, extend_cluster()(**cluster))
    return follow_job(["--namespace", namespace, "--manifest", json.dumps(manifest)])


def build_stage_jobset(
    stage: Component, task: Task, nodes: int, processes: int, cluster: Cluster
) -> JsonObject:
    """Build the JobSet of a stage of several nodes; the arguments are those of `launch_jobset`.

    On Argo `argo/jobset.py: jobset_steps` builds it: what its pods get there has to be given here,
    too.
    """
    url = task.parameters[URL]
    # Named after the output, so that an evicted launcher finds the JobSet that it has started.
    name = f"{stage.template}-{xxhash.xxh3_64_hexdigest(url.encode())}"
    role = find_role(stage, task.parameters)
    pod = pod_spec(
        stage.image,
        role,
        stage.command(nodes=nodes),
        build_stage_args(stage, task),
        cluster,
        ranks_env(name, nodes, processes),
    )
    return build_jobset(
        name,
        pod,
        nodes,
        labels={
            "app.kubernetes.io/part-of": "tuneloop",
            "app.kubernetes.io/component": stage.image,
        },
        queue=cluster.build_queue_labels(role),
        stage=stage.template,
        settings=cluster.pod_settings(role),
    )


def build_stage_args(stage: Component, task: Task) -> list[str]:
    """Build the command line of the stage's program."""
    values: JsonObject = {}
    # An optional input may be absent.
    for name in stage.inputs:
        if name in task.inputs:
            values[name] = task.inputs[name]["ref"]
    values[stage.output] = task.parameters[URL]
    for name, value in task.parameters.items():
        if name in stage.Params.model_fields:
            values[name] = restore_integers(value)
    return encode_flags(values)


def find_reason_to_skip(task: Task) -> str:
    """Return why this task has nothing to do, or ``""``.

    The loop has ended before it, or has not ended yet in this run. The marks `REACHED` and
    `CONTINUED` of any input say so. `register.py` asks it, too.
    """
    for handle in task.inputs.values():
        last = handle.get(REACHED)
        if last is not None:
            # A skipped stage passes no reference on. The evaluation after the loop has no iteration
            # and takes the last policy, which has a reference.
            is_after_end = last < task.parameters.get("iteration", 0)
            if is_after_end or "ref" not in handle:
                return f"the loop ended with iteration {last:.0f}"
        if CONTINUED in handle:
            return f"after iteration {handle[CONTINUED]:.0f} the loop continues in the next run"
    return ""


def report_skipped_stage(stage: Component, task: Task, reason: str) -> None:
    """Report to KFP that the stage was skipped: no reference is passed on except the policy's,
    unchanged.

    Only a stage whose output's name begins with ``checkpoint`` passes its input ``policy`` on. A
    mark that is added beside `REACHED` has to be copied here.
    """
    line = f"nothing was done here: {reason}"
    print(line, file=sys.stderr)
    handle: JsonObject = {}
    if stage.output.startswith("checkpoint"):
        handle.update(task.inputs.get("policy", {}))
    # Every later stage has to learn of the end, from whichever input.
    for input_handle in task.inputs.values():
        for mark in (REACHED, CONTINUED):
            if mark in input_handle:
                handle[mark] = input_handle[mark]
    task.describe(stage.output, handle)
    for name in task.outputs:
        task.write(name, f"{line}\n")
    task.results = {get_result_name(stage, name): kind() for name, kind in stage.results.items()}
    task.finish()


def report_commit(stage: Component, task: Task, manifest: Manifest) -> None:
    """Report the committed artifact to KFP.

    A loop of tasks ends by the rewards of the input that a pipeline calls `rewards`: by another
    name it never ends early.

    Raises:
        UserError: the component declares an output that is not written here.
    """
    url = split_ref(task.parameters[URL])[0]
    handle = build_handle(url, manifest)
    reward = task.inputs.get(REWARDS_INPUT, {}).get(MEAN_REWARD)
    if reward is not None:
        iteration = int(task.parameters["iteration"])
        state = LoopState(target_reward=task.parameters.get(TARGET, math.inf))
        if state.after(iteration, reward).is_over:
            handle[REACHED] = iteration
    task.describe(stage.output, handle)
    task.write(stage.output, manifest.model_dump_json(indent=1))
    write_stage_outputs(task, CommittedArtifact(url, manifest))
    for name, value in manifest.results.items():
        # KFP's parameters have no null: a result that is not there has the value of a skipped
        # task's.
        result = stage.results[name]() if value is None else value
        task.results[get_result_name(stage, name)] = result
    task.finish()


def build_handle(url: str, manifest: Manifest) -> JsonObject:
    """Build an artifact's handle, which one task passes to the next.

    Its keys are the metadata of KFP's artifact, and docs/kfp.md lists them: `register.py`,
    `extensions/trainers/launch.py` and `iterations.py` read them by name. The results have none of
    `HANDLE_KEYS`.
    """
    handle: JsonObject = {
        "ref": f"{url}@{manifest.digest}",
        "digest": manifest.digest,
        "stage": manifest.stage,
        "inputs": dict(manifest.inputs),
    }
    # KFP's metadata cannot hold nulls.
    if manifest.version is not None:
        handle["version"] = manifest.version
    for name, value in manifest.results.items():
        if value is not None:
            handle[name] = value
    return handle


def get_result_name(stage: Component, name: str) -> str:
    """Return the output parameter of a result, renamed where a parameter has that name: in KFP
    inputs and outputs of a component share their names.
    """
    return f"{name}_result" if name in stage.Params.model_fields else name


def encode_parameter(value: Any) -> str:
    """Encode a parameter of KFP as the value of a flag."""
    return encode_value(restore_integers(value))


def restore_integers(value: Any) -> Any:
    """Turn integral floats into integers, also inside lists and maps: all of KFP's numbers are
    floats.
    """
    if isinstance(value, dict):
        return {key: restore_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [restore_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
