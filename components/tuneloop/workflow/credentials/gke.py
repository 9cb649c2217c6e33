"""Workload Identity Federation of Google Kubernetes Engine: the metadata server on the node gives
the pod a token of its account.

Without the annotation the account itself is the principal, and has roles on the bucket.
https://cloud.google.com/kubernetes-engine/docs/how-to/workload-identity
"""

from typing import ClassVar, Literal

from pydantic import Field

from tuneloop.workflow.credentials.base import PodIdentitySettings


class GkeWorkloadIdentity(PodIdentitySettings):
    """An account of Google Cloud, by the metadata server."""

    annotation: ClassVar[str] = "iam.gke.io/gcp-service-account"
    setup: ClassVar[str] = (
        "gcloud iam service-accounts add-iam-policy-binding IDENTITY --role "
        "roles/iam.workloadIdentityUser --member "
        "'serviceAccount:PROJECT.svc.id.goog[NAMESPACE/ACCOUNT]'"
    )

    kind: Literal["gke"] = Field("gke", description="an account of Google's, on GKE")
    google_service_account: str = Field(
        "",
        pattern=r"^([^@]+@[^@]+\.iam\.gserviceaccount\.com)?$",
        description="the account of Google's that the Kubernetes account acts as; empty: its own",
    )

    @property
    def identity(self) -> str:
        return self.google_service_account
