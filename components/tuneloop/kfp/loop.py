"""A loop as tasks of Kubeflow Pipelines: the counterpart of `tuneloop.argo.loop`.

`LoopTasks` draws it in one of two forms, and the stages before and after it. In one task
(`iterations_step`) `tuneloop.kfp.iterations` runs its iterations, stage after stage; written out,
each stage of each iteration is a task.

The words of a loop (step, wire, carry, check, finish) are those of `workflow/loop.py`. Every step
gets what a user has set for the run (`tuneloop.kfp.configure`), and the URLs below the run that it
has a parameter for (`config.pipeline.PipelineConfig.published`), too.
"""

from dataclasses import dataclass
from typing import Any

from kfp import dsl
from kfp.dsl import Dataset, Output

from tuneloop.argo.run_plan import POD
from tuneloop.config.loop import LoopPipelineConfig
from tuneloop.core.component import Component
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.program import encode_flags
from tuneloop.kfp import template
from tuneloop.kfp.iterations import get_output_name
from tuneloop.kfp.stage import CHANGES, MEAN_REWARD, REWARDS_INPUT, TARGET, URL
from tuneloop.kfp.task_plan import IterationsPlan, is_written_out
from tuneloop.kfp.template import REQUIRED, Signature
from tuneloop.workflow.loop import Loop, Step, output_of, step_of

DESCRIPTIONS = template.DESCRIPTIONS | {
    URL: "URL of the run, below which the iterations commit their artifacts",
    "run_id": "KFP's own id of the run that this task belongs to",
}
"""Parameter of the task that runs the iterations → description.

Its inputs and outputs are in `_build_iterations_signature`; `iterations.py` reads and writes them.
"""
Steps = JsonMapping
"""Name of a stage → the function that creates its task (`pipeline.py: build_steps`). With a loop
that one task runs, `POD` is a name, too."""


def select_parameters(stage: Component, values: JsonMapping) -> JsonObject:
    """Return those of `values` that are parameters of a stage."""
    return {name: value for name, value in values.items() if name in stage.Params.model_fields}


@dataclass
class LoopTasks:
    """Draws a loop inside a pipeline.

    Attributes:
        loop: what is drawn.
        steps: create the tasks.
        config: settings of the pipeline.
        url: of the run.
        shared: URLs below the run, for every stage that has such a parameter.
        changes: task → what it does otherwise than it was compiled, an output of the first task
            (`configure.py: find_changes`).
        target_reward: the mean reward that ends the loop, an output of the first task.
        values: value of the loop → the artifact that the first iteration starts from.
    """

    loop: Loop
    steps: Steps
    config: LoopPipelineConfig
    url: Any
    shared: JsonMapping
    changes: JsonMapping
    target_reward: Any
    values: JsonMapping

    def draw(self) -> None:
        """Evaluate the policy, run the loop, evaluate and finish."""
        check = self.loop.check
        values = dict(self.values)
        # It tells an evaluation outside of the iterations, as on Argo.
        values["iteration"] = 0
        self.call(check, f"{check.name}-before", self.url, values)
        if is_written_out(self.config):
            self.finish(self.write_out())
            return
        arguments: JsonObject = {TARGET: self.target_reward, CHANGES: self.changes[POD]}
        arguments |= self.values
        task = self.steps[POD](
            POD, url=self.url, run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER, **arguments
        )
        self.finish({name: task.outputs[get_output_name(name)] for name in self.loop.carry})

    def finish(self, trained: JsonMapping) -> None:
        """Evaluate the last policy, and create the tasks of the loop's `finish` steps.

        Args:
            trained: the values that the last iteration passes on.
        """
        values = dict(self.values)
        values.update(trained)
        values["iteration"] = 0
        check = self.loop.check
        self.call(check, f"{check.name}-after", self.url, values)
        for step in self.loop.finish:
            # The settings may have left out an optional one.
            if step.name in self.steps:
                self.call(step, step.name, self.url, values)

    def write_out(self) -> JsonObject:
        """Unroll the loop, with tasks for every iteration; return the values that the last one
        passes on.
        """
        carried: JsonObject = {}
        check = self.loop.check
        interval = self.config.loop.evaluate_every
        for iteration in range(1, self.config.loop.iterations + 1):
            url = f"{self.url}/iterations/{iteration}"
            values = dict(self.values)
            values.update(carried)
            values["iteration"] = iteration
            carried = self.iterate(values, url)
            if interval and iteration % interval == 0:
                # The evaluation is of the policy that this iteration has trained.
                values.update(carried)
                self.call(check, check.name, url, values)
        return carried

    def iterate(self, values: JsonMapping, url: str) -> JsonObject:
        """Create the tasks of one iteration, and return the values that it passes on.

        Which iteration ends the loop is decided in the pod of the step that takes the scorer's
        artifact. Three places have to agree about it: `TARGET` is passed here, declared by
        `template.py: stage_signature`, and compared by `stage.py: report_commit`.

        Args:
            values: what its steps can take, but for outputs of steps before.
            url: below which its stages commit.

        Raises:
            UserError: `report_commit` would not find the mean reward.
        """
        available = dict(values)
        # The step whose output `reward` is; the one that takes its artifact knows the mean reward.
        scorer = step_of(self.loop.reward)
        for step in self.loop.steps:
            arguments: JsonObject = {}
            # It marks its handle where the reward ends the loop (`REACHED` of `kfp/stage.py`).
            if scorer in map(step_of, step.wires.values()):
                self._check_reward(step, scorer)
                arguments[TARGET] = self.target_reward
            task = self.call(step, step.name, url, available, **arguments)
            for name, output in task.outputs.items():
                available[f"{step.name}.{name.replace('_', '-')}"] = output
        return {name: available[wire] for name, wire in self.loop.carry.items()}

    def _check_reward(self, step: Step, scorer: str) -> None:
        """Refuse a step for which the mean reward has another name than in `report_commit`."""
        result = output_of(self.loop.reward).replace("-", "_")
        wire = step.wires.get(REWARDS_INPUT)
        if result != MEAN_REWARD or wire is None or step_of(wire) != scorer:
            remedy = (
                f"the loop could not end by its reward: {step.name} needs the input "
                f"{REWARDS_INPUT} from {scorer}, with the result {MEAN_REWARD}; set it to 0"
            )
            raise UserError("kfp.unroll", self.config.kfp.unroll, remedy)

    def call(
        self, step: Step, name: str, url: Any, values: JsonMapping, **parameters: Any
    ) -> dsl.PipelineTask:
        """Create the task of a step.

        Args:
            step: of the loop.
            name: of the task, which commits to that name below `url`.
            url: of the run, or of an iteration.
            values: what the wires of the step can lead to.
            parameters: further ones of the stage.
        """
        arguments = select_parameters(step.component, self.shared)
        arguments[CHANGES] = self.changes[step.name]
        arguments |= parameters
        for target, wire in step.wires.items():
            # The endpoint is a constant of KFP's stages (`task_plan.plan_tasks`).
            if wire != "endpoint":
                arguments[target] = values[wire]
        return self.steps[step.name](name, url=f"{url}/{name}", **arguments)


