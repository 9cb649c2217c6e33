"""What every pipeline's configuration has."""

from typing import Annotated, Any

from pydantic import BaseModel, Field, create_model, model_validator

from tuneloop.core.errors import UserError
from tuneloop.workflow.settings import Cluster

SET_BY_PIPELINE = {"seed", "iteration", "engine", "endpoint", "engine_args", "model"}
SET_BY_PIPELINE |= {"completion_tokens", "engine_context", "required", "expected_world_size"}
SET_BY_PIPELINE |= {"weights", "publish_weights", "weight_encoding"}
"""Parameters of stages that a pipeline gives: they are in no section of its configuration."""
PAIRS = {"preference", "preference_eval"}
"""Parameters of `data_prep` for the pipelines alone that train on pairs."""
Nodes = Annotated[
    int,
    Field(
        ge=1, description="pods of a stage that trains: several are a JobSet, for a cluster only"
    ),
]
Tokenize = Annotated[
    bool, Field(description="token ids of demonstrations and pairs are made once, by a stage")
]


class Kfp(BaseModel, frozen=True, extra="forbid"):
    """Settings of Kubeflow Pipelines; they have no effect on Argo or on one machine."""

    unroll: int = Field(
        0, ge=0, description="unroll up to so many iterations, one task per stage; else one task"
    )
    api: str = Field(
        "http://ml-pipeline.kubeflow:8888",
        description="address of the KFP API for pods: a long loop continues there",
    )
    model_registry: str = Field(
        "", description="address of a Kubeflow Model Registry: exported models go there"
    )
    retries: int = Field(
        3,
        ge=0,
        description="attempts of a pod after the first, by the retry policy of Argo's workflow defaults",
    )
    timeout_s: int = Field(
        0, ge=0, description="seconds that a stage may take once its pod runs; 0: no limit"
    )
    volumes: dict[str, str] = Field(
        {}, description="PersistentVolumeClaim → path, mounted in every stage"
    )
    image_pull_secrets: list[str] = Field([], description="Secrets of the images' registry")
    jobs: str = Field("tuneloop", description="namespace of the JobSets of stages that span nodes")


class PipelineConfig(BaseModel, frozen=True, extra="forbid"):
    """Settings of a run as a whole; a pipeline adds a section for each of its stages."""

    seed: int = Field(0, ge=0, description="every random stream of the run is derived from it")
    base_model: str = Field(
        "tiny-qwen3", description="tiny-qwen3, tiny-llama, a Hugging Face directory or hub name"
    )
    processes: int = Field(
        1, ge=1, description="ranks of torchrun in a pod of the stages that train"
    )
    cluster: Cluster = Cluster()
    kfp: Kfp = Kfp()

    @classmethod
    def with_sections(cls, **sections: Any) -> Any:
        """Return a subclass of this configuration that has a section, with defaults, for each stage
        (`Component.settings`). A value that is no class is a field for pydantic: its type and its default."""
        fields: dict[str, Any] = {
            k: (v, v()) if isinstance(v, type) else v for k, v in sections.items()
        }
        return create_model("Config", __base__=cls, **fields)

    def published(self, run: str) -> dict[str, str]:
        """Return where the stages of the run at the URL `run` publish checkpoints as weight versions, if they do."""
        return {}

    @model_validator(mode="after")
    def _check_backends(self) -> "PipelineConfig":
        other = next(
            (f"{name}.backend" for name, section in self if getattr(section, "backend", None)), None
        )
        for key, usual in (("nodes", 1), ("tokenize", False)):
            if other and (value := getattr(self, key, usual)) != usual:
                raise UserError(key, value, f"is for the backend native: leave it out, or {other}")
        lora = any(getattr(section, "lora", None) for _, section in self)
        if getattr(getattr(self, "export", None), "adapter", False) and not lora:
            raise UserError(
                "export.adapter",
                True,
                "no stage trains LoRA adapters: set trainer.lora, or leave it out",
            )
        return self
