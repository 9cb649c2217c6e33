"""What samples completions: the section ``engine``, one class for each kind of engine.

Each class has the settings that mean something for its engine. How new weights reach its servers is
a section inside, `weights`, again of several kinds: servers *load* checkpoints, *pull* published
versions, or are given each version by a *refit*."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from tuneloop.config.sections import PLUGIN, expand_text, make_kind_reader
from tuneloop.core import plugins
from tuneloop.core.json_types import JsonObject
from tuneloop.inference.capabilities import Capabilities, find_capabilities
from tuneloop.inference.engines import check_args
from tuneloop.inference.engines.endpoint import check_urls
from tuneloop.inference.fleet import open_fleet
from tuneloop.weights.codec import Encoding
from tuneloop.workflow.settings import MEMORY

SHORT_CONTEXT = {"max_model_len": 256, "enforce_eager": True}
"""vLLM's arguments where none are set: a short context without graph capture, for the demo."""


class LoadCheckpoints(BaseModel, frozen=True, extra="forbid"):
    """The servers load each checkpoint from the store, in place."""

    kind: Literal["load"] = Field("load", description="servers load checkpoints from the store")


class PullVersions(BaseModel, frozen=True, extra="forbid"):
    """Each version is published as a delta to the one before, and the servers pull it."""

    kind: Literal["pull"] = Field("pull", description="each version is a delta, which servers pull")
    url: str | None = Field(
        None, description="URL to publish versions below; default: <store>/<run>/weights"
    )
    encoding: Encoding = Field(
        "gap8-xor", description="format of deltas; slime and SGLang read xor and overwrite, too"
    )

    @property
    def has_base_version(self) -> bool:
        """Whether the base model is published, as version 0."""
        return True


class PullByFleet(PullVersions, frozen=True, extra="forbid"):
    """Servers of yours pull the versions, and may have the base model already."""

    fleet_has_base: bool = Field(
        False, description="publish no version 0: replicas start on the base model (--base)"
    )

    @property
    def has_base_version(self) -> bool:
        return not self.fleet_has_base


class RefitFleet(BaseModel, frozen=True, extra="forbid"):
    """Servers that do not pull are given each version before it is sampled from."""

    kind: Literal["refit"] = Field("refit", description="each server is given a version before use")
    fleet: str = Field(
        description="the servers: http://host:port,…, dns://name:port, service://name.namespace, "
        "dynamo://name.namespace"
    )

    @model_validator(mode="after")
    def _check_fleet(self) -> Self:
        open_fleet(self.fleet)
        return self


OwnWeights = Annotated[
    Annotated[LoadCheckpoints, Tag("load")] | Annotated[PullVersions, Tag("pull")],
    Discriminator(make_kind_reader("load", ("load", "pull"))),
    BeforeValidator(expand_text),
]
"""How weights reach servers that the run starts."""
FleetWeights = Annotated[
    Annotated[PullByFleet, Tag("pull")] | Annotated[RefitFleet, Tag("refit")],
    Discriminator(make_kind_reader("pull", ("pull", "refit"))),
    BeforeValidator(expand_text),
]
"""How weights reach servers of yours."""


class Asleep(BaseModel, frozen=True, extra="forbid"):
    """What the rollout server's pod requests while the server sleeps; what is left out stays."""

    cpu: str = Field(
        "", pattern=r"^(\d+(\.\d+)?m?)?$", description="CPU (100m), at most cluster.sampler.cpu"
    )
    memory: str = Field(
        "", pattern=rf"^({MEMORY})?$", description="memory (1Gi), at most what it requests awake"
    )

    @property
    def requests(self) -> dict[str, str]:
        return {name: amount for name, amount in self.model_dump().items() if amount}


class Engine(BaseModel, frozen=True, extra="forbid"):
    """What every engine has, and what code outside asks of one."""

    kind: str
    args: JsonObject | None = Field(None, description="the engine's own options")

    @model_validator(mode="after")
    def _check_args(self) -> Self:
        # Options of somebody else's engine are checked in its stage.
        check_args(self.kind, self.args or {}, "args.")
        return self

    @property
    def capabilities(self) -> Capabilities:
        return find_capabilities(self.kind)

    @property
    def options(self) -> JsonObject:
        """The arguments that stages and servers give to the engine."""
        return dict(self.args or {})

    @property
    def server(self) -> "VllmEngine | None":
        """The settings of the servers that the run starts; None where it starts none."""
        return None

    @property
    def endpoint_url(self) -> str:
        """The URLs of servers that are there already; empty where there are none."""
        return ""

    @property
    def publication(self) -> PullVersions | None:
        """How versions are published for servers that pull; None where none do."""
        return None

    @property
    def follows_newest(self) -> bool:
        """Whether servers move to each new version and have none before it anymore."""
        return self.publication is not None


