"""What every pipeline's configuration has.

A pipeline's `Config` extends `PipelineConfig` by `with_sections`; graphs and planning read its
fields by name. Each new setting is a line of `tuneloop schema`, whose number
`tests/unit/config/test_commented_yaml.py` limits for each shipped pipeline.
"""

from typing import Annotated, Any

from pydantic import BaseModel, Field, create_model, model_validator

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.workflow.settings import Cluster

RUN_SETTINGS = ("seed",)
"""Fields of `PipelineConfig` whose values go to every stage that has a parameter of the same name.

To add one, add the field below and its name here. `argo/run_plan.py` and `kfp/task_plan.py` hand
the values to stages, and `kfp/form.py` lets each run on KFP set them. A graph that is written for
Argo itself (`argo/run_plan.py: plan_stages`) does not get them: its author passes them to each
`StageSpec`.
"""
SET_BY_PIPELINE = {
    # The run's own (with `RUN_SETTINGS`).
    "iteration",
    "model",
    "required",
    "expected_world_size",
    # What samples.
    "engine",
    "endpoint",
    "engine_args",
    "completion_tokens",
    "engine_context",
    # How versions are published.
    "weights",
    "publish_weights",
    "weight_encoding",
}.union(RUN_SETTINGS)
"""Parameters of stages that a pipeline gives: they are in no section of its configuration.

The file of a pipeline passes them to `StageSpec`, except `RUN_SETTINGS`, ``iteration``,
``endpoint``, ``weights`` and ``expected_world_size``, which the graph sets. A parameter that a
pipeline gives and that is missing here is a setting, too, and the pipeline overrides what the user
sets of it without a word.
"""
PAIRS = {"preference", "preference_eval"}
"""Parameters of `data_prep` that only pipelines which train on pairs have as settings: the others
leave them out of their section ``data``. `config/refusals.py: MOVED` names the pipeline that has
them. (`PAIRS` of `data/tables.py` are the columns of such rows.)
"""
Nodes = Annotated[
    int,
    Field(
        ge=1,
        description="pods of a stage that trains: several are a JobSet, for a cluster only",
    ),
]
Tokenize = Annotated[
    bool,
    Field(description="token ids of demonstrations and pairs are made once, by a stage"),
]


class Kfp(BaseModel, frozen=True, extra="forbid"):
    """Settings of Kubeflow Pipelines; they have no effect on Argo or on one machine."""

    # All of them are fixed when a pipeline is compiled: a run that would change one is refused
    # (`kfp/configure.py: describe_shape`). The modules of `kfp/` read each by its name.
    unroll: int = Field(
        0, ge=0, description="unroll up to so many iterations, one task per stage; else one task"
    )
    api: str = Field(
        "http://ml-pipeline.kubeflow:8888",
        description="address of the KFP API for pods: a long loop continues there",
    )
    parameters: list[str] = Field(
        [],
        description="settings that the form of KFP's UI asks for, as rollout.n; default: those "
        "that people set first",
    )
    model_registry: str = Field(
        "", description="address of a Kubeflow Model Registry: exported models go there"
    )
    gate: bool = Field(
        False,
        description="register a model only if its held-out reward is better than before the "
        "training, by more than noise: paired by prompt, with a confidence of 95 %",
    )
    retries: int = Field(
        3,
        ge=0,
        description="attempts of a pod after the first, by the retry policy of Argo's workflow "
        "defaults",
    )
    timeout_s: int = Field(
        0, ge=0, description="seconds that a stage may take once its pod runs; 0: no limit"
    )
    jobs: str = Field("tuneloop", description="namespace of the JobSets of stages that span nodes")


class PipelineConfig(BaseModel, frozen=True, extra="forbid"):
    """Settings of a run as a whole; a pipeline adds a section for each of its stages."""

    # A field here that is neither `base_model` nor one of `RUN_SETTINGS` is fixed when a pipeline
    # is compiled for KFP (`kfp/form.py: is_open`). `config/choices.py: count_ranks` reads
    # `processes` and a loop's `nodes` before they are validated.
    seed: int = Field(0, ge=0, description="every random stream of the run is derived from it")
    base_model: str = Field(
        "tiny-qwen3",
        description="tiny-qwen3, tiny-llama, a Hugging Face directory (s3://…, too), a hub name, "
        "or run://NAME/export",
    )
    processes: int = Field(
        1, ge=1, description="ranks of torchrun in a pod of the stages that train"
    )
    cluster: Cluster = Cluster()
    kfp: Kfp = Kfp()

    @classmethod
    def with_sections(cls, **sections: Any) -> Any:
        """Return a subclass of this configuration with more fields.

        Args:
            sections: name → class of a section, whose settings all have defaults
                (`Component.settings`); or name → type and default of a field.
        """
        fields: dict[str, Any] = {}
        for name, section in sections.items():
            fields[name] = (section, section()) if isinstance(section, type) else section
        return create_model("Config", __base__=cls, **fields)

    @property
    def run_settings(self) -> JsonObject:
        """The `RUN_SETTINGS` and their values."""
        return {name: getattr(self, name) for name in RUN_SETTINGS}

    def published(self, run: str) -> dict[str, str]:
        """Return where the stages of the run at the URL `run` publish checkpoints as weight
        versions, if they do: parameter of the stages → URL.

        Every key has to be in `SET_BY_PIPELINE`. `argo/run_plan.py: plan_server` and
        `runs/forking.py` ask for the key ``weights`` by its name.
        """
        return {}

    def run_parameters(self, run: str) -> JsonObject:
        """Return the parameters that every stage of the run at the URL `run` gets, if it has
        them. Only `argo/run_plan.py` calls it: on KFP the URL is known when a run starts, and
        `kfp/pipeline.py` hands over `published` by itself."""
        return self.run_settings | self.published(run)

    @model_validator(mode="after")
    def _check_gate(self) -> "PipelineConfig":
        """Refuse a gate without a model registry: it decides what is registered there."""
        if self.kfp.gate and not self.kfp.model_registry:
            remedy = "is a condition of kfp.model_registry: set that, too"
            raise UserError("kfp.gate", True, remedy)
        return self

    @model_validator(mode="after")
    def _check_backends(self) -> "PipelineConfig":
        """Refuse what only the native backend does, where a stage has another one.

        These are settings of the whole run. What a stage's own options exclude is refused by
        `training/delegation.py`, and conversations by `planning/limits.py: check_conversations`.
        """
        backends = [
            f"{name}.backend" for name, section in self if getattr(section, "backend", None)
        ]
        if not backends:
            return self
        # Not every pipeline has these two settings.
        for key, usual in (("nodes", 1), ("tokenize", False)):
            value = getattr(self, key, usual)
            if value != usual:
                remedy = f"is for the backend native: leave it out, or {backends[0]}"
                raise UserError(key, value, remedy)
        return self

    @model_validator(mode="after")
    def _check_export(self) -> "PipelineConfig":
        """Refuse the export of adapters that no stage trains. A section counts as training them if
        it has a field ``lora`` that is set, whatever its name is."""
        is_trained = any(getattr(section, "lora", None) for _, section in self)
        if getattr(getattr(self, "export", None), "adapter", False) and not is_trained:
            remedy = "no stage trains LoRA adapters: set trainer.lora, or leave it out"
            raise UserError("export.adapter", True, remedy)
        return self


def check_store(settings: BaseModel, store: str) -> None:
    """Raise UserError if the pods of these settings get credentials for stores of another cloud.

    Args:
        settings: of a pipeline.
        store: URL of the run's store.
    """
    if isinstance(settings, PipelineConfig):
        settings.cluster.store_credentials.check_store(store)
