"""Where the credentials of an object store come from, and what its errors say of them.

obstore itself asks each of these services, and asks again before the keys that it got expire.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tuneloop.core.errors import UserError

VARIABLE = "TUNELOOP_CREDENTIALS"
"""Variable of a pod: the kind of its identity, one of `IDENTITIES` (`cluster.credentials.kind`)."""
AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
GOOGLE_KEYS = (
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_BEARER_TOKEN",
)
GOOGLE_FILE = ".config/gcloud/application_default_credentials.json"
"""The file of `gcloud auth application-default login`, below the home directory."""
AZURE_KEYS = (
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "AZURE_CLIENT_SECRET",
)
AZURE_ACCOUNT = "AZURE_STORAGE_ACCOUNT_NAME"
AUTHORITY = "AZURE_AUTHORITY_HOST"
AGENT_TOKEN = "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"
"""Variable with the path of the token for EKS' agent."""
TEMPORARY = ("ExpiredToken", "TokenRefreshRequired", "InvalidToken")
"""S3's errors of a session token."""
PASSING = ("IDPCommunicationError", "RequestLimitExceeded", "Throttling")
"""STS' errors with a status of a refusal that another request may not meet."""
STATUS = re.compile(r"status code: (?P<answer>(?P<code>\d{3})\b.*)", re.DOTALL)


@dataclass(frozen=True)
class PodIdentity:
    """A mechanism by which a cloud gives credentials to the pods of a service account.

    Attributes:
        scheme: of the stores that they open.
        source: what gives them.
        variables: what the cloud sets in such pods; obstore reads it.
        keys: variables that obstore would take instead.
        setup: what gives pods these variables.
        grant: what to look at where the source refuses.
    """

    scheme: str
    source: str
    variables: tuple[str, ...]
    keys: tuple[str, ...]
    setup: str
    grant: str


IDENTITIES = {
    "irsa": PodIdentity(
        scheme="s3",
        source="AWS STS",
        variables=("AWS_ROLE_ARN", "AWS_WEB_IDENTITY_TOKEN_FILE"),
        keys=AWS_KEYS,
        setup="annotate the pod's service account with eks.amazonaws.com/role-arn",
        grant="let the role's trust policy name the cluster's OIDC provider, the audience "
        "sts.amazonaws.com and system:serviceaccount:NAMESPACE:ACCOUNT",
    ),
    "eks_pod_identity": PodIdentity(
        scheme="s3",
        source="EKS Pod Identity",
        variables=("AWS_CONTAINER_CREDENTIALS_FULL_URI", AGENT_TOKEN),
        keys=AWS_KEYS,
        setup="associate the pod's service account with a role: aws eks "
        "create-pod-identity-association",
        grant="let the role's trust policy name pods.eks.amazonaws.com, and see aws eks "
        "list-pod-identity-associations",
    ),
    "gke": PodIdentity(
        scheme="gs",
        source="GKE's metadata server",
        variables=(),
        keys=GOOGLE_KEYS,
        setup="",
        grant="let the Kubernetes account act as the Google account by the role "
        "roles/iam.workloadIdentityUser",
    ),
    "azure": PodIdentity(
        scheme="az",
        source="Microsoft Entra",
        variables=("AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_FEDERATED_TOKEN_FILE"),
        keys=AZURE_KEYS,
        setup="label the pod with azure.workload.identity/use: true, and install the webhook of "
        "Entra Workload ID",
        grant="give the identity a federated credential with the subject "
        "system:serviceaccount:NAMESPACE:ACCOUNT",
    ),
}
"""Kind → the mechanism."""


@dataclass(frozen=True)
class CredentialFault:
    """What an error of a store says of its credentials.

    Attributes:
        reason: what is wrong, and the remedy.
        is_final: whether asking again cannot help.
    """

    reason: str
    is_final: bool


def has_credentials(scheme: str) -> bool:
    """Return whether the environment has credentials for stores of a scheme.

    A machine in a cloud may get some from its metadata service; they are not counted.
    """
    for identity in IDENTITIES.values():
        variables = identity.variables
        if identity.scheme == scheme and variables and all(map(os.environ.get, variables)):
            return True
    # Keys that somebody has set, in the environment or in the file of a cloud's own program.
    if scheme == "s3":
        return "AWS_ACCESS_KEY_ID" in os.environ
    if scheme == "gs":
        return any(map(os.environ.get, GOOGLE_KEYS)) or (Path.home() / GOOGLE_FILE).is_file()
    if scheme == "az":
        return AZURE_ACCOUNT in os.environ and any(map(os.environ.get, AZURE_KEYS))
    return True


