"""Microsoft Entra Workload ID: Entra takes the token of the pod's account.

The webhook mounts the token in pods with the label, and sets AZURE_FEDERATED_TOKEN_FILE and
AZURE_AUTHORITY_HOST; a client or a tenant that a pod sets itself wins over the account's.
https://azure.github.io/azure-workload-identity/docs/
"""

from typing import ClassVar, Literal

from pydantic import Field

from tuneloop.workflow.credentials.base import PodIdentitySettings
from tuneloop.workflow.pod_settings import PodSettings

UUID = r"^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"


class AzureWorkloadIdentity(PodIdentitySettings):
    """An application or managed identity of Microsoft Entra."""

    annotation: ClassVar[str] = "azure.workload.identity/client-id"
    setup: ClassVar[str] = (
        "az identity federated-credential create --name tuneloop-ACCOUNT --identity-name IDENTITY "
        "--resource-group GROUP --issuer ISSUER --subject system:serviceaccount:NAMESPACE:ACCOUNT"
    )

    kind: Literal["azure"] = Field("azure", description="an identity of Entra's, on AKS")
    client_id: str = Field(pattern=UUID, description="client id of the identity")
    tenant_id: str = Field(pattern=UUID, description="its tenant")
    storage_account: str = Field(
        "",
        description="AZURE_STORAGE_ACCOUNT_NAME of the pods; empty: what the ConfigMap "
        "tuneloop-store sets",
    )

    @property
    def environment(self) -> dict[str, str]:
        variables = super().environment
        variables["AZURE_CLIENT_ID"] = self.client_id
        variables["AZURE_TENANT_ID"] = self.tenant_id
        if self.storage_account:
            variables["AZURE_STORAGE_ACCOUNT_NAME"] = self.storage_account
        return variables

    @property
    def pod(self) -> PodSettings:
        # Without the label the webhook leaves a pod as it is.
        return PodSettings(
            service_account=self.service_account,
            labels={"azure.workload.identity/use": "true"},
        )
