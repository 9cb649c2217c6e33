"""A loop of sampling and training: what samples, when it ends, how workflows and pods divide it, what excludes what."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, field_validator, model_validator

from tuneloop.config.pipeline import Nodes, PipelineConfig
from tuneloop.core import plugins
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.inference.engines import check_args
from tuneloop.inference.engines.endpoint import check_urls
from tuneloop.inference.fleet import open_fleet
from tuneloop.inference.rounds import bound_staleness
from tuneloop.weights.codec import Encoding
from tuneloop.workflow.pod_loop import PerPod
from tuneloop.workflow.settings import MEMORY


class Asleep(BaseModel, frozen=True, extra="forbid"):
    """What the rollout server's pod requests while the server sleeps; what is left out stays as it is."""

    cpu: str = Field(
        "", pattern=r"^(\d+(\.\d+)?m?)?$", description="CPU (100m), at most cluster.sampler.cpu"
    )
    memory: str = Field(
        "", pattern=rf"^({MEMORY})?$", description="memory (1Gi), at most what it requests awake"
    )

    @property
    def requests(self) -> dict[str, str]:
        return {name: amount for name, amount in self.model_dump().items() if amount}


class EngineConfig(BaseModel, frozen=True, extra="forbid"):
    """What samples completions."""

    name: Annotated[str, plugins.validate_variant("engines")] = Field(
        "vllm",
        description="vllm: one server for the run; transformers: in the stage's own process; endpoint: your own "
        "server, at rollout_endpoint_url; or pkg.mod:attr",
    )
    port: int = Field(8765, ge=1, le=65535, description="where the vLLM server listens")
    replicas: int = Field(
        1,
        ge=1,
        description="vLLM servers of the run, each with cluster.sampler's GPUs; prompts are spread over them",
    )
    args: JsonObject | None = Field(
        None,
        description="the engine's own options; default: for vllm a short context without graph capture",
    )
    deterministic: bool = Field(
        False,
        description="for vllm: the same bits in every run; one batch is sampled at a time, and again if it was lost",
    )
    pull: bool = Field(
        False,
        description="publish each version as a delta, which servers pull; else servers load checkpoints",
    )
    weights: str | None = Field(
        None, description="URL to publish versions below; default: <store>/<run>/weights"
    )
    encoding: Encoding = Field(
        "gap8-xor", description="format of deltas; slime and SGLang read xor and overwrite, too"
    )
    fleet_has_base: bool = Field(
        False, description="publish no version 0: replicas start on the base model (--base)"
    )
    colocate: bool = Field(
        False,
        description="one GPU for trainer and vLLM: the server gives its memory back whenever it is not sampling",
    )
    snapshot: bool = Field(
        False, description="keep all GPU state of the server in host memory between rollouts"
    )
    asleep: Asleep | None = Field(
        None,
        description="on a cluster, what the server's pod requests while it sleeps: its pod is resized in place, within "
        "what it was admitted with (manifests/components/resize); on one machine it does nothing",
    )
    rollout_endpoint_url: str | None = Field(
        None,
        description="URLs of the engine `endpoint`, separated by commas; its servers pull, or `fleet` is set",
    )
    fleet: str | None = Field(
        None,
        description="for the engine `endpoint`: servers that do not pull, but are given each version before it is "
        "sampled: http://host:port,…, dns://name:port, service://name.namespace, dynamo://name.namespace",
    )

    @model_validator(mode="after")
    def _check_combination(self) -> "EngineConfig":
        somewhere = self.rollout_endpoint_url is not None or self.fleet is not None
        if (self.name == "endpoint") != somewhere:
            raise ValueError(
                "name endpoint goes with rollout_endpoint_url or fleet: set both, or neither"
            )
        if self.rollout_endpoint_url is not None:
            check_urls(self.rollout_endpoint_url)
        if self.fleet is not None:
            open_fleet(self.fleet)
            if self.fleet.startswith("dynamo:") and self.rollout_endpoint_url is not None:
                raise ValueError(
                    "a Dynamo graph's name gives its URL: set fleet or rollout_endpoint_url, not both"
                )
        if self.name == "endpoint" and self.pull == (self.fleet is not None):
            raise ValueError(
                "an endpoint gets new weights by pulling them, or by a fleet: set pull or fleet, not both"
            )
        if self.name == "transformers" and self.pull:
            raise ValueError(
                "transformers loads each checkpoint itself and pulls nothing: unset pull"
            )
        if self.colocate and (self.name != "vllm" or self.pull):
            raise ValueError(
                "colocate needs the run's own server, which loads checkpoints: set name vllm, unset pull"
            )
        if self.snapshot and (self.name != "vllm" or self.pull or self.replicas > 1):
            raise ValueError(
                "snapshot needs the run's one server, which loads checkpoints: set name vllm, unset pull"
            )
        if self.snapshot and not any(
            map(self.options.get, ("enable_sleep_mode", "kv_cache_memory_bytes"))
        ):
            raise ValueError(
                "snapshot keeps the cache, too: set kv_cache_memory_bytes or enable_sleep_mode in args"
            )
        if self.replicas > 1 and (self.name != "vllm" or self.colocate):
            raise ValueError(
                "replicas are vLLM servers with devices of their own: set name vllm, unset colocate"
            )
        if self.asleep and (
            self.name != "vllm" or self.replicas > 1 or not self.options.get("enable_sleep_mode")
        ):
            raise ValueError(
                "asleep needs one vLLM server that sleeps: set colocate, or enable_sleep_mode in args"
            )
        if self.deterministic and self.name != "vllm":
            raise ValueError(
                "deterministic needs the run's own vLLM (transformers always is so): set name vllm"
            )
        if self.replicas > 1 and self.options.get("deterministic"):
            raise ValueError(
                "a batch is divided among the replicas that are up: unset deterministic or replicas"
            )
        if (self.weights is not None or self.encoding != "gap8-xor") and not self.pull:
            raise ValueError("weights and encoding apply to published versions: set pull")
        if self.fleet_has_base and not (self.name == "endpoint" and self.pull):
            raise ValueError(
                "fleet_has_base needs an endpoint whose replicas pull: set name endpoint, and pull"
            )
        check_args(self.name, self.args or {}, "args.")
        return self

    @property
    def options(self) -> JsonObject:
        """`args`, or the default of the engine that was chosen; and the fleet."""
        short = {"max_model_len": 256, "enforce_eager": True}
        given = self.args if self.args is not None else short if self.name == "vllm" else {}
        own = {name: True for name in ("deterministic", "snapshot") if getattr(self, name)}
        given = {**given, **own}
        if self.colocate:
            return {**given, "enable_sleep_mode": True}
        return {**given, "fleet": self.fleet} if self.fleet else given