def check_pod_identity(scheme: str) -> None:
    """Check that a pod has what its kind of credentials needs to open stores of a scheme.

    Raises:
        UserError: the cloud has set nothing in the pod, or it has keys besides, or its token is
            none.
    """
    path = os.environ.get(AGENT_TOKEN, "")
    if scheme == "s3" and os.path.isfile(path):
        token = Path(path).read_bytes().decode("ascii", "replace")
        # obstore sends the file as a header, and panics if it is none.
        if not token.isascii() or not token.isprintable():
            remedy = (
                "is no token: it has a line break or a character that no header has; write it anew"
            )
            raise UserError(AGENT_TOKEN, path, remedy)
    kind = os.environ.get(VARIABLE, "")
    identity = IDENTITIES.get(kind)
    if identity is None or identity.scheme != scheme:
        return
    for name in identity.keys:
        if os.environ.get(name):
            remedy = (
                f"{name} is set in the pod, and would be used instead: remove it from the "
                "ConfigMap tuneloop-store or from what sets it, or set cluster.credentials=secret"
            )
            raise UserError("cluster.credentials", kind, remedy)
    for name in identity.variables:
        if not os.environ.get(name):
            remedy = f"{name} is not set in the pod: {identity.setup}, and submit again"
            raise UserError("cluster.credentials", kind, remedy)


def find_authority() -> str:
    """Return the URL of Microsoft Entra without a slash at its end; empty: obstore's own.

    The webhook's has one, and obstore appends another.
    """
    return os.environ.get(AUTHORITY, "").rstrip("/")


def find_credential_fault(error: BaseException, answer: str) -> CredentialFault | None:
    """Find what an error says of a store's credentials; None: it is about something else.

    Args:
        error: of obstore.
        answer: its text, shortened.
    """
    text = str(error)
    if os.environ.get("AWS_SESSION_TOKEN") and answer in TEMPORARY:
        reason = (
            f"the session token AWS_SESSION_TOKEN has expired, or is none of AWS_ACCESS_KEY_ID "
            f"({answer}); put new keys into the environment, or into the Secret of the pods, and "
            "start again"
        )
        return CredentialFault(reason, is_final=True)
    identity = _find_source(text)
    if identity is None:
        return None
    # Nothing was asked: the cloud has not given the pod a token.
    if "token file" in text:
        reason = f"the pod has no token for {identity.source} ({answer}); {identity.setup}"
        return CredentialFault(reason, is_final=True)
    # Elsewhere nothing is set of Google's, and nobody has chosen its metadata server: another cloud's
    # answers at the same address.
    if not identity.variables and os.environ.get(VARIABLE) != "gke":
        return None
    # A service that does not answer has no status, and may be there later.
    match = STATUS.search(text)
    code = int(match["code"]) if match else 0
    is_refused = 400 <= code < 500 and code not in (408, 429) and answer not in PASSING
    if match and is_refused:
        # An answer that is no XML follows the URL and the time it took, which help nobody.
        words = answer if "<Code>" in text else " ".join(match["answer"].split())[:300]
        words = words.partition(" Debug source:")[0]
        reason = f"{identity.source} refuses the pod's account ({words}); {identity.grant}"
        return CredentialFault(reason, is_final=True)
    reason = f"{identity.source} gives no credentials: do network policies let pods reach it?"
    return CredentialFault(f"{reason} ({answer})", is_final=False)


def _find_source(text: str) -> PodIdentity | None:
    """Find which service that gives credentials an error of obstore is about."""
    address = os.environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI", "")
    # The query of a request to STS has the token: obstore hides it with the address.
    if "POST REDACTED" in text or "read token file" in text:
        return IDENTITIES["irsa"]
    if (address and address in text) or "read EKS token file" in text:
        return IDENTITIES["eks_pod_identity"]
    if "computeMetadata/v1/instance/service-accounts" in text:
        return IDENTITIES["gke"]
    if "AZURE_FEDERATED_TOKEN_FILE" not in os.environ:
        return None
    is_azure = "oauth2/v2.0/token" in text or "federated token file" in text
    return IDENTITIES["azure"] if is_azure else None
