"""EKS Pod Identity: an agent on the node gives out the keys of the role that EKS associates with
the pod's account.

EKS sets AWS_CONTAINER_CREDENTIALS_FULL_URI and AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE in pods of an
account with an association, of which the cluster itself knows nothing.
https://docs.aws.amazon.com/eks/latest/userguide/pod-identities.html
"""

from typing import ClassVar, Literal

from pydantic import Field

from tuneloop.workflow.credentials.base import AwsIdentitySettings


class EksPodIdentity(AwsIdentitySettings):
    """A role that EKS associates with the pod's account."""

    setup: ClassVar[str] = (
        "aws eks create-pod-identity-association --cluster-name CLUSTER --namespace NAMESPACE "
        "--service-account ACCOUNT --role-arn ROLE"
    )

    kind: Literal["eks_pod_identity"] = Field(
        "eks_pod_identity", description="a role by EKS' agent on the node"
    )
