"""Print how a run on a cluster ended, as `tuneloop run` does for a local run."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import typer

from tuneloop.cli.show import find_failed_pod, format_stage_error
from tuneloop.cluster import run_workflows
from tuneloop.cluster import submit as argo
from tuneloop.cluster.watch import read_nodes
from tuneloop.core.errors import EXIT_USER
from tuneloop.local.journal import Node
from tuneloop.runs.stages import get_stage_name
from tuneloop.runs.summary import format_facts
from tuneloop.workflow.manifest import effective_spec
from tuneloop.workflow.rendered_stages import read_stage


def print_verdict(
    run: str,
    workflows: Sequence[Mapping[str, Any]],
    seconds: float,
    said: Mapping[str, str],
    options: str = "",
) -> int:
    """Print how the newest of a run's workflows ended, and the run's results; return its exit code.

    Args:
        workflows: those of the run, oldest first; the newest has ended.
        seconds: time since it was submitted.
        said: stage → its last line; if missing, Argo's message is used.
        options: options for the commands in the text, as in `` --namespace mine``.
    """
    last, pods = (
        workflows[-1],
        [n for each in workflows for n in read_nodes(each).values() if n.type == "Pod"],
    )
    code, message = argo.exit_code(last), last.get("status", {}).get("message")
    why = f": {message}" if message else ""
    ended = (
        f"{run_workflows.get_workflow_phase(last).lower()}{why}, exit code {code}"
        if code
        else "succeeded"
    )
    model = next((pod.outputs["model"] for pod in reversed(pods) if "model" in pod.outputs), "")
    stages = [
        read_stage(template)
        for each in workflows
        for template in effective_spec(each).get("templates", ())
    ]
    evaluators = {stage.name for stage in stages if stage.role == "evaluator"}
    facts = format_facts({"mean reward": _reward(pods, evaluators), "model": model})
    typer.echo("\n".join(filter(None, (f"\n{run}: {ended} ({seconds:.1f} s)", facts))))
    if code:
        failed = find_failed_pod(read_nodes(last).values())
        then = "submit it again with this name: it continues where it ended"
        if code == EXIT_USER:
            then += "; with other settings, or under another name if a version was made"
        look = (
            f"tuneloop cluster logs {run}{f' {get_stage_name(failed)}' if failed else ''}{options}"
        )
        told = f"see `{look}`"
        if failed:
            told = format_stage_error(
                failed, said.get(get_stage_name(failed)) or failed.message, look, then
            )
        typer.echo(told, err=True)
    return code


def _reward(pods: Sequence[Node], evaluators: Container[str]) -> str:
    """Format the first and the newest mean reward on held-out prompts; without these, of batches."""
    # An evaluation that had nothing to score has no mean: its output is null.
    rewards = [pod for pod in pods if pod.outputs.get("mean-reward", "null") != "null"]
    scored = [pod for pod in rewards if pod.template in evaluators] or rewards
    shown = [f"{float(pod.outputs['mean-reward']):.3f} ({get_stage_name(pod)})" for pod in scored]
    return " → ".join(dict.fromkeys((*shown[:1], *shown[-1:])))
