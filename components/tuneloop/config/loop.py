"""A loop of sampling and training: what samples, when it ends, how workflows and pods divide it,
and which of its settings exclude one another.

Validators here raise UserError. As it is a ValueError, pydantic puts it into its ValidationError,
from which `core/component.py: convert_validation_error` takes it with its setting and its remedy.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, field_validator, model_validator

from tuneloop.config.engines import EngineConfig, VllmEngine
from tuneloop.config.pipeline import Nodes, PipelineConfig
from tuneloop.config.sections import find_section
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.inference.rounds import bound_staleness
from tuneloop.workflow.pod_hook import find_obstacle
from tuneloop.workflow.pod_loop import PerPod

INHERITED = {
    "max_tokens": "rollout.max_tokens",
    "environment": "rollout.environment",
    "environment_args": "rollout.environment_args",
    "max_turns": "rollout.max_turns",
    "keep_reasoning": "rollout.keep_reasoning",
    "canary_tolerance": "rollout.canary_tolerance",
    "timeout_s": "rollout.timeout_s",
    "reward_timeout_s": "reward.timeout_s",
    "escape_score": "reward.escape_score",
    "error_budget": "reward.error_budget",
    "punish": "reward.punish",
    "memory_mb": "reward.memory_mb",
}
"""Setting of `evaluate` → the key of the setting that it has its value from, unless it is set
itself. Both have the same meaning and, in the classes of the stages, the same default.

A new parameter of `rollout` or `reward` that changes how a completion is sampled or scored belongs
here if `evaluate` has it, too: without an entry a user who sets it trains and evaluates
differently. Only pipelines with a loop inherit. `config/listing.py: note_inheritance` prints these
entries, and `config/choices.py: choose_max_tokens` follows ``rollout.max_tokens`` by itself where
that is not set.
"""
UNREACHED = 1e9
"""The mean reward that stands for no target, which no batch earns: the parameters of Argo and KFP
need a number. Only `LoopConfig.ending_reward` uses it."""


class LoopConfig(BaseModel, frozen=True, extra="forbid"):
    """When the loop ends, and how its iterations become pods and workflows."""

    # A further setting that ends the loop is an argument of `goes_on` (`workflow/loop_state.py`),
    # which decides everywhere. It has to get there on four ways: as a parameter of the workflow
    # (`argo/pipeline.py: read_limits`) and a term of its condition (`argo/loop.py:
    # build_loop_condition`), as a flag of the pod of iterations (`argo/loop.py: pod_template`,
    # parsed by `local/iterations.py`), and as a parameter of KFP's tasks (`kfp/loop.py`). A fork
    # reads the workflow's parameters, too (`runs/forking.py`).
    iterations: int = Field(60, ge=1, description="maximum number of iterations")
    per_workflow: int = Field(
        60,
        ge=1,
        le=90,
        description="iterations in one workflow; the run continues in another; Argo ends at "
        "depth 100",
    )
    iterations_per_pod: PerPod = Field(
        "auto",
        description="iterations that one pod runs, stage after stage in one process; 0: each stage "
        "has a pod; auto: as many as keep the time between pods below a tenth, and 0 where one pod "
        "cannot run the loop, or runs share devices",
    )
    asynchronous: bool = Field(
        False,
        description="sample the next batch while the policy is updated on this one: rollouts are "
        "then one version old",
    )
    target_reward: float | None = Field(
        0.98,
        description="stop once a batch of rollouts earns this mean reward; none: after the "
        "iterations",
    )
    evaluate_every: int = Field(
        0, ge=0, description="iterations between evaluations; 0: only before and after"
    )

    @property
    def ending_reward(self) -> float:
        """The mean reward at which a workflow's loop ends, as its parameter states it."""
        return UNREACHED if self.target_reward is None else self.target_reward

    @field_validator("iterations_per_pod", mode="before")
    @classmethod
    def _check_number(cls, value: Any) -> Any:
        # Pydantic's message for the union would name both of its types.
        if value != "auto" and not (isinstance(value, int) and value >= 0):
            raise ValueError("must be auto or a number (0: each stage has a pod)")
        return value


