"""Forks: runs that begin at the end of another run's iteration, with other settings.

A fork is its pipeline's workflow, started at the template where a long loop continues
(`tuneloop.argo.loop`), with references to the artifacts of the other run. These are not copied;
pins protect them from retention. ``<store>/<fork>/fork.json`` names the origin.

`tuneloop fork` calls `begin_workflow`, then `record_fork`, here or for a cluster
(`cluster/submission.py`); retention asks for the pins (`training/old_checkpoints.py`). The keys of
``fork.json`` are read as `Run.origin`, and ``status --json`` shows them.
"""

from collections.abc import Mapping
from typing import Any

from tuneloop.argo.tasks import CONTINUED
from tuneloop.config.loading import Pipeline
from tuneloop.config.pipeline import PipelineConfig
from tuneloop.core.artifacts import DIGEST, Artifact, dump_canonical_json, dump_checked_json
from tuneloop.core.errors import UserError
from tuneloop.core.store import Store
from tuneloop.formats.facts import VersionFacts
from tuneloop.runs.committed import Entry
from tuneloop.runs.records import check_name
from tuneloop.runs.replay import locate_artifact
from tuneloop.runs.run_record import FORK, Run
from tuneloop.training.old_checkpoints import check_trainable, pin_artifact
from tuneloop.weights.codec import Encoding
from tuneloop.weights.publish import publish_version
from tuneloop.workflow.loop import Loop, step_of
from tuneloop.workflow.manifest import (
    begin_at_template,
    find_ancestors,
    list_calls,
    read_parameters,
)
from tuneloop.workflow.plan import read_plan


def begin_workflow(
    pipeline: Pipeline,
    settings: Any,
    run: Run,
    iteration: int,
) -> dict[str, Any]:
    """Build the workflow of a fork, which continues from the end of an iteration of `run`.

    Args:
        pipeline: the pipeline that `run` was started with.
        settings: the configuration of the fork.
        run: the origin.
        iteration: the last iteration that the fork takes over; 0: it begins with the loop.

    Raises:
        UserError: the iteration is not committed or ends the loop, or a setting would change a
            stage that has already run.
    """
    # A pipeline without a loop has none on its builder, and cannot be forked.
    workflow = pipeline.build(settings)
    loop: Loop | None = getattr(pipeline.module.build_argo, "loop", None)
    # Before the first iteration the carried values are the inputs of its stages.
    source_iteration = max(iteration, 1)
    entries = {entry.stage: entry for entry in run.entries if entry.iteration == source_iteration}
    if loop is None or not {step.name for step in loop.steps} <= entries.keys():
        raise UserError("ITERATION", iteration, _explain_missing(run, iteration))
    _check_done(workflow, run)
    arguments = read_parameters(workflow["spec"])
    last = int(arguments["iterations"])
    if iteration >= last:
        remedy = f"the loop would end with iteration {iteration}: set it higher"
        raise UserError("loop.iterations", last, remedy)
    parameters = {"iteration": str(iteration + 1)}
    parameters |= _collect_values(
        loop,
        run,
        entries,
        is_started=iteration > 0,
    )
    return begin_at_template(workflow, CONTINUED, parameters)


def _explain_missing(run: Run, iteration: int) -> str:
    """Explain why a fork cannot begin at the end of an iteration that `run` does not hold."""
    if run.origin and max(iteration, 1) <= run.origin["iteration"]:
        origin = run.origin["run"]
        return (
            f"{run.name} began after iteration {run.origin['iteration']} of {origin}; fork that run"
        )
    return f"{run.name}, in iteration {run.iteration} now, has not committed it"


def _collect_values(
    loop: Loop, run: Run, entries: Mapping[str, Entry], *, is_started: bool
) -> dict[str, str]:
    """Return the references that an iteration of a fork begins with, by the loop's names for them.

    Args:
        loop: the pipeline's.
        run: the origin.
        entries: step → its artifact, in the iteration that the fork continues from.
        is_started: the iteration is over; otherwise its inputs are what the fork begins with.
    """
    # A value that no step reads stays empty.
    values = dict.fromkeys(loop.carry, "")
    values |= dict.fromkeys(loop.constants, "")
    for step in loop.steps:
        inputs = entries[step.name].manifest.inputs
        for input_name, value_name in step.wires.items():
            if value_name in values and input_name in inputs:
                values[value_name] = locate_artifact(run, inputs[input_name])
    # What the last iteration has made replaces what it began with.
    if is_started:
        for value_name, wire in loop.carry.items():
            values[value_name] = run.reference(entries[step_of(wire)])
    return values


