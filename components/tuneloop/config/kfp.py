"""What a pipeline says of Kubeflow Pipelines alone; nothing of it matters to Argo or on one machine."""

from pydantic import BaseModel, Field


class Kfp(BaseModel, frozen=True, extra="forbid"):
    """Settings of Kubeflow Pipelines, in the words of Kubernetes."""

    unroll: int = Field(0, ge=0, description="up to so many iterations are written out, a task a stage; else one task")
    api: str = Field(
        "http://ml-pipeline.kubeflow:8888", description="address of the KFP API, as pods reach it: a long loop goes on"
    )
    model_registry: str = Field(
        "", description="address of a Kubeflow Model Registry, or mlflow+ADDRESS: exported models are registered there"
    )
    retries: int = Field(
        3, ge=0, description="attempts of a pod after the first, by the retry policy of Argo's workflow defaults"
    )
    timeout_s: int = Field(0, ge=0, description="seconds that a stage may take once its pod runs; 0: no limit")
    volumes: dict[str, str] = Field({}, description="PersistentVolumeClaim → path, mounted in every stage")
    image_pull_secrets: list[str] = Field([], description="Secrets of the images' registry")
    jobs: str = Field("tuneloop", description="namespace of the JobSets of stages that span nodes")
