"""What samples completions: the section ``engine``, one class for each kind of engine.

Each class has the settings that mean something for its engine. How new weights reach its servers is
a section inside, `weights` (`tuneloop.config.engine_weights`).

An engine that serves has a class that extends `ServingEngine`: the graphs of Argo and of Kubeflow
Pipelines ask it for the servers to start. An engine whose class is not in the union `EngineConfig`
names it in its module as ``SECTION``.

`tests/unit/config/test_config.py` tests kinds and their keys,
`tests/unit/inference/test_endpoint.py` what settings exclude, and
`tests/unit/inference/test_served.py` an engine of a third party that serves."""

import pkgutil
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    SerializeAsAny,
    Tag,
    WrapValidator,
    model_validator,
)

from tuneloop.config.engine_weights import (
    FleetWeights,
    LoadCheckpoints,
    OwnWeights,
    PullByFleet,
    PullVersions,
    RefitFleet,
)
from tuneloop.config.sections import (
    PLUGIN,
    PluginSection,
    expand_text,
    make_kind_reader,
    read_kind,
)
from tuneloop.core import plugins
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.inference.capabilities import Capabilities, find_capabilities
from tuneloop.inference.engines import check_args
from tuneloop.inference.engines.endpoint import check_urls
from tuneloop.workflow.settings import MEMORY

SHORT_CONTEXT = {"max_model_len": 256, "enforce_eager": True}
"""vLLM's arguments where none are set: a context of 256 tokens without graph capture, for the demo.
`config/choices.py` (`choose_context`, `choose_engine_args`) has the 256, too."""


class Asleep(BaseModel, frozen=True, extra="forbid"):
    """What the rollout server's pod requests while the server sleeps; what is left out stays."""

    # Each field is the name of a resource in Kubernetes; `argo/run_plan.py: check_asleep` compares
    # it with what the pod requests awake, and knows these two.
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

    # The properties below are the whole interface. A field of a subclass reaches a stage or a
    # server only by `options`, which both get as the engine's arguments, unless a graph passes it
    # on by itself.
    kind: str
    args: JsonObject | None = Field(None, description="the engine's own options")

    @model_validator(mode="after")
    def _check_args(self) -> Self:
        # Options of a third party's engine are checked in the stage, whose image has it.
        check_args(self.kind, self.args or {}, "args.")
        return self

    @model_validator(mode="after")
    def _check_capabilities(self) -> Self:
        """Refuse an engine whose module and whose class differ on whether it serves."""
        # Stages would be planned as clients of a server that nothing starts.
        if self.capabilities.serves and self.server is None:
            raise ValueError(
                f"{self.kind} serves, but its settings have no server: SECTION of its module has to "
                "name a class that extends tuneloop.config.engines.ServingEngine"
            )
        if self.server and not self.capabilities.serves:
            raise ValueError(
                f"{self.kind} has settings of a server, but does not serve: CAPABILITIES of its "
                "module has to say serves=True"
            )
        # Else each server would end as soon as it is started, after the first stages have run.
        module = plugins.find_module("engines", self.kind)
        if self.server and not hasattr(module, "open_served_engine"):
            raise ValueError(f"{self.kind} serves, but its module has no open_served_engine")
        return self

    @property
    def capabilities(self) -> Capabilities:
        return find_capabilities(self.kind)

    @property
    def options(self) -> JsonObject:
        """The arguments that stages and servers give to the engine."""
        return dict(self.args or {})

    @property
    def server(self) -> "ServingEngine | None":
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
        """Whether servers move to each new version and no longer have the one before it; such an
        engine excludes ``loop.asynchronous``."""
        return self.publication is not None


class ServingEngine(Engine, frozen=True, extra="forbid"):
    """An engine whose servers the run starts (`tuneloop.inference.server`), one or several.

    A class of an engine extends it with a `kind`, and with settings of its own. What it says of
    these by `shares_gpu`, `asleep_requests` and `local_settings` is all that graphs ask.
    """

    # A setting that concerns the server's pod or command, and not the engine, is a field of
    # `ServerPlan` (`workflow/plan.py`), filled by `argo/run_plan.py: plan_server`, rendered by
    # `argo/template.py: server_template`, and for Kubeflow Pipelines described by
    # `kfp/task_plan.py: _describe_server` for `kfp/rollout_server.py`.
    port: int = Field(8765, ge=1, le=65535, description="where the server listens")
    replicas: int = Field(
        1,
        ge=1,
        description="servers of the run, each with cluster.sampler's GPUs; they share the prompts",
    )
    weights: OwnWeights = Field(LoadCheckpoints(), description="how weights reach the servers")

    @property
    def server(self) -> "ServingEngine":
        return self

    @property
    def publication(self) -> PullVersions | None:
        return self.weights if isinstance(self.weights, PullVersions) else None

    @property
    def shares_gpu(self) -> bool:
        """Whether trainer and server take turns on one GPU."""
        return False

    @property
    def asleep_requests(self) -> dict[str, str]:
        """What a server's pod requests while it sleeps; empty: the same as awake."""
        return {}

    @property
    def local_settings(self) -> JsonMapping:
        """Name → value of settings that Argo and one machine carry out, and Kubeflow Pipelines do
        not. `kfp/task_plan.py` refuses a value that is not false, 0 or empty; a setting that is
        missing here is ignored there."""
        return {}

    def check_gpus(self, gpus: int) -> None:
        """Check the number of GPUs of a server's pod.

        It is not called for 0 GPUs, which is a server on a CPU.

        Raises:
            UserError: the options of the engine say another number; by default none do.
        """

    @classmethod
    def choose_args(cls, context: int, *, captures_graphs: bool) -> JsonObject:
        """Choose the engine's options where the user sets none; by default there are none.

        An engine whose option `max_model_len` limits the context, as vLLM's and transformers' does,
        gets it also beside options of the user's.

        Args:
            context: the most tokens of a prompt with its completion.
            captures_graphs: whether capturing CUDA graphs is worth the time.
        """
        return {}


