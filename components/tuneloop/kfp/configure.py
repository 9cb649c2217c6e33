"""The first task of a run: ``python -m tuneloop.kfp.configure --pipeline NAME … --executor-input …``

It names the run, checks what a user has typed into the form of KFP's UI by the schema of the
pipeline's configuration, and tells each later task which of its parameters differ from the compiled
ones. So another base model changes all that follows it, as on the command line. It refuses what
would need another graph or other pods, before anything expensive starts.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneloop.config.explicit_values import configure_values
from tuneloop.config.followed import Followed, merge_followed
from tuneloop.config.listing import Section, describe_settings
from tuneloop.config.loading import Pipeline, find_pipeline, list_pipeline_folders
from tuneloop.config.rules import list_unknowns
from tuneloop.core.errors import UserError, report_errors
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.store import Store, normalize_url
from tuneloop.formats.stored_models import RUN, open_model
from tuneloop.kfp.form import BASE_MODEL, OTHERS, list_parameters
from tuneloop.kfp.io import Task
from tuneloop.kfp.retry import retry_in_process
from tuneloop.kfp.run_name import name_run
from tuneloop.kfp.stage import TARGET, URL, restore_integers
from tuneloop.kfp.task_plan import TaskPlan, name_changes
from tuneloop.runs.records import check_name
from tuneloop.workflow.plan import PodPlan
from tuneloop.workflow.quantities import parse_resource_quantity

PIPELINE_MODULES = "tuneloop._pipelines."
"""The beginning of the names of modules that `config/loading.py` makes of pipelines' files.
`read_files` finds by it which files travel with the first task."""


@dataclass(frozen=True)
class ConfiguredRun:
    """The settings of a run, and its tasks.

    Attributes:
        settings: the configuration, a `config/pipeline.py: PipelineConfig` with its sections.
        plan: its tasks, as `task_plan.py: plan_tasks` plans them.
    """

    settings: Any
    plan: TaskPlan


class RunSettings:
    """The settings of the runs of one compiled pipeline."""

    def __init__(
        self,
        pipeline: Pipeline,
        values: JsonMapping,
        limits: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare to configure runs.

        Args:
            pipeline: that was compiled.
            values: with which it was compiled.
            limits: task → memory of its pod, where that has a limit; None: as planned here. What
                was known of the base model when it was compiled may not be known here.
        """
        self.pipeline = pipeline
        self.values = values
        self.compiled = self._plan(values)
        self.limits = list_limits(self.compiled.plan) if limits is None else limits

    def _plan(self, values: JsonMapping) -> ConfiguredRun:
        settings = configure_values(self.pipeline, values)
        plan_tasks = vars(self.pipeline.module.build_kfp)["plan"]
        return ConfiguredRun(settings, plan_tasks(settings))

    def read_typed(self, parameters: JsonMapping) -> JsonObject:
        """Return key → value of the settings that differ from the compiled ones.

        Args:
            parameters: of the task; KFP's numbers are floats. Only the settings of the form and
                `OTHERS` are read.
        """
        typed: JsonObject = {}
        for parameter in list_parameters(self.compiled.settings):
            # A value that is left at its default follows the base model, as one that is not set.
            value = restore_integers(parameters.get(parameter.name, parameter.default))
            if value != parameter.default:
                typed[parameter.key] = value
        sections = describe_settings(self.pipeline.Config)
        typed.update(flatten_sections(restore_integers(parameters.get(OTHERS, {})), sections))
        return typed

    def configure(self, typed: JsonMapping) -> ConfiguredRun:
        """Configure a run.

        Args:
            typed: key → value of settings.

        Raises:
            UserError: a value is refused, or the run would need another graph or other pods than
                the compiled ones.
        """
        if not typed:
            return self.compiled
        values = self.merge(typed)
        run = self._plan(values)
        # First each setting alone, so that a message names the one that is refused.
        for key, value in typed.items():
            self._check_alone(key, value)
        problem = find_problem(self.compiled, run, self.limits)
        if problem:
            key, value = next(iter(typed.items()))
            raise UserError(key, value, f"with the other settings of this run: {problem}")
        return run

    def merge(self, typed: JsonMapping) -> JsonObject:
        """Return the compiled values with the typed ones."""
        changes = {key: Followed(key, value, "typed") for key, value in typed.items()}
        values = merge_followed(self.values, changes)
        for name, section in self.compiled.settings:
            # A rule may leave out a section for another model, which would be another graph.
            if section is not None and values.get(name, {}) is None:
                values[name] = {}
        return values

    def _check_alone(self, key: str, value: Any) -> None:
        """Raise UserError if a setting alone makes another graph or other pods."""
        try:
            run = self._plan(self.merge({key: value}))
        except UserError:
            # It is possible together with the other settings, which were not refused.
            return
        problem = find_problem(self.compiled, run, self.limits)
        if problem:
            raise UserError(key, value, problem)


