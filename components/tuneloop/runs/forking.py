"""Forks: runs that begin at the end of another run's iteration, with other settings. A fork is its pipeline's workflow,
started at the template where a long loop continues (`tuneloop.argo.loop`), with references to the artifacts of the
other run. These are not copied; pins protect them from retention. ``<store>/<fork>/fork.json`` names the origin."""

from collections.abc import Mapping
from typing import Any

from tuneloop.argo.loop import CONTINUED
from tuneloop.config.loading import Pipeline
from tuneloop.config.pipeline import PipelineConfig
from tuneloop.core.artifacts import DIGEST, Artifact, dump_canonical_json, dump_checked_json
from tuneloop.core.errors import UserError
from tuneloop.core.program import parse_arguments
from tuneloop.core.store import Store
from tuneloop.runs.records import check_name
from tuneloop.runs.replay import locate_artifact
from tuneloop.runs.run_record import FORK, Run
from tuneloop.training.old_checkpoints import check_trainable, pin_artifact
from tuneloop.weights.publish import publish_version
from tuneloop.workflow.loop import step_of
from tuneloop.workflow.manifest import (
    begin_at_template,
    find_ancestors,
    list_calls,
    parse_applied_object,
)
from tuneloop.workflow.rendered_stages import container_of, read_stage


def begin_workflow(found: Pipeline, settings: Any, run: Run, iteration: int) -> dict[str, Any]:
    """Build the workflow of a fork, which continues from the end of an iteration of `run`; 0: from the loop's start.
    Raises UserError if the iteration is not committed or ends the loop, or a setting changes a stage already run."""
    workflow, loop = found.build(settings), getattr(found.module.build_argo, "loop", None)
    made = {entry.stage: entry for entry in run.entries if entry.iteration == max(iteration, 1)}
    if loop is None or not {step.name for step in loop.steps} <= made.keys():
        remedy = f"{run.name}, in iteration {run.iteration} now, has not committed it"
        if run.origin and max(iteration, 1) <= (begun := run.origin["iteration"]):
            remedy = (
                f"{run.name} began after iteration {begun} of {run.origin['run']}; fork that run"
            )
        raise UserError("ITERATION", iteration, remedy)
    _check_done(workflow, run)
    last = next(
        int(p["value"])
        for p in workflow["spec"]["arguments"]["parameters"]
        if p["name"] == "iterations"
    )
    if iteration >= last:
        raise UserError(
            "loop.iterations", last, f"the loop would end with iteration {iteration}: set it higher"
        )
    values = dict.fromkeys((*loop.carry, *loop.constants), "")
    for step in loop.steps:
        inputs = made[step.name].manifest.inputs
        values |= {
            v: locate_artifact(run, inputs[k])
            for k, v in step.wires.items()
            if v in values and k in inputs
        }
    for name, wire in loop.carry.items() if iteration else ():
        entry = made[step_of(wire)]
        values[name] = f"{run.url}/{entry.key}@{entry.manifest.digest}"
    return begin_at_template(workflow, CONTINUED, {"iteration": str(iteration + 1), **values})


def record_fork(name: str, workflow: Mapping[str, Any], run: Run, settings: Any) -> None:
    """Record and pin a fork's origin, and publish what its servers pull. Raises UserError for a bad or taken name."""
    check_name(name, "--name")
    store = Store(f"{run.store_url}/{name}")
    given = {p["name"]: str(p.get("value")) for p in workflow["spec"]["arguments"]["parameters"]}
    values = {key: value for key, value in given.items() if f"@{DIGEST}:" in value}
    data = dump_checked_json(
        {"run": run.name, "iteration": int(given["iteration"]) - 1, "values": values}, FORK
    )
    if (standing := store.get(FORK)) != data and (standing or store.parts()):
        raise UserError("--name", name, "is the name of another run; choose one that is free")
    is_reset = getattr(getattr(settings, "update", None), "reset_optimizer", False)
    for ref in values.values():
        if not is_reset:
            check_trainable(Artifact(ref))
        pin_artifact(Artifact(ref), f"fork-{name}")
    store.put(FORK, data)
    if published := settings.published(store.url) if isinstance(settings, PipelineConfig) else {}:
        made = Artifact(values["policy"])
        about = {"source": made.manifest.digest, "encoding": settings.engine.encoding}
        publish_version(
            published["weights"], made.manifest.facts["version"], made.part("model"), **about
        )


def _check_done(workflow: Mapping[str, Any], run: Run) -> None:
    """Refuse settings that would change the output of a stage that the fork does not repeat."""
    while run.origin:
        run = Run(run.origin["run"], run.store_url)
    done = {
        entry.manifest.stage: entry.manifest.params
        for entry in run.entries
        if entry.iteration is None
    }
    calls = {
        t["name"]: [call["template"] for call in list_calls(t)]
        for t in workflow["spec"]["templates"]
    }
    repeated = {CONTINUED, *find_ancestors(CONTINUED, calls)}
    for name, template in (
        (t["name"], t) for t in workflow["spec"]["templates"] if t["name"] not in repeated
    ):
        if component := read_stage(template).component:
            flags = component.inputs, component.output, component.Params.model_fields
            given = parse_arguments(
                container_of(template, parse_applied_object(template))["args"], name, None, *flags
            )
            params = component.validate(
                {k: given[k] for k in given.keys() & component.Params.model_fields.keys()}
            )
            asked, then = (
                params.model_dump(mode="json", exclude=component.untracked),
                done.get(component.name),
            )
            if then is None:
                raise UserError(
                    "RUN", run.name, f"no longer has {name} to compare settings with; run it anew"
                )
            for key in sorted(asked.keys() & then):
                if dump_canonical_json(asked[key]) != dump_canonical_json(then[key]):
                    remedy = f"{run.name} ran {name} with {then[key]!r}, and a fork does not repeat that: run it anew"
                    raise UserError(f"{name}.{key}", asked[key], remedy)
