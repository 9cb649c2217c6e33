"""The stages and servers that a workflow starts, and the base model that they work on.

It joins the plan (what runs) with the graph (how often), for all other modules here. Templates that
the plan does not name, such as the step ``continue`` and those of extensions, are in `counts` and
not in `by_template`.
"""

from dataclasses import dataclass
from functools import cached_property

from tuneloop.argo.memory_estimate import UNKNOWN_MODEL, context_of, facts_of
from tuneloop.config.model_facts import Model, ModelFacts
from tuneloop.core.artifacts import Role
from tuneloop.core.component import Component
from tuneloop.core.json_types import JsonMapping
from tuneloop.planning.counts import RunCounts, count_runs
from tuneloop.workflow.plan import PodPlan, RunPlan, ServerPlan, StagePlan


@dataclass(frozen=True)
class PlannedPods:
    """The stages and servers that a rendered workflow starts.

    Attributes:
        plan: the workflow's.
        counts: how often each of them runs at most.
        by_template: template → stage or server, in the order of the graph. The stages that a pod of
            iterations runs stand here in its place; a stage of several nodes has the template of
            its job (`StagePlan.job_template`).
    """

    plan: RunPlan
    counts: RunCounts
    by_template: dict[str, PodPlan]

    @property
    def stages(self) -> list[StagePlan]:
        """The stages, in the order of the graph."""
        return [pod for pod in self.by_template.values() if isinstance(pod, StagePlan)]

    @property
    def servers(self) -> list[ServerPlan]:
        """The rollout servers."""
        return [pod for pod in self.by_template.values() if isinstance(pod, ServerPlan)]

    @cached_property
    def facts(self) -> ModelFacts | None:
        """What is known of the base model; None where no stage brings one. A fork goes on with it,
        and does not run this stage."""
        return facts_of(self.plan.stages.values())

    @cached_property
    def model(self) -> Model | str:
        """The base model, or why its shape is unknown."""
        return UNKNOWN_MODEL if self.facts is None else self.facts.shape

    @cached_property
    def context(self) -> int | None:
        """The most tokens of a prompt and its completion in the engine; None: not limited."""
        return context_of(self.by_template.values())

    def list_stages_of(self, component: Component) -> list[StagePlan]:
        """List the stages that are calls of a component."""
        return [stage for stage in self.stages if stage.component is component]

    def list_role(self, role: Role) -> list[StagePlan]:
        """List the stages that have a role in a loop, wherever they run."""
        return [stage for stage in self.stages if stage.role == role]


def list_planned_pods(workflow: JsonMapping, plan: RunPlan) -> PlannedPods:
    """List what a workflow with this plan starts. A stage that no graph calls starts nothing."""
    counts = count_runs(workflow, plan)
    pods: dict[str, PodPlan] = {}
    for template in counts.stages:
        pod = plan.find_pod(template)
        # A step that only calls an API is neither a stage nor a server.
        if pod:
            pods[template] = pod
    return PlannedPods(
        plan=plan,
        counts=counts,
        by_template=pods,
    )
