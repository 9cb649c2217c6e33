"""Whether a workflow may go on where the earlier workflows of its run have ended."""

import itertools
import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from tuneloop.cluster import run_workflows
from tuneloop.cluster.watch import read_nodes
from tuneloop.core.artifacts import dump_canonical_json
from tuneloop.core.component import find_component
from tuneloop.core.errors import UserError
from tuneloop.core.program import to_kebab_case
from tuneloop.core.store import normalize_url
from tuneloop.inference import generate
from tuneloop.runs.records import find_differences
from tuneloop.workflow.manifest import effective_spec
from tuneloop.workflow.pod_loop import expand_pod, find_pod
from tuneloop.workflow.rendered_stages import read_loop


def check_resumable(made: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]], run: str) -> None:
    """Refuse a workflow that is not of the run whose `earlier` workflows, oldest first, have ended.

    As on one machine (`tuneloop run`), settings may be mended until the loop has made a version: the stages themselves
    refuse what does not fit their committed outputs. What pods ask for, and what no stage compares with its output
    (addresses, patience, processes), may change at any time. Raises UserError at another pipeline or store, and at
    other settings after a version was made.
    """
    before = {k: v for each in earlier for k, v in _settings(each).items()}
    asked = {k: v for k, v in _settings(made).items() if k in before}
    differing = find_differences(asked, {k: before[k] for k in asked})
    begun = any(run_workflows.get_workflow_phase(each) == "Succeeded" or _has_made_a_version(each) for each in earlier)
    elsewhere = [name for name in ("pipeline", "store") if name in differing]
    if elsewhere or (differing and begun):
        what = ", ".join(elsewhere or differing[:5])
        raise UserError("--run", run, f"exists with another {what}; submit it as it was, or choose another name")


def _settings(workflow: Mapping[str, Any]) -> dict[str, Any]:
    """Collect what decides what a run computes: its pipeline, its parameters, and each stage's own where given."""
    spec = effective_spec(workflow)
    given = {p["name"]: p["value"] for p in spec.get("arguments", {}).get("parameters", ()) if "value" in p}
    if "store" in given:
        given["store"] = normalize_url(given["store"])
    pipeline = spec.get("podMetadata", {}).get("labels", {}).get("app.kubernetes.io/name")
    templates = expand_pod({"spec": {**spec, "templates": spec.get("templates") or []}})[0]["spec"]["templates"]
    stages = {t["name"]: _tracked(t) for t in templates if _is_stage(t)}
    return {**({"pipeline": pipeline} if pipeline else {}), **given, **stages}


def _tracked(template: Mapping[str, Any]) -> dict[str, str]:
    """Return the flags that a stage compares with those of its committed output; all where it is not installed."""
    command = template["container"]["command"]
    words = [str(word) for word in template["container"].get("args", ())]
    flags = {name.removeprefix("--"): value for name, value in itertools.pairwise(words) if name.startswith("--")}
    component = find_component(command[-1], template["name"]) if "-m" in command else None
    if component is None:
        return flags
    untracked = {*map(to_kebab_case, component.untracked)}
    flags = {name: value for name, value in flags.items() if name not in untracked}
    if component.identity is generate.input_identity and "engine-args" in flags:
        asked = generate.input_identity(SimpleNamespace(engine_args=json.loads(flags["engine-args"])))
        flags["engine-args"] = dump_canonical_json(asked)
    return flags


def _is_stage(template: Mapping[str, Any]) -> bool:
    """Return whether a template runs a stage: not a server, nor a step that only deals with the cluster."""
    command = (template.get("container") or {}).get("command", ())
    return bool(command) and not template.get("daemon") and not any("tuneloop.cluster" in word for word in command)


def _has_made_a_version(workflow: Mapping[str, Any]) -> bool:
    spec = effective_spec(workflow)
    made = {name for name, role in read_loop({"spec": spec}).items() if role == "trainer"}
    made |= {pod["name"]} if (pod := find_pod({"spec": spec})) else set()
    return any(node.template in made and node.phase == "Succeeded" for node in read_nodes(workflow).values())
