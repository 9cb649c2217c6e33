"""A loop of sampling and training: when it ends, how it is cut into workflows and pods, and what excludes what."""

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, model_validator

from tuneloop.config.engine import EngineConfig
from tuneloop.config.pipeline import Nodes, PipelineConfig
from tuneloop.core.errors import UserError


class LoopConfig(BaseModel, frozen=True, extra="forbid"):
    """When the loop ends."""

    iterations: int = Field(60, ge=1, description="at most so many")
    per_workflow: int = Field(
        60, ge=1, le=90, description="so many in one workflow, then the run goes on in another; Argo ends at depth 100"
    )
    iterations_per_pod: int = Field(
        0, ge=0, description="0: a pod a stage; else so many iterations in one pod, stage after stage in one process"
    )
    asynchronous: bool = Field(
        False,
        description="sample the next batch while the policy is updated on this one: rollouts are then one version old",
    )
    target_reward: float = Field(0.98, description="stop once a batch of rollouts earns this mean reward")
    evaluate_every: int = Field(0, ge=0, description="evaluate each so many iterations; 0: only before and after")


class LoopPipelineConfig(PipelineConfig):
    """Settings of a run with a loop, whose sections `rollout` and `update` are those of the stages that it repeats."""

    nodes: Nodes = 1
    engine: EngineConfig = EngineConfig()
    loop: LoopConfig = LoopConfig()
    if TYPE_CHECKING:  # a pipeline has them, made of its stages' parameters
        rollout: Any
        update: Any

    @property
    def max_staleness(self) -> int:
        """How old the rollouts may be that the policy learns from: at least as old as the loop makes them."""
        return max(self.update.max_staleness, int(self.loop.asynchronous))

    def published(self, run: str) -> dict[str, str]:
        return {"weights": self.engine.weights or f"{run}/weights"} if self.engine.pull else {}

    @model_validator(mode="after")
    def _check_batches(self) -> "LoopPipelineConfig":
        groups, parts = self.rollout.prompts_per_iteration, self.update.updates_per_batch
        if parts > groups:
            remedy = f"splits a batch of rollout.prompts_per_iteration ({groups}): take that at most"
            raise UserError("update.updates_per_batch", parts, remedy)
        return self

    @model_validator(mode="after")
    def _check_pods(self) -> "LoopPipelineConfig":
        pod, share = self.loop.iterations_per_pod, self.cluster.share
        if pod and self.nodes > 1:
            remedy = "loop.iterations_per_pod puts all stages into one pod: set this to 1, or it to 0"
            raise UserError("nodes", self.nodes, remedy)
        if pod and (part := self.loop.per_workflow) % pod:
            raise UserError("loop.per_workflow", part, f"must be a multiple of loop.iterations_per_pod ({pod})")
        if pod and share and share.roles != "together":
            remedy = "loop.iterations_per_pod trains and samples in one pod: set this to together, or it to 0"
            raise UserError("cluster.share.roles", share.roles, remedy)
        if pod and self.loop.asynchronous:
            remedy = "overlaps stages; loop.iterations_per_pod runs one at a time: set it to 0"
            raise UserError("loop.asynchronous", True, remedy)
        return self

    @model_validator(mode="after")
    def _check_servers(self) -> "LoopPipelineConfig":
        engine, gpus = self.engine, self.cluster.sampler.gpus
        if engine.replicas > 1 and self.cluster.share:
            raise UserError("engine.replicas", engine.replicas, "runs that share devices have one server: unset it")
        tensor, pipeline = (engine.options.get(f"{way}_parallel_size", 1) for way in ("tensor", "pipeline"))
        known = isinstance(tensor, int) and isinstance(pipeline, int)
        if engine.name == "vllm" and gpus and not (known and gpus == tensor * pipeline):
            remedy = f"has to be engine.args.tensor_parallel_size × pipeline_parallel_size ({tensor} × {pipeline})"
            raise UserError("cluster.sampler.gpus", gpus, remedy)
        return self

    @model_validator(mode="after")
    def _check_overlap(self) -> "LoopPipelineConfig":
        if self.engine.colocate and (self.loop.asynchronous or self.loop.iterations_per_pod):
            remedy = "gives the GPU to one process at a time: leave loop.asynchronous and loop.iterations_per_pod out"
            raise UserError("engine.colocate", True, remedy)
        if self.loop.asynchronous and (self.engine.pull or self.engine.fleet):
            remedy = (
                "samples with the version before the newest, which a server that follows the newest no longer has: "
                "leave engine.pull and engine.fleet out"
            )
            raise UserError("loop.asynchronous", True, remedy)
        return self
