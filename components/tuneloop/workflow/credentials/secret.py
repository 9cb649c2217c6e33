"""Keys in a Secret, also temporary ones with a session token."""

from typing import Literal

from pydantic import Field

from tuneloop.workflow.credentials.base import StoreCredentials
from tuneloop.workflow.pod_settings import STORE


class SecretKeys(StoreCredentials):
    """All keys of a ConfigMap and of a Secret of one name are variables of the pods."""

    kind: Literal["secret"] = Field("secret", description="keys in a Secret, or none")
    name: str = Field(
        STORE,
        min_length=1,
        description="the ConfigMap and the Secret, of which either may be missing: "
        "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, …",
    )

    @property
    def config_map(self) -> str:
        return self.name

    @property
    def secret(self) -> str:
        return self.name
