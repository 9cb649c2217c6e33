"""Print how a run on a cluster ended, as `tuneloop run` does for a local run (`execute.py:
Executor.execute`, `show.py: describe_failure`).

It knows only workflows and the last lines of logs, and reads no store. Its tests are in
`tests/unit/cluster/test_following.py`.
"""

from collections.abc import Container, Mapping, Sequence

import typer

from tuneloop.cli.show import find_failed_pod, format_stage_error
from tuneloop.cluster import submit
from tuneloop.cluster.run_workflows import get_workflow_phase
from tuneloop.cluster.watch import read_nodes
from tuneloop.core.errors import EXIT_USER
from tuneloop.core.json_types import JsonMapping
from tuneloop.local.journal import Node
from tuneloop.runs.stages import get_stage_name
from tuneloop.runs.summary import format_facts
from tuneloop.workflow.plan import find_plan


def print_verdict(
    run: str,
    workflows: Sequence[JsonMapping],
    seconds: float,
    last_lines: Mapping[str, str],
    options: str = "",
) -> int:
    """Print how the newest of a run's workflows ended, and the run's results; return its exit code.

    Args:
        run: its name.
        workflows: those of the run, oldest first; the newest has ended.
        seconds: time since it was submitted.
        last_lines: stage → its last line; if missing, Argo's message is used.
        options: options for the commands in the text, as in `` --namespace mine``.
    """
    newest = workflows[-1]
    code = submit.exit_code(newest)
    message = newest.get("status", {}).get("message")
    reason = f": {message}" if message else ""
    ending = "succeeded"
    if code:
        phase = "stopped" if submit.is_stopped(newest) else get_workflow_phase(newest).lower()
        ending = f"{phase}{reason}, exit code {code}"
    lines = ["", f"{run}: {ending} ({seconds:.1f} s)"]
    results = format_facts(_collect_results(workflows))
    if results:
        lines.append(results)
    typer.echo("\n".join(lines))
    if code:
        typer.echo(_describe_failure(run, newest, code, last_lines, options), err=True)
    return code


def _collect_results(workflows: Sequence[JsonMapping]) -> dict[str, str]:
    """Collect the results of a run, over all its workflows: its mean reward, and its model.

    Both are output parameters of pods, by name: ``mean-reward`` of scorers and evaluators,
    ``model`` of exports.
    """
    pods: list[Node] = []
    evaluators: set[str] = set()
    model = ""
    for workflow in workflows:
        plan = find_plan(workflow)
        stages = plan.stages if plan else {}
        for stage in stages.values():
            if stage.role == "evaluator":
                evaluators.add(stage.template)
        for node in read_nodes(workflow).values():
            if node.type == "Pod":
                pods.append(node)
                # A model may be exported more than once: the newest counts.
                model = node.outputs.get("model", model)
    return {"mean reward": _describe_reward(pods, evaluators), "model": model}


def _describe_failure(
    run: str,
    workflow: JsonMapping,
    code: int,
    last_lines: Mapping[str, str],
    options: str,
) -> str:
    """Describe in one line which stage ended a workflow, and what to do."""
    remedy = "submit it again with this name: it continues where it ended"
    # With the settings that were refused it would end the same way.
    if code == EXIT_USER:
        remedy += "; with other settings, or under another name if a version was made"
    node = find_failed_pod(read_nodes(workflow).values())
    if node is None and submit.is_stopped(workflow):
        return f"interrupted: {run}: stopped before a stage ended; {remedy}"
    if node is None:
        return f"see `tuneloop cluster logs {run}{options}`"
    stage = get_stage_name(node)
    last_line = last_lines.get(stage) or node.message
    command = f"tuneloop cluster logs {run} {stage}{options}"
    return format_stage_error(node, last_line, command, remedy)


def _describe_reward(pods: Sequence[Node], evaluators: Container[str]) -> str:
    """Format the first and the newest mean reward on held-out prompts; without these, of batches."""
    # An evaluation that had nothing to score has no mean: its output is null.
    scored = [pod for pod in pods if pod.outputs.get("mean-reward", "null") != "null"]
    evaluations = [pod for pod in scored if pod.template in evaluators]
    rewards = [
        f"{float(pod.outputs['mean-reward']):.3f} ({get_stage_name(pod)})"
        for pod in evaluations or scored
    ]
    if len(rewards) < 2:
        return "".join(rewards)
    first = rewards[0]
    newest = rewards[-1]
    return first if first == newest else f"{first} → {newest}"