class VllmEngine(Engine, frozen=True, extra="forbid"):
    """vLLM, as one server for the run or several."""

    kind: Literal["vllm"] = Field("vllm", description="vLLM servers of the run")
    args: JsonObject | None = Field(
        None,
        description="vLLM's own options; default: a short context without graph capture",
    )
    port: int = Field(8765, ge=1, le=65535, description="where the server listens")
    replicas: int = Field(
        1,
        ge=1,
        description="servers of the run, each with cluster.sampler's GPUs; they share the prompts",
    )
    deterministic: bool = Field(
        False,
        description="the same bits in every run; one batch is sampled at a time, and again if it "
        "was lost",
    )
    colocate: bool = Field(
        False,
        description="one GPU for trainer and vLLM: the server gives its memory back whenever it is "
        "not sampling",
    )
    snapshot: bool = Field(
        False, description="keep all GPU state of the server in host memory between rollouts"
    )
    asleep: Asleep | None = Field(
        None,
        description="on a cluster, what the server's pod requests while it sleeps: its pod is "
        "resized in place, within what it was admitted with (manifests/components/resize); on one "
        "machine it does nothing",
    )
    weights: OwnWeights = Field(LoadCheckpoints(), description="how weights reach the servers")

    @property
    def options(self) -> JsonObject:
        # Whoever sets arguments sets all of them.
        options = dict(SHORT_CONTEXT if self.args is None else self.args)
        for name in ("deterministic", "snapshot"):
            if getattr(self, name):
                options[name] = True
        # Between batches the server gives its memory back by vLLM's own sleep.
        if self.colocate:
            options["enable_sleep_mode"] = True
        return options

    @property
    def server(self) -> "VllmEngine":
        return self

    @property
    def publication(self) -> PullVersions | None:
        return self.weights if isinstance(self.weights, PullVersions) else None

    @model_validator(mode="after")
    def _check_single_server(self) -> Self:
        """Refuse what needs one server, where there are several."""
        if self.replicas == 1:
            return self
        single = "replicas are servers with devices of their own, which are always awake"
        if self.options.get("deterministic"):
            raise ValueError(
                "a batch is divided among the replicas that are up: unset deterministic or replicas"
            )
        for name in ("colocate", "snapshot", "asleep"):
            if getattr(self, name):
                raise ValueError(f"{single}: unset {name} or replicas")
        return self

    @model_validator(mode="after")
    def _check_sleep(self) -> Self:
        """Refuse a server that gives memory back and cannot continue without it."""
        for name in ("colocate", "snapshot"):
            if getattr(self, name) and self.publication:
                raise ValueError(
                    f"{name} needs a server that loads checkpoints: unset it, or set weights=load"
                )
        is_kept = self.options.get("enable_sleep_mode") or self.options.get("kv_cache_memory_bytes")
        if self.snapshot and not is_kept:
            raise ValueError(
                "snapshot keeps the cache, too: set kv_cache_memory_bytes or enable_sleep_mode in "
                "args"
            )
        if self.asleep and not self.options.get("enable_sleep_mode"):
            raise ValueError(
                "asleep needs a server that sleeps: set colocate, or enable_sleep_mode in args"
            )
        return self


class TransformersEngine(Engine, frozen=True, extra="forbid"):
    """transformers, in the process of each stage that samples, which loads the checkpoint itself."""

    kind: Literal["transformers"] = Field(
        "transformers", description="in the stage's own process; bit for bit the same in every run"
    )


class EndpointEngine(Engine, frozen=True, extra="forbid"):
    """Servers of yours, which outlive the run."""

    kind: Literal["endpoint"] = Field("endpoint", description="servers of yours, by their URLs")
    rollout_endpoint_url: str | None = Field(
        None, description="URLs of the servers, separated by commas"
    )
    weights: FleetWeights = Field(PullByFleet(), description="how weights reach the servers")

    @property
    def options(self) -> JsonObject:
        options = dict(self.args or {})
        # The engine gives these servers each version itself, and needs their addresses.
        if isinstance(self.weights, RefitFleet):
            options["fleet"] = self.weights.fleet
        return options

    @property
    def endpoint_url(self) -> str:
        return self.rollout_endpoint_url or ""

    @property
    def publication(self) -> PullVersions | None:
        return self.weights if isinstance(self.weights, PullVersions) else None

    @property
    def follows_newest(self) -> bool:
        return True

    @model_validator(mode="after")
    def _check_address(self) -> Self:
        """Refuse servers whose address is not known, or is known twice."""
        if self.rollout_endpoint_url is not None:
            check_urls(self.rollout_endpoint_url)
        is_refitted = isinstance(self.weights, RefitFleet)
        if self.rollout_endpoint_url is None and not is_refitted:
            raise ValueError(
                "endpoint needs the address of its servers: set rollout_endpoint_url, or "
                "weights.kind=refit with weights.fleet"
            )
        # Its frontend is found by its name in the cluster.
        is_graph = isinstance(self.weights, RefitFleet) and self.weights.fleet.startswith("dynamo:")
        if is_graph and self.rollout_endpoint_url is not None:
            raise ValueError(
                "a Dynamo graph's name gives its URL: set weights.fleet or rollout_endpoint_url, "
                "not both"
            )
        return self


class PluginEngine(Engine, frozen=True, extra="forbid"):
    """An engine of a third party, in the process of each stage that samples."""

    kind: Annotated[str, plugins.validate_variant("engines")] = Field(
        description="pkg.mod:attr, or the name of an entry point"
    )
    weights: OwnWeights = Field(LoadCheckpoints(), description="how weights reach the engine")

    @property
    def publication(self) -> PullVersions | None:
        return self.weights if isinstance(self.weights, PullVersions) else None


EngineConfig = Annotated[
    Annotated[VllmEngine, Tag("vllm")]
    | Annotated[TransformersEngine, Tag("transformers")]
    | Annotated[EndpointEngine, Tag("endpoint")]
    | Annotated[PluginEngine, Tag(PLUGIN)],
    Discriminator(make_kind_reader("vllm", ("vllm", "transformers", "endpoint", PLUGIN))),
    BeforeValidator(expand_text),
]
