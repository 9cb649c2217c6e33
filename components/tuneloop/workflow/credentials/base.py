"""What all kinds of credentials have."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, Field

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.core.store_credentials import IDENTITIES, VARIABLE
from tuneloop.workflow.pod_settings import STORE, PodSettings


class StoreCredentials(BaseModel, frozen=True, extra="forbid"):
    """How pods get credentials for the store."""

    kind: str

    @property
    def config_map(self) -> str:
        """The ConfigMap that pods read as environment: the store's address and region."""
        return STORE

    @property
    def secret(self) -> str:
        """The Secret that pods read as environment; empty: none."""
        return ""

    @property
    def environment(self) -> dict[str, str]:
        """The variables that pods get."""
        return {}

    @property
    def pod(self) -> PodSettings:
        """What pods get besides; `cluster.pod` wins over it."""
        return PodSettings()

    @property
    def environment_sources(self) -> list[JsonObject]:
        """The list ``envFrom`` of a container: of pods (`argo/pod_fields.py: pod_fields`), and of the
        patch of `cluster.pod.env_from`, which replaces the list.

        A task of Kubeflow Pipelines has no such list: `kfp/task_pod.py: _give_secrets` names the
        keys of the two objects one by one.
        """
        sources: list[JsonObject] = [{"configMapRef": {"name": self.config_map, "optional": True}}]
        if self.secret:
            sources.append({"secretRef": {"name": self.secret, "optional": True}})
        return sources

    def check_store(self, url: str) -> None:
        """Raise UserError if these are no credentials for the store at `url`."""


class PodIdentitySettings(StoreCredentials):
    """Credentials that a cloud gives to pods of a service account."""

    annotation: ClassVar[str] = ""
    """The service account's annotation by which the mechanism finds the identity; empty: none."""
    setup: ClassVar[str] = ""
    """The cloud's command by which an admin gives the account access; NAMESPACE and ACCOUNT are
    replaced."""

    service_account: str = Field(
        "",
        description="ServiceAccount of stages and servers that has the identity; empty: that of "
        "cluster.pod, or tuneloop-stage",
    )

    @property
    def identity(self) -> str:
        """The value that the service account's annotation has to have; empty: none is needed."""
        return ""

    @property
    def environment(self) -> dict[str, str]:
        return {VARIABLE: self.kind}

    @property
    def pod(self) -> PodSettings:
        return PodSettings(service_account=self.service_account)

    @property
    def scheme(self) -> str:
        """The scheme of the stores that the identity opens."""
        return IDENTITIES[self.kind].scheme

    def check_store(self, url: str) -> None:
        scheme = url.partition("://")[0]
        cloud_schemes = {identity.scheme for identity in IDENTITIES.values()}
        # A path on a claim needs no credentials.
        if scheme in cloud_schemes - {self.scheme}:
            remedy = (
                f"is a store of another cloud than cluster.credentials.kind={self.kind}, which "
                f"opens {self.scheme}:// alone: choose another kind, or "
                f"{self.scheme}://BUCKET/PREFIX"
            )
            raise UserError("store", url, remedy)

    def check_account(self, pod: PodSettings) -> None:
        """Raise UserError if `cluster.pod` names another service account."""
        if self.service_account and pod.service_account not in ("", self.service_account):
            remedy = (
                f"is another account than cluster.credentials.service_account "
                f"({self.service_account}): leave one of them out"
            )
            raise UserError("pod.service_account", pod.service_account, remedy)

    def check_pod(self, pod: PodSettings, section: str) -> None:
        """Raise UserError if the settings of pods in a section have keys of the same cloud."""
        variables = set(pod.env)
        # A patch of a container may set them as well as the shortcut.
        for container in pod.spec.get("containers") or ():
            variables |= {variable["name"] for variable in container.get("env") or ()}
        keys = sorted(variables & set(IDENTITIES[self.kind].keys))
        if keys:
            remedy = (
                "is a key, and would open the store in place of "
                f"cluster.credentials.kind={self.kind}: leave it out, or set "
                "cluster.credentials=secret"
            )
            # A key's value is for nobody's log.
            raise UserError(f"{section}.env", keys[0], remedy)


class AwsIdentitySettings(PodIdentitySettings):
    """An identity of AWS."""

    region: str = Field(
        "",
        description="AWS_REGION of the pods; empty: what EKS or the ConfigMap tuneloop-store sets",
    )

    @property
    def environment(self) -> dict[str, str]:
        variables = super().environment
        if self.region:
            variables["AWS_REGION"] = self.region
        return variables