UNREACHED = 1e9
"""The target of a loop that has none: a number, as Argo's and KFP's parameters need one."""


class LoopConfig(BaseModel, frozen=True, extra="forbid"):
    """When the loop ends."""

    iterations: int = Field(60, ge=1, description="maximum number of iterations")
    per_workflow: int = Field(
        60,
        ge=1,
        le=90,
        description="iterations in one workflow; the run continues in another; Argo ends at depth 100",
    )
    iterations_per_pod: PerPod = Field(
        "auto",
        description="iterations that one pod runs, stage after stage in one process; 0: each stage has a pod; auto: as "
        "many as keep the time between pods below a tenth, and 0 where one pod cannot run the loop, or runs share "
        "devices",
    )
    asynchronous: bool = Field(
        False,
        description="sample the next batch while the policy is updated on this one: rollouts are then one version old",
    )
    target_reward: float | None = Field(
        0.98,
        description="stop once a batch of rollouts earns this mean reward; none: after the iterations",
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
        if value != "auto" and not (isinstance(value, int) and value >= 0):
            raise ValueError("must be auto or a number (0: each stage has a pod)")
        return value


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
        """The maximum age, in versions, of rollouts that are trained on; at least the age that the loop causes."""
        rollout = self.rollout
        carried = 0
        if rollout.carry_after:
            rounds = rollout.max_tokens // rollout.carry_after
            carried = bound_staleness(
                rounds, rollout.oversampled_prompts, rollout.prompts_per_iteration
            )
            carried += self.engine.options.get("max_staleness", 0)
        return max(self.update.max_staleness, int(self.loop.asynchronous), carried)

    @property
    def iterations_per_pod(self) -> PerPod:
        """Iterations per pod; auto is 0 where a pod cannot run the loop, or would keep other runs from their lease."""
        asked = self.loop.iterations_per_pod
        return 0 if asked == "auto" and (self.cluster.share or self._find_obstacle()) else asked

    def _find_obstacle(self) -> UserError | None:
        """Return what keeps one pod from running the stages of the loop."""
        share = self.cluster.share
        asked = "loop.iterations_per_pod"
        if self.nodes > 1:
            return UserError(
                "nodes",
                self.nodes,
                f"{asked} puts all stages into one pod: set this to 1, or it to 0",
            )
        if share and share.roles != "together":
            remedy = f"{asked} trains and samples in one pod: set this to together, or it to 0"
            return UserError("cluster.share.roles", share.roles, remedy)
        if self.loop.asynchronous:
            return UserError(
                "loop.asynchronous",
                True,
                f"overlaps stages; {asked} runs one at a time: set it to 0",
            )
        if self.engine.colocate:
            return UserError(
                "engine.colocate",
                True,
                f"gives the GPU to one process after the other: set {asked} to 0",
            )
        return None

    def published(self, run: str) -> dict[str, str]:
        return {"weights": self.engine.weights or f"{run}/weights"} if self.engine.pull else {}

    @model_validator(mode="after")
    def _check_division(self) -> "LoopPipelineConfig":
        """Check how batches, pods and workflows divide the loop."""
        groups = self.rollout.prompts_per_iteration
        parts = self.update.updates_per_batch
        if parts > groups:
            remedy = f"splits a batch of rollout.prompts_per_iteration ({groups}): set it to at most that"
            raise UserError("update.updates_per_batch", parts, remedy)
        if self.loop.asynchronous and (size := self.rollout.carry_after):
            remedy = "groups are carried in the checkpoint, which is not there yet with loop.asynchronous: unset one"
            raise UserError("rollout.carry_after", size, remedy)
        pod = self.loop.iterations_per_pod
        if isinstance(pod, int) and pod:
            if (part := self.loop.per_workflow) % pod:
                raise UserError(
                    "loop.per_workflow",
                    part,
                    f"must be a multiple of loop.iterations_per_pod ({pod})",
                )
            if obstacle := self._find_obstacle():
                raise obstacle
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> "LoopPipelineConfig":
        """Check the settings that the engine's servers do not support."""
        engine = self.engine
        gpus = self.cluster.sampler.gpus
        if engine.replicas > 1 and self.cluster.share:
            raise UserError(
                "engine.replicas",
                engine.replicas,
                "runs that share devices have one server: unset it",
            )
        tensor, pipeline = (
            engine.options.get(f"{way}_parallel_size", 1) for way in ("tensor", "pipeline")
        )
        known = isinstance(tensor, int) and isinstance(pipeline, int)
        if engine.name == "vllm" and gpus and not (known and gpus == tensor * pipeline):
            remedy = f"has to be engine.args.tensor_parallel_size × pipeline_parallel_size ({tensor} × {pipeline})"
            raise UserError("cluster.sampler.gpus", gpus, remedy)
        if engine.colocate and self.loop.asynchronous:
            remedy = "gives the GPU to one process at a time: leave loop.asynchronous out"
            raise UserError("engine.colocate", True, remedy)
        if self.loop.asynchronous and (engine.pull or engine.fleet):
            remedy = (
                "samples with the version before the newest, "
                "which a server that follows the newest no longer has: "
            )
            raise UserError(
                "loop.asynchronous", True, f"{remedy}leave engine.pull and engine.fleet out"
            )
        return self