def iterations_step(loop: Loop, plan: IterationsPlan, config: LoopPipelineConfig) -> template.Step:
    """Return the step that runs `tuneloop.kfp.iterations`, with the flags that `task_plan.py:
    _plan_iterations` has planned."""
    flags = encode_flags(plan.options)
    types = _choose_types(loop)
    image = plan.pod.image
    create_task = template.define_container_component(
        POD,
        "Iterations of the loop.",
        _build_iterations_signature(loop, types),
        DESCRIPTIONS,
        image,
        ["python3", "-m", "tuneloop.kfp.iterations"],
        flags,
    )

    def create_uncached_task(**arguments: Any) -> dsl.PipelineTask:
        # A task that is repeated continues after the committed iterations.
        passed_once = template.pass_artifacts_once(arguments, types)
        return create_task(**passed_once).set_caching_options(False)

    pod = plan.pod
    return template.make_step(
        create_uncached_task, image, config.cluster, config.kfp, pod.resource_role, pod.resources
    )


def _choose_types(loop: Loop) -> JsonObject:
    """Return value of the loop → artifact type: the one that `template.py: TYPES` has for the input
    of a step which takes the value."""
    input_by_wire: dict[str, str] = {}
    for step in loop.steps:
        for name, wire in step.wires.items():
            input_by_wire[wire] = name
    values = list(loop.carry)
    values += loop.constants
    return {name: template.TYPES.get(input_by_wire[name], Dataset) for name in values}


def _build_iterations_signature(loop: Loop, types: JsonMapping) -> Signature:
    """Build the inputs and outputs of the task that runs the iterations.

    Args:
        loop: whose values it takes and passes on.
        types: value of the loop → artifact type.
    """
    kinds: JsonObject = {URL: str, "run_id": str, CHANGES: str, TARGET: float}
    for name in loop.carry:
        kinds[get_output_name(name)] = Output[types[name]]
    for name, kind in template.UI_TYPES.items():
        kinds[name] = Output[kind]
    kinds["last_iteration"] = dsl.OutputPath(int)
    kinds[output_of(loop.reward).replace("-", "_")] = dsl.OutputPath(float)
    signature = template.define_inputs(types, dict.fromkeys(types, True))
    for name, kind in kinds.items():
        signature[name] = (kind, REQUIRED)
    return signature