class VllmEngine(ServingEngine, frozen=True, extra="forbid"):
    """vLLM, as one server for the run or several."""

    # A further field: add it to `options` if the engine has to know it, to `local_settings` if
    # Kubeflow Pipelines cannot do it, and to `_check_single_server` if several servers cannot.
    kind: Literal["vllm"] = Field("vllm", description="vLLM servers of the run")
    args: JsonObject | None = Field(
        None,
        description="vLLM's own options; null: max_model_len 256 and enforce_eager; what is set "
        "replaces both, and for a pretrained model max_model_len is added where it is left out",
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

    @property
    def options(self) -> JsonObject:
        # Arguments that are set replace the default ones. `deterministic`, `snapshot` and sleep are
        # read by `inference/engines/vllm.py`; `argo/memory_estimate.py` asks for `snapshot` and
        # `enable_sleep_mode`, too.
        options = dict(SHORT_CONTEXT if self.args is None else self.args)
        for name in ("deterministic", "snapshot"):
            if getattr(self, name):
                options[name] = True
        # Between batches the server gives its memory back by vLLM's own sleep.
        if self.colocate:
            options["enable_sleep_mode"] = True
        return options

    @property
    def shares_gpu(self) -> bool:
        return self.colocate

    @property
    def asleep_requests(self) -> dict[str, str]:
        return self.asleep.requests if self.asleep else {}

    @property
    def local_settings(self) -> JsonMapping:
        return {"colocate": self.colocate, "asleep": self.asleep, "snapshot": self.snapshot}

    def check_gpus(self, gpus: int) -> None:
        tensor = self.options.get("tensor_parallel_size", 1)
        pipeline = self.options.get("pipeline_parallel_size", 1)
        is_known = isinstance(tensor, int) and isinstance(pipeline, int)
        if not (is_known and gpus == tensor * pipeline):
            remedy = (
                "has to be engine.args.tensor_parallel_size × pipeline_parallel_size "
                f"({tensor} × {pipeline})"
            )
            raise UserError("cluster.sampler.gpus", gpus, remedy)

    @classmethod
    def choose_args(cls, context: int, *, captures_graphs: bool) -> JsonObject:
        args: JsonObject = {"max_model_len": context}
        if not captures_graphs:
            args["enforce_eager"] = True
        return args

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
        """Refuse settings that let a server sleep, where it could not go on: it is to pull versions
        meanwhile, or would lose the cache that is to be kept."""
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


def choose_section(kind: str) -> type[Engine]:
    """Choose the class of an engine that none of the classes of `EngineConfig` is for: the one that
    its module names as ``SECTION``, else `PluginEngine`.

    Raises:
        ValueError: the module cannot be imported, or what it names is no class of an engine.
    """
    # Pydantic adds the setting and its value to the message of a ValueError.
    try:
        module = plugins.find_module("engines", kind)
    except UserError as error:
        raise ValueError(error.remedy) from error
    if module is None or not hasattr(module, "SECTION"):
        return PluginEngine
    try:
        section = pkgutil.resolve_name(module.SECTION)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"SECTION of {module.__name__}: {error}") from error
    if not (isinstance(section, type) and issubclass(section, Engine)):
        raise ValueError(f"SECTION of {module.__name__} has to name a class of Engine")
    return section


def validate_plugin(value: Any, handler: ModelWrapValidatorHandler["PluginEngine"]) -> Engine:
    """Validate the section of an engine that none of the classes of `EngineConfig` is for, by its
    own class."""
    section = choose_section(read_kind(value))
    if section is PluginEngine:
        return handler(value)
    return section.model_validate(value)


class PluginEngine(Engine, PluginSection, frozen=True, extra="forbid"):
    """An engine of a third party, in the process of each stage that samples."""

    kind: Annotated[str, plugins.validate_variant("engines")] = Field(
        description="pkg.mod:attr, or the name of an entry point"
    )
    weights: OwnWeights = Field(
        LoadCheckpoints(),
        description="how weights reach the engine: it loads them, or has servers that pull them",
    )

    @classmethod
    def choose_class(cls, kind: str) -> type[BaseModel]:
        try:
            return choose_section(kind)
        except ValueError:
            # It is refused when the section is validated.
            return cls

    @property
    def publication(self) -> PullVersions | None:
        return self.weights if isinstance(self.weights, PullVersions) else None


# A class is named twice here: in the union, and by its kind in the list of `make_kind_reader`.
# Without the second its kind is taken for a third party's.
EngineConfig = Annotated[
    Annotated[VllmEngine, Tag("vllm")]
    | Annotated[TransformersEngine, Tag("transformers")]
    | Annotated[EndpointEngine, Tag("endpoint")]
    | Annotated[SerializeAsAny[PluginEngine], WrapValidator(validate_plugin), Tag(PLUGIN)],
    Discriminator(make_kind_reader("vllm", ("vllm", "transformers", "endpoint", PLUGIN))),
    BeforeValidator(expand_text),
]
