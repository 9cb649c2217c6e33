"""What samples completions: the engine, its server, and how new weights reach it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tuneloop.core import plugins
from tuneloop.inference.engines import check_args
from tuneloop.inference.engines.endpoint import check_urls
from tuneloop.inference.fleet import open_fleet
from tuneloop.weights.codec import Encoding


class EngineConfig(BaseModel):
    """What samples completions."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: Annotated[str, plugins.validate_variant("engines")] = Field(
        "vllm",
        description="vllm: one server for the run; transformers: in the stage's own process; endpoint: somebody else's "
        "server, at rollout_endpoint_url; or pkg.mod:attr",
    )
    port: int = Field(8765, ge=1, le=65535, description="where the vLLM server listens")
    replicas: int = Field(
        1, ge=1, description="vLLM servers of the run, each with cluster.sampler's GPUs; prompts are spread over them"
    )
    args: dict[str, Any] | None = Field(
        None, description="the engine's own options; default: for vllm a short context without graph capture"
    )
    deterministic: bool = Field(
        False,
        description="of vllm: the same bits in every run, by one batch at a time, which is made anew where it was lost",
    )
    pull: bool = Field(
        False, description="publish each version as a delta, for whoever serves to pull; else servers load checkpoints"
    )
    weights: str | None = Field(None, description="URL to publish versions below; default: <store>/<run>/weights")
    encoding: Encoding = Field("gap8-xor", description="of deltas; xor and overwrite are read by slime and SGLang, too")
    fleet_has_base: bool = Field(False, description="publish no version 0: replicas start on the base model (--base)")
    colocate: bool = Field(
        False, description="one GPU for trainer and vLLM: the server gives its memory back whenever it is not sampling"
    )
    rollout_endpoint_url: str | None = Field(
        None, description="of the engine `endpoint`, several with commas between; its fleet pulls, or `fleet` is set"
    )
    fleet: str | None = Field(
        None,
        description="of the engine `endpoint`: workers that pull nothing, to be brought to each version before it is "
        "asked for; http://host:port,…, dns://name:port, service://name.namespace, dynamo://name.namespace",
    )

    @model_validator(mode="after")
    def _check_combination(self) -> EngineConfig:
        somewhere = self.rollout_endpoint_url is not None or self.fleet is not None
        if (self.name == "endpoint") != somewhere:
            raise ValueError("name endpoint goes with rollout_endpoint_url or fleet: set both, or neither")
        if self.rollout_endpoint_url is not None:
            check_urls(self.rollout_endpoint_url)
        if self.fleet is not None:
            open_fleet(self.fleet)
            if self.fleet.startswith("dynamo:") and self.rollout_endpoint_url is not None:
                raise ValueError("a graph's name says its URL: set fleet or rollout_endpoint_url, not both")
        if self.name == "endpoint" and self.pull == (self.fleet is not None):
            raise ValueError("an endpoint gets new weights by pulling them, or by a fleet: set pull or fleet, not both")
        if self.name == "transformers" and self.pull:
            raise ValueError("transformers loads each checkpoint itself and pulls nothing: unset pull")
        if self.colocate and (self.name != "vllm" or self.pull):
            raise ValueError("colocate is of the run's own server, which loads checkpoints: set name vllm, unset pull")
        if self.replicas > 1 and (self.name != "vllm" or self.colocate):
            raise ValueError("replicas are vLLM servers with devices of their own: set name vllm, unset colocate")
        if self.deterministic and self.name != "vllm":
            raise ValueError("deterministic is of the run's own vLLM (transformers is so anyway): set name vllm")
        if self.replicas > 1 and self.options.get("deterministic"):
            raise ValueError("replicas share out a batch by which of them are there: unset deterministic or replicas")
        if (self.weights is not None or self.encoding != "gap8-xor") and not self.pull:
            raise ValueError("weights and encoding are of what is published: set pull")
        if self.fleet_has_base and not (self.name == "endpoint" and self.pull):
            raise ValueError("fleet_has_base is of replicas that pull, of an endpoint: set name endpoint, and pull")
        check_args(self.name, self.args or {}, "args.")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """`args`, or the default of the engine that was chosen; and the fleet."""
        short = {"max_model_len": 256, "enforce_eager": True}
        given = self.args if self.args is not None else short if self.name == "vllm" else {}
        if self.deterministic:
            given = {**given, "deterministic": True}
        if self.colocate:
            return {**given, "enable_sleep_mode": True}
        return {**given, "fleet": self.fleet} if self.fleet else given