class LoopPipelineConfig(PipelineConfig):
    """Settings of a run with a loop.

    Its sections `rollout` and `update` are those of the stages that the loop repeats; a pipeline
    has them, made of its stages' parameters.
    """

    # A validator that reads a section by its name, as those below read `rollout` and `update`,
    # makes the name obligatory for every pipeline with a loop, also those of third parties.
    nodes: Nodes = 1
    engine: EngineConfig = Field(VllmEngine(), description="what samples completions")
    loop: LoopConfig = LoopConfig()
    if TYPE_CHECKING:
        rollout: Any
        update: Any

    @model_validator(mode="before")
    @classmethod
    def _inherit_sampling(cls, values: Any) -> Any:
        """Give `evaluate` what `rollout` and `reward` set and it does not, so that a policy is
        measured as it is trained."""
        if not isinstance(values, Mapping) or "evaluate" not in cls.model_fields:
            return values
        sections = {name: values.get(name, {}) for name in ("rollout", "reward", "evaluate")}
        if not all(isinstance(section, Mapping) for section in sections.values()):
            return values
        evaluate = sections["evaluate"]
        # A third party's pipeline may evaluate by a stage with other settings.
        evaluate_class = find_section(cls.model_fields["evaluate"])
        names = evaluate_class.model_fields if evaluate_class else {}
        inherited: JsonObject = {}
        for name, origin in INHERITED.items():
            section, setting = origin.split(".")
            if name in names and setting in sections[section]:
                inherited[name] = sections[section][setting]
        environment = sections["rollout"].get("environment")
        if "environment" in evaluate and evaluate["environment"] != environment:
            # The arguments are those of another environment.
            inherited.pop("environment_args", None)
        # What a user sets of `evaluate` stands.
        return dict(values) | {"evaluate": inherited | dict(evaluate)}

    @property
    def max_staleness(self) -> int:
        """The maximum age, in versions, of rollouts that are trained on; at least the age that the
        loop causes. The file of a pipeline hands it to `policy_update`, in place of the setting
        ``update.max_staleness``."""
        rollout = self.rollout
        carried = 0
        # With `carry_after`, completions that are not done after so many tokens are sampled on in the
        # next iteration, so that a group may have been begun some versions before.
        if rollout.carry_after:
            rounds = rollout.max_tokens // rollout.carry_after
            carried = bound_staleness(
                rounds, rollout.oversampled_prompts, rollout.prompts_per_iteration
            )
            carried += self.engine.options.get("max_staleness", 0)
        return max(self.update.max_staleness, int(self.loop.asynchronous), carried)

    @property
    def iterations_per_pod(self) -> PerPod:
        """Iterations per pod, as graphs use it in place of ``loop.iterations_per_pod``: ``auto`` is
        0 where a pod cannot run the loop, or an extension objects to automatic iterations
        (`PodHook.find_obstacle`). Kubeflow Pipelines ignore it: there `kfp.unroll` decides."""
        iterations = self.loop.iterations_per_pod
        if iterations != "auto":
            return iterations
        obstacle = find_obstacle(self.cluster, "automatic iterations") or self._find_obstacle()
        return 0 if obstacle else iterations

    def _find_obstacle(self) -> UserError | None:
        """Return what keeps one pod from running the stages of the loop; None if nothing does. With
        ``iterations_per_pod: auto`` it makes each stage a pod; with a number it is raised."""
        setting = "loop.iterations_per_pod"
        # The ranks of several pods meet in a JobSet of their own.
        if self.nodes > 1:
            remedy = f"{setting} puts all stages into one pod: set nodes to 1, or {setting} to 0"
            return UserError("nodes", self.nodes, remedy)
        obstacle = find_obstacle(self.cluster, "iterations")
        if obstacle:
            return obstacle
        if self.loop.asynchronous:
            remedy = f"overlaps stages; {setting} runs one at a time: set it to 0"
            return UserError("loop.asynchronous", True, remedy)
        server = self.engine.server
        if server and server.shares_gpu:
            remedy = f"gives the GPU to one process after the other: set {setting} to 0"
            return UserError("engine.colocate", True, remedy)
        return None

    def published(self, run: str) -> dict[str, str]:
        """Return where new versions are published if servers pull them, as the parameter
        ``weights``: by default below the URL `run`."""
        publication = self.engine.publication
        return {"weights": publication.url or f"{run}/weights"} if publication else {}

    @model_validator(mode="after")
    def _check_division(self) -> "LoopPipelineConfig":
        """Check how batches, pods and workflows divide the loop."""
        groups = self.rollout.prompts_per_iteration
        parts = self.update.updates_per_batch
        if parts > groups:
            remedy = (
                f"splits a batch of rollout.prompts_per_iteration ({groups}): "
                "set it to at most that"
            )
            raise UserError("update.updates_per_batch", parts, remedy)
        carry_after = self.rollout.carry_after
        if self.loop.asynchronous and carry_after:
            remedy = (
                "groups are carried in the checkpoint, which is not there yet with "
                "loop.asynchronous: unset one"
            )
            raise UserError("rollout.carry_after", carry_after, remedy)
        per_pod = self.loop.iterations_per_pod
        # Auto is no number yet, and 0 puts each stage into a pod of its own.
        if isinstance(per_pod, int) and per_pod:
            per_workflow = self.loop.per_workflow
            if per_workflow % per_pod:
                remedy = f"must be a multiple of loop.iterations_per_pod ({per_pod})"
                raise UserError("loop.per_workflow", per_workflow, remedy)
            obstacle = self._find_obstacle()
            if obstacle:
                raise obstacle
        return self

    @model_validator(mode="after")
    def _check_asynchronous(self) -> "LoopPipelineConfig":
        """Check that a loop which samples and trains at once has an engine for that."""
        if not self.loop.asynchronous:
            return self
        server = self.engine.server
        if server and server.shares_gpu:
            remedy = "gives the GPU to one process at a time: leave loop.asynchronous out"
            raise UserError("engine.colocate", True, remedy)
        if self.engine.follows_newest:
            remedy = (
                "samples with the version before the newest, which a server that follows the "
                "newest no longer has: set engine.weights to load, or leave it out"
            )
            raise UserError("loop.asynchronous", True, remedy)
        return self

    @model_validator(mode="after")
    def _check_servers(self) -> "LoopPipelineConfig":
        """Check that the cluster has the devices that the run's servers compute on."""
        server = self.engine.server
        if server is None:
            return self
        if server.replicas > 1:
            obstacle = find_obstacle(self.cluster, "several servers")
            if obstacle:
                raise UserError("engine.replicas", server.replicas, obstacle.remedy)
        if self.cluster.sampler.gpus:
            server.check_gpus(self.cluster.sampler.gpus)
        return self
