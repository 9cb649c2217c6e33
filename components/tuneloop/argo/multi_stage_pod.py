"""Several stages in one pod, as a Hera template: what `tuneloop.local.segment` runs, written into its command."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuneloop.argo.lease_sidecar import take_turns
from tuneloop.argo.pod_fields import OUTPUTS, retried_pod_fields
from tuneloop.workflow.manifest import calls
from tuneloop.workflow.settings import Cluster

if TYPE_CHECKING:
    from hera.workflows import Container, Workflow

KEPT = ("name", "inputs", "outputs", "dag", "steps", "daemon")


def segment_template(
    graph: Workflow,
    entrypoint: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    *,
    fixed: Mapping[str, str],
    cluster: Cluster | None = None,
) -> Container:
    """A container that runs the template `entrypoint` of `graph` and all that it calls.

    Args:
        inputs, outputs: parameters of `entrypoint`; they are the container's, too.
        fixed: the graph's workflow parameters.
    """
    from hera.workflows import Container, Parameter
    from hera.workflows.models import ValueFrom

    passed = {**fixed, **{name: f"{{{{inputs.parameters.{name}}}}}" for name in inputs}}
    made = Container(
        name="segment",
        inputs=[Parameter(name=name) for name in inputs],
        outputs=[Parameter(name=name, value_from=ValueFrom(path=f"{OUTPUTS}/{name}")) for name in outputs],
        command=["python", "-m", "tuneloop.local.segment"],
        args=[
            *("--graph", as_text(part(graph.to_dict(), entrypoint))),
            *(word for name, value in passed.items() for word in ("--argument", f"{name}={value}")),
        ],
        **retried_pod_fields("rollout", True, cluster or Cluster()),
    )
    take_turns(made, cluster or Cluster())
    return made


def part(workflow: Mapping[str, Any], entrypoint: str) -> dict[str, Any]:
    """The Workflow without what only a pod of its own needs, and without templates that `entrypoint` never calls."""
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    wanted, found = [entrypoint], set[str]()
    while wanted:
        if (name := wanted.pop()) not in found:
            found.add(name)
            wanted += [call["template"] for call in calls(templates[name])]
    return {
        "metadata": {"name": entrypoint},
        "spec": {
            "entrypoint": entrypoint,
            "arguments": workflow["spec"]["arguments"],
            "templates": [_bare(template) for name, template in templates.items() if name in found],
        },
    }


def as_text(graph: Mapping[str, Any]) -> str:
    """JSON in which who starts the pod itself finds nothing to replace: no tag, no path of an output, no variable."""
    text = json.dumps(graph, separators=(",", ":")).replace("$(", "\\u0024(")
    return text.replace("{{", "{\\u007b").replace(OUTPUTS, f"\\u002f{OUTPUTS[1:]}")


def _bare(template: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: template[key] for key in KEPT if key in template}
    if container := template.get("container"):
        env = [item for item in container.get("env", []) if item["name"] in ("TUNELOOP_OUTPUTS", "POD_IP")]
        own = ("image", "command", "args", "readinessProbe")
        kept["container"] = {key: container[key] for key in own if key in container}
        kept["container"]["env"] = env
    return kept


def find_segment(workflow: Mapping[str, Any]) -> dict[str, Any] | None:
    """The template whose pod runs the stages of several iterations; None where each stage has a pod."""
    templates = workflow["spec"].get("templates") or ()
    started = ((template, template.get("container", {}).get("command", ())) for template in templates)
    return next((template for template, command in started if "tuneloop.local.segment" in command), None)


def unfolded(workflow: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The workflow with a pod a stage that does the same, and how many iterations a pod has (0: a pod a stage)."""
    spec = workflow["spec"]
    segment = find_segment(workflow)
    if segment is None:
        return dict(workflow), 0
    words = segment["container"]["args"]
    inner = json.loads(words[words.index("--graph") + 1])["spec"]["templates"]
    given = dict(word.partition("=")[::2] for flag, word in itertools.pairwise(words) if flag == "--argument")
    shared = {key: segment["container"][key] for key in ("image", "resources") if key in segment["container"]}
    for template in inner:
        if "container" in template:
            template["container"] |= shared
    replaced = {segment["name"], *(template["name"] for template in inner)}
    templates = [*(t for t in spec["templates"] if t["name"] not in replaced), *inner]
    return {**workflow, "spec": {**spec, "templates": templates}}, int(given["per-workflow"])