def record_fork(
    name: str,
    workflow: Mapping[str, Any],
    run: Run,
    settings: Any,
) -> None:
    """Record a fork's origin, pin the artifacts that it uses, and publish what its servers pull.

    Args:
        name: the fork's.
        workflow: as `begin_workflow` has built it.
        run: the origin.
        settings: the configuration of the fork.

    Raises:
        UserError: the name is bad or taken, or a checkpoint lacks the trainer's state.
    """
    check_name(name, "--name")
    store = Store(f"{run.store_url}/{name}")
    parameters = read_parameters(workflow["spec"])
    references = {key: value for key, value in parameters.items() if f"@{DIGEST}:" in value}
    origin = {
        "run": run.name,
        "iteration": int(parameters["iteration"]) - 1,
        "values": references,
    }
    data = dump_checked_json(origin, FORK)
    # A fork that was interrupted here is recorded again, by the same file.
    existing = store.get(FORK)
    if existing != data and (existing or store.parts()):
        raise UserError("--name", name, "is the name of another run; choose one that is free")
    # The section of the stage that trains in the loop is called `update` in every pipeline that has
    # this setting (`config/loop.py`).
    update = getattr(settings, "update", None)
    resets_optimizer = getattr(update, "reset_optimizer", False)
    for reference in references.values():
        # Without the trainer's state the first update of the fork would be another.
        if not resets_optimizer:
            check_trainable(Artifact(reference))
        pin_artifact(Artifact(reference), f"fork-{name}")
    store.put(FORK, data)
    published = settings.published(store.url) if isinstance(settings, PipelineConfig) else {}
    if published:
        _publish_policy(
            published["weights"], references["policy"], settings.engine.publication.encoding
        )


def _publish_policy(url: str, reference: str, encoding: Encoding | None) -> None:
    """Publish the policy that a fork begins with below `url`, where its servers pull weights."""
    policy = Artifact(reference)
    publish_version(
        url,
        VersionFacts.read(policy).version,
        policy.part("model"),
        source=policy.manifest.digest,
        encoding=encoding,
    )


def _check_done(workflow: Mapping[str, Any], run: Run) -> None:
    """Refuse settings that would change the output of a stage that the fork does not repeat."""
    # A fork of a fork goes by the stages of the run that the first one came from.
    while run.origin:
        run = Run(run.origin["run"], run.store_url)
    params_by_stage = {
        entry.manifest.stage: entry.manifest.params
        for entry in run.entries
        if entry.iteration is None
    }
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    calls = {
        name: [call["template"] for call in list_calls(template)]
        for name, template in templates.items()
    }
    # A fork enters at the template where the loop continues, below those that call it.
    repeated = find_ancestors(CONTINUED, calls) | {CONTINUED}
    for name, stage in read_plan(workflow).stages.items():
        component = stage.component
        # A stage without a template of its own runs in a pod of iterations.
        if component and name in templates and name not in repeated:
            params = component.validate(stage.parameters)
            tracked = params.model_dump(mode="json", exclude=component.untracked)
            _check_params(run, name, tracked, params_by_stage.get(component.name))


def _check_params(
    run: Run,
    stage: str,
    params: Mapping[str, Any],
    committed: Mapping[str, Any] | None,
) -> None:
    """Raise UserError unless a stage of `run` had these parameters; `committed` are those that it
    had, if it ran.
    """
    if committed is None:
        remedy = f"no longer has {stage} to compare settings with; run it anew"
        raise UserError("RUN", run.name, remedy)
    # A parameter that only one of the two has came with another release.
    for key in sorted(params.keys() & committed):
        if dump_canonical_json(params[key]) != dump_canonical_json(committed[key]):
            remedy = (
                f"{run.name} ran {stage} with {committed[key]!r}, "
                "and a fork does not repeat that: run it anew"
            )
            raise UserError(f"{stage}.{key}", params[key], remedy)
