"""Run an Argo Workflow on this machine: the very one that `render` writes and `submit` sends.

    outcome = execute(workflow, arguments={"iterations": "3"}, workdir=Path("runs/a/local"), on_node=show)

A pod is a process group. What a run leaves behind, and how to read it live: `tuneloop.argo.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneloop.argo.state import Node

OnNode = Callable[[Node], None]
"""Called with a copy of a node whenever its phase, message, progress or `daemoned` changes, one call at a time, in the
order of ``nodes.jsonl``."""
OnLog = Callable[[Node, str], None]
"""Called with each line (without its end) a pod writes, one call at a time."""
Ask = Callable[[Node, Mapping[str, Mapping[str, Any]]], Mapping[str, str]]
"""Answers a `suspend` node: (node, name → {"description", "enum", "default"} of what it must supply) → values."""


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        phase: ``Succeeded``, ``Failed`` or ``Error``.
        message: why, in one line.
        nodes: id → node.
        outputs: the workflow's global output parameters (``globalName``).
        exit_code: 0; 130/75 stopped by SIGINT/SIGTERM; 2 or 75 if a pod failed so; else 1.
    """

    phase: str
    message: str
    nodes: dict[str, Node]
    outputs: dict[str, str]
    exit_code: int


def execute(
    workflow: Mapping[str, Any],
    *,
    workdir: Path,
    arguments: Mapping[str, str] | None = None,
    templates: Sequence[Mapping[str, Any]] = (),
    entrypoint: str | None = None,
    parallelism: int | None = None,
    warm: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    grace: float = 60.0,
    on_node: OnNode | None = None,
    on_log: OnLog | None = None,
    ask: Ask | None = None,
) -> Outcome:
    """Run `workflow` to its end.

    Args:
        workflow: a Workflow, WorkflowTemplate or CronWorkflow, as loaded from YAML.
        workdir: state and logs of this run; see `tuneloop.argo.state`.
        arguments: values of workflow parameters, over those in the spec.
        templates: WorkflowTemplates that `templateRef` and `workflowTemplateRef` may name.
        entrypoint: another template to start at; its inputs are taken from `arguments`.
        parallelism: pods at a time; default: the spec's, else the number of cores, at least 4. Ready daemons do not count.
        warm: start tuneloop's own stages as forks of a process that has imported torch (`tuneloop.argo.warm`).
        env: added to every pod's environment (the container's own wins).
        cwd: of every pod; default: the current directory.
        grace: seconds between SIGTERM and SIGKILL, when the template names no terminationGracePeriodSeconds.
        ask: answers `suspend`; default: a prompt on the terminal, UserError without one.

    Raises:
        UserError: a field the executor has no meaning for, an unknown argument, a missing one: before anything runs.
    """
    raise NotImplementedError
