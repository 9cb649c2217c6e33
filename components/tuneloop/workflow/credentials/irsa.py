"""IAM roles for service accounts (IRSA): AWS STS takes the token of the pod's account.

EKS' webhook sets AWS_ROLE_ARN and AWS_WEB_IDENTITY_TOKEN_FILE in pods whose account has the
annotation, and mounts the token. It leaves out a pod that sets one of these itself, so none is
rendered. https://docs.aws.amazon.com/eks/latest/userguide/iam-roles-for-service-accounts.html
"""

from typing import ClassVar, Literal

from pydantic import Field

from tuneloop.workflow.credentials.base import AwsIdentitySettings


class IamRole(AwsIdentitySettings):
    """A role that STS gives to the pod's account."""

    annotation: ClassVar[str] = "eks.amazonaws.com/role-arn"
    setup: ClassVar[str] = (
        "eksctl create iamserviceaccount --cluster CLUSTER --namespace NAMESPACE --name ACCOUNT "
        "--attach-policy-arn POLICY --override-existing-serviceaccounts --approve"
    )

    kind: Literal["irsa"] = Field("irsa", description="a role by AWS STS, on EKS")
    role: str = Field(
        pattern=r"^arn:aws[a-z-]*:iam::\d{12}:role/.+$",
        description="ARN of the role, as the service account's annotation has it",
    )
    sts_endpoint: str = Field(
        "",
        pattern=r"^(https://.+)?$",
        description="URL of STS, where it is not https://sts.REGION.amazonaws.com: in China, or a "
        "VPC's own",
    )

    @property
    def identity(self) -> str:
        return self.role

    @property
    def environment(self) -> dict[str, str]:
        variables = super().environment
        if self.sts_endpoint:
            variables["AWS_ENDPOINT_URL_STS"] = self.sts_endpoint
        return variables
