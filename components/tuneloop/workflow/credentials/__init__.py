"""How pods get credentials for the store: the section ``cluster.credentials``, one class a kind.

`secret` gives them keys. The others are identities: the cloud gives credentials to pods of a
service account, and tuneloop renders what the cloud's mechanism looks for in a pod.

A further kind is a file here, a part of the union `Credentials`, and an entry of `IDENTITIES` in
`core/store_credentials.py`, which has what happens in the pod. docs/cluster.md lists the kinds.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Tag

from tuneloop.workflow.credentials.azure import AzureWorkloadIdentity
from tuneloop.workflow.credentials.base import PodIdentitySettings as PodIdentitySettings
from tuneloop.workflow.credentials.base import StoreCredentials as StoreCredentials
from tuneloop.workflow.credentials.eks_pod_identity import EksPodIdentity
from tuneloop.workflow.credentials.gke import GkeWorkloadIdentity
from tuneloop.workflow.credentials.irsa import IamRole
from tuneloop.workflow.credentials.secret import SecretKeys as SecretKeys


def complete_kind(value: Any) -> Any:
    """Return a section with its kind: a text is the kind, and a section without one is `secret`."""
    # `--set cluster.credentials=irsa` is short for `cluster.credentials.kind=irsa`, as of engines.
    if isinstance(value, str):
        return {"kind": value}
    if isinstance(value, Mapping):
        return {"kind": "secret"} | dict(value)
    return value


Credentials = Annotated[
    Annotated[SecretKeys, Tag("secret")]
    | Annotated[IamRole, Tag("irsa")]
    | Annotated[EksPodIdentity, Tag("eks_pod_identity")]
    | Annotated[GkeWorkloadIdentity, Tag("gke")]
    | Annotated[AzureWorkloadIdentity, Tag("azure")]
    | None,
    Discriminator("kind"),
    BeforeValidator(complete_kind),
]
"""The section of any kind; None is that of `secret` with its defaults."""