def flatten_sections(
    values: JsonMapping, sections: Section, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield key and value of settings that are given by their keys, or in mappings by section.

    Args:
        values: key → value.
        sections: of the pipeline's configuration.
        prefix: of the keys: the section that they are in, and a dot.
    """
    for name, value in values.items():
        key = f"{prefix}{name}"
        # A mapping would replace its section with all that was compiled there.
        if isinstance(value, Mapping) and isinstance(sections.find(key), Section):
            yield from flatten_sections(value, sections, f"{key}.")
        else:
            yield key, value


def list_limits(plan: TaskPlan) -> dict[str, str]:
    """Return task → memory of its pod, of those that have a limit."""
    limits: dict[str, str] = {}
    for task, pod in plan.pods.items():
        if pod.resources.memory_limit:
            limits[task] = pod.resources.memory_limit
    return limits


def find_problem(compiled: ConfiguredRun, run: ConfiguredRun, limits: Mapping[str, str]) -> str:
    """Return why a run cannot use the compiled graph and its pods; empty if it can.

    Args:
        compiled: the run without what was typed.
        run: the one with it.
        limits: task → memory of its compiled pod, where that has a limit.
    """
    if describe_shape(run) != describe_shape(compiled):
        return (
            "is fixed when the pipeline is compiled, as it decides the graph or its pods: "
            "compile it again with --set"
        )
    shortages: list[str] = []
    needed_by_role: dict[str, str] = {}
    for task, pod in run.plan.pods.items():
        limit = limits.get(task)
        needed = pod.resources.memory_limit
        # A pod without a limit may use the whole node.
        if not limit or not needed:
            continue
        # This release may estimate the compiled run otherwise than the one that compiled it.
        planned = compiled.plan.pods[task].resources.memory_limit or limit
        allowed = max(map(parse_resource_quantity, (limit, planned)))
        if parse_resource_quantity(needed) <= allowed:
            continue
        shortages.append(f"the pod of {task} would need {needed} of memory and has {limit}")
        # Several pods may have one role: the largest counts.
        largest = needed_by_role.get(pod.resource_role, "0")
        needed_by_role[pod.resource_role] = max(largest, needed, key=parse_resource_quantity)
    if not shortages:
        return ""
    flags = [f"--set cluster.{role}.memory={size}" for role, size in needed_by_role.items()]
    return f"{', '.join(shortages)}: compile the pipeline again with {' '.join(flags)}"


def list_doubts(plan: TaskPlan, limits: Mapping[str, str]) -> list[str]:
    """List the pods whose memory may be too little: they have a limit, and it is not known what the
    run needs.

    Args:
        plan: of the run.
        limits: task → memory of its compiled pod, where that has a limit.
    """
    doubts: list[str] = []
    for task, pod in plan.pods.items():
        limit = limits.get(task)
        if limit and not pod.resources.memory_limit:
            doubts.append(f"it is not known whether {limit} of memory are enough for {task}")
    return doubts


def describe_shape(run: ConfiguredRun) -> JsonObject:
    """Describe what is fixed in a compiled pipeline: its tasks, their pods, the platform.

    A setting that decides the graph in another way, such as which task takes which artifact, has to
    be added here. Else a user may type it for a run, and it has no effect there. The form itself
    leaves fixed settings out by another rule, `form.py: is_open`.
    """
    plan = run.plan
    # Only a pipeline with a loop, or whose author wants it, has this section.
    engine = dict(run.settings).get("engine")
    pods = {task: _describe_pod(pod) for task, pod in plan.pods.items()}
    return {
        "pods": pods,
        "written_out": plan.written_out,
        "evaluate_every": run.settings.loop.evaluate_every if plan.written_out else 0,
        "engine": engine.kind if engine else "",
        "cluster": run.settings.cluster.model_dump(),
        "kfp": run.settings.kfp.model_dump(),
    }


def _describe_pod(pod: PodPlan) -> JsonObject:
    """Describe a task's pod without what may differ between runs.

    A field that is added to `workflow/plan.py: PodPlan` or `StagePlan` is compared, too. If it may
    differ between runs of one compiled pipeline, it has to be excluded here.
    """
    # Memory may be less than was compiled, and is compared by itself.
    description = pod.model_dump(exclude={"parameters", "resources"})
    description["accelerators"] = pod.resources.accelerators
    return description


def find_changes(compiled: TaskPlan, plan: TaskPlan) -> dict[str, str]:
    """Return output parameter of the first task → JSON of what another task does otherwise than it
    was compiled: parameters of a stage, or options of the iterations. Null stands for one that is
    no longer set.

    `pipeline.py: configure_step` declares these outputs; `stage.py: main` and `iterations.py: main`
    read them as their parameter `CHANGES`.
    """
    changes: dict[str, str] = {}
    # JSON as a text: a STRUCT of KFP has no integers, and its metadata no nulls.
    for template, stage in compiled.stages.items():
        differences = _find_differences(stage.parameters, plan.stages[template].parameters)
        changes[name_changes(template)] = json.dumps(differences)
    if compiled.iterations and plan.iterations:
        differences = _find_differences(compiled.iterations.options, plan.iterations.options)
        changes[name_changes(compiled.iterations.pod.template)] = json.dumps(differences)
    return changes


def _find_differences(earlier: JsonMapping, later: JsonMapping) -> JsonObject:
    """Return the entries of `later` that are not those of `earlier`, sorted by name."""
    differences: JsonObject = {}
    for name in sorted(later.keys() | earlier.keys()):
        if later.get(name) != earlier.get(name):
            differences[name] = later.get(name)
    return differences


def load_pipeline(name: str, files: Mapping[str, str]) -> Pipeline:
    """Load a pipeline by name.

    Args:
        name: of the pipeline.
        files: name → text of the files that are not in the image, the pipeline's own among them.
    """
    if not files:
        return find_pipeline(name)
    # The files of the image are found from there, too (`config.loading.load_pipeline`).
    folder = Path(tempfile.mkdtemp(prefix="tuneloop-pipeline-"))
    for file, text in files.items():
        (folder / file).write_text(text)
    return find_pipeline(str(folder / f"{name}.py"))


def read_files(pipeline: Pipeline) -> dict[str, str]:
    """Return name → text of the files of a pipeline that are not in the image: its own, and those
    beside it that it has loaded.
    """
    folder = pipeline.path.parent
    # The first folder is that of the current directory, or of a checkout.
    if folder in [path.resolve() for path in list_pipeline_folders()[1:]]:
        return {}
    paths = {pipeline.path}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if module.__name__.startswith(PIPELINE_MODULES) and file and Path(file).parent == folder:
            paths.add(Path(file))
    return {path.name: path.read_text() for path in sorted(paths)}


def main(argv: Sequence[str]) -> int:
    """Name and configure a run; return the exit code.

    `pipeline.py: configure_step` writes the flags, and declares the parameters and outputs.
    """
    parser = argparse.ArgumentParser(prog="tuneloop.kfp.configure", description=__doc__)
    parser.add_argument("--pipeline", required=True, help="name of the pipeline")
    parser.add_argument(
        "--files", type=json.loads, default={}, metavar="JSON", help="texts of its own files"
    )
    parser.add_argument(
        "--values", type=json.loads, required=True, metavar="JSON", help="compiled settings"
    )
    parser.add_argument(
        "--limits", type=json.loads, metavar="JSON", help="memory of the compiled tasks' pods"
    )
    parser.add_argument("--executor-input", required=True)
    options = parser.parse_args(argv)
    task = Task.read(options.executor_input)

    @report_errors
    def configure_task() -> int:
        name = name_run(task.parameters)
        # It becomes a folder of the store, and a part of names in Kubernetes.
        check_name(name, "run")
        store = str(task.parameters["store"])
        # Both configurations are made by this release, so that only what was typed differs.
        pipeline = load_pipeline(options.pipeline, options.files)
        runs = RunSettings(pipeline, options.values, options.limits)
        typed = runs.read_typed(task.parameters)
        model = typed.get(BASE_MODEL)
        if isinstance(model, str) and model.startswith(RUN):
            typed[BASE_MODEL] = open_model(model, normalize_url(store)).reference
        run = runs.configure(typed)
        notes: list[str] = []
        if typed:
            notes += list_doubts(run.plan, runs.limits)
        if BASE_MODEL in typed:
            notes += list_unknowns(pipeline.Config, runs.merge(typed))
        for line in notes:
            print(f"note: {line}", file=sys.stderr)
        # Last, since it is the one check that leaves this pod.
        Store(store).check_writable()
        for key, value in typed.items():
            print(f"{key} = {value!r}", file=sys.stderr)
        print(f"the run is {store}/{name}", file=sys.stderr)
        # The URL names the run to every later task.
        task.results = {URL: f"{store}/{name}"}
        task.results |= find_changes(runs.compiled.plan, run.plan)
        if run.plan.has_loop:
            task.results[TARGET] = run.settings.loop.ending_reward
        return 0

    code = retry_in_process(configure_task, str)
    if code == 0:
        task.finish()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
