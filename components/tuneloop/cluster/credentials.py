"""Check how the pods of a namespace get credentials for the store, and whether that is set up.

The kinds are those of `tuneloop.workflow.credentials`. No value of a Secret is shown.
"""

import ipaddress
import json
from collections.abc import Iterator, Sequence
from typing import Any

from tuneloop.argo.pod_fields import ACCOUNT, PLAIN, SECRET
from tuneloop.cluster.checks import NOT_CHECKED, OK, REFUSED, WARNING, Check
from tuneloop.cluster.problems import ABSENT, UNSEEN, apply_manifests, find_object
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.store_credentials import AWS_KEYS
from tuneloop.kube.connection import NAMESPACE, Connection
from tuneloop.workflow.credentials import PodIdentitySettings, SecretKeys, StoreCredentials
from tuneloop.workflow.credentials.azure import AzureWorkloadIdentity
from tuneloop.workflow.credentials.gke import GkeWorkloadIdentity
from tuneloop.workflow.credentials.irsa import IamRole

SUBJECT = "store"
SESSION_TOKEN = AWS_KEYS[-1]
ANNOTATED: tuple[type[PodIdentitySettings], ...] = (
    IamRole,
    GkeWorkloadIdentity,
    AzureWorkloadIdentity,
)
"""The kinds that a service account tells by its annotation."""
ADDRESSES = {
    "eks_pod_identity": "169.254.170.23",
    "gke": "169.254.169.254",
}
"""Kind → the address on the node that gives credentials; it answers at port 80."""
PORT = 80
POLICIES = ("networking.k8s.io", "v1", "networkpolicies")
DAEMON_SETS = ("apps", "v1", "daemonsets")
AGENT = "eks-pod-identity-agent"
STEP_ACCOUNTS = ("tuneloop-continue", "tuneloop-claims", "tuneloop-graphs")
"""Accounts of a workflow's steps that ask the API server, and open no store."""


def check_credentials(
    cluster: Connection,
    credentials: StoreCredentials,
    accounts: Sequence[str] = (ACCOUNT,),
    *,
    overlay: str = "local",
    missing: str = REFUSED,
) -> Iterator[Check]:
    """Check that a namespace is set up for a kind of credentials.

    Args:
        cluster: with the namespace of the runs.
        credentials: those of the settings; `SecretKeys` where there are none.
        accounts: the service accounts of pods that open the store.
        overlay: of ``manifests/overlays``, which has the ConfigMap and the Secret.
        missing: the outcome where one of these is not there.
    """
    if isinstance(credentials, PodIdentitySettings):
        yield from _check_identity(cluster, credentials, accounts)
        yield from _check_route(cluster, credentials.kind)
        return
    annotated: list[Check] = []
    for account in accounts:
        annotated += _find_identities(cluster, account)
    assert isinstance(credentials, SecretKeys)
    name = credentials.name
    # The pods get an identity also where the settings do not say it.
    missing = WARNING if annotated else missing
    yield from _check_keys(cluster, name, apply_manifests(cluster.namespace, overlay), missing)
    yield from annotated


def list_accounts(workflow: JsonMapping) -> list[str]:
    """List the service accounts of a workflow's pods that open the store."""
    spec = workflow["spec"]
    common = spec.get("serviceAccountName", ACCOUNT)
    accounts = {common}
    for template in spec.get("templates", ()):
        # A template without a container starts jobs, whose pods have the common account.
        if "container" in template:
            accounts.add(template.get("serviceAccountName", common))
    return sorted(accounts - set(STEP_ACCOUNTS))


def _read_annotations(cluster: Connection, account: str) -> JsonMapping:
    """Read a service account's annotations; empty where there is none, or none to be seen."""
    read = cluster.core.read_namespaced_service_account
    service_account = find_object(read, account, cluster.namespace)
    if service_account is ABSENT or service_account is UNSEEN:
        return {}
    return service_account.metadata.annotations or {}


def _find_identities(cluster: Connection, account: str, kind: str = "") -> Iterator[Check]:
    """Yield a warning for each identity of a service account that is of another kind than the
    settings' (`kind`; empty: keys in a Secret).
    """
    annotations = _read_annotations(cluster, account)
    for section in ANNOTATED:
        identity = annotations.get(section.annotation)
        other: str = section.model_fields["kind"].default
        if not identity or other == kind:
            continue
        setting = f"cluster.credentials.kind={other}"
        remedy = f"tuneloop … --set {setting}"
        # Of the other kinds the annotation does not have all that the settings need.
        if issubclass(section, IamRole):
            remedy += f" --set cluster.credentials.role={identity}"
        finding = (
            f"ServiceAccount {account} is set up for {setting} ({identity}), "
            "which the settings do not say"
        )
        yield Check(SUBJECT, WARNING, finding, remedy)


def _check_identity(
    cluster: Connection, credentials: PodIdentitySettings, accounts: Sequence[str]
) -> Iterator[Check]:
    """Check the service accounts of an identity."""
    kind = credentials.kind
    for account in accounts:
        if credentials.identity:
            yield _check_annotation(cluster, credentials, account)
        yield from _find_identities(cluster, account, kind)
        # Trust policies, associations and bindings are objects of the cloud.
        grant = credentials.setup.replace("NAMESPACE", cluster.namespace)
        grant = grant.replace("ACCOUNT", account)
        if credentials.identity:
            grant = grant.replace("IDENTITY", credentials.identity)
        finding = f"{kind}: not checked: what the cloud gives to ServiceAccount {account}"
        yield Check(SUBJECT, NOT_CHECKED, finding, grant)
    if kind == "eks_pod_identity":
        yield from _check_agent(cluster)


def _check_annotation(cluster: Connection, credentials: PodIdentitySettings, account: str) -> Check:
    """Check that a service account has the identity of the settings."""
    kind = credentials.kind
    annotation = credentials.annotation
    identity = credentials.identity
    value = _read_annotations(cluster, account).get(annotation)
    if value == identity:
        finding = f"{kind}: ServiceAccount {account} has {annotation}={value}"
        return Check(SUBJECT, OK, finding)
    finding = f"{kind}: ServiceAccount {account} has no annotation {annotation}"
    if value:
        finding = (
            f"{kind}: ServiceAccount {account} has {annotation}={value}, "
            f"and cluster.credentials says {identity}"
        )
    kubectl = f"kubectl -n {cluster.namespace} annotate --overwrite"
    remedy = f"{kubectl} serviceaccount {account} {annotation}={identity}"
    return Check(SUBJECT, REFUSED, finding, remedy)


def _check_agent(cluster: Connection) -> Iterator[Check]:
    """Check that EKS' agent is on the nodes."""
    group, version, plural = DAEMON_SETS
    get = cluster.custom.get_namespaced_custom_object
    agent = find_object(get, group, version, "kube-system", plural, AGENT)
    if agent is ABSENT:
        finding = f"eks_pod_identity: no DaemonSet {AGENT} in namespace kube-system"
        remedy = f"aws eks create-addon --cluster-name CLUSTER --addon-name {AGENT}"
        yield Check(SUBJECT, REFUSED, finding, remedy)


def _check_route(cluster: Connection, kind: str) -> Iterator[Check]:
    """Check that network policies let pods reach the address on the node that gives credentials."""
    address = ADDRESSES.get(kind)
    if address is None:
        return
    group, version, plural = POLICIES
    list_objects = cluster.custom.list_namespaced_custom_object
    policies = find_object(list_objects, group, version, cluster.namespace, plural)
    if policies is ABSENT or policies is UNSEEN:
        return
    specs = [policy["spec"] for policy in policies["items"]]
    # Without a policy of egress everything can be reached.
    specs = [spec for spec in specs if "Egress" in spec.get("policyTypes", ())]
    rules = [rule for spec in specs for rule in spec.get("egress") or ()]
    if not specs or any(_allows(rule, address) for rule in rules):
        return
    file = f"manifests/components/credentials-{kind.replace('_', '-')}/network.yaml"
    remedy = f"kubectl apply -f {file}"
    if cluster.namespace != NAMESPACE:
        rename = f"sed 's/namespace: {NAMESPACE}/namespace: {cluster.namespace}/' {file}"
        remedy = f"{rename} | kubectl apply -f -"
    finding = f"{kind}: the network policies let no pod reach {address}, which gives credentials"
    yield Check(SUBJECT, REFUSED, finding, remedy)


def _allows(rule: JsonMapping, address: str) -> bool:
    """Return whether a rule of egress lets something reach an address at `PORT`."""
    ports = [port.get("port") for port in rule.get("ports") or ()]
    if ports and PORT not in ports:
        return False
    blocks = [target.get("ipBlock") for target in rule.get("to") or ()]
    return not blocks or any(block and _contains(block, address) for block in blocks)


def _contains(block: JsonMapping, address: str) -> bool:
    """Return whether a block of addresses has one."""
    target = ipaddress.ip_address(address)
    excluded = block.get("except") or ()
    is_excluded = any(target in ipaddress.ip_network(cidr) for cidr in excluded)
    return target in ipaddress.ip_network(block["cidr"]) and not is_excluded


def _check_keys(cluster: Connection, name: str, apply: str, missing: str) -> Iterator[Check]:
    """Check the ConfigMap and the Secret with the settings of the store.

    Args:
        cluster: with the namespace of the runs.
        name: of both.
        apply: the command that creates both.
        missing: the outcome where one of them is not there.
    """
    kubectl = f"kubectl -n {cluster.namespace}"
    literals = " ".join(f"--from-literal={key}=…" for key in SECRET)
    edit_config_map = f"{kubectl} edit configmap {name}"
    write_secret = (
        f"{kubectl} create secret generic {name} {literals} --dry-run=client -o yaml"
        " | kubectl apply -f -"
    )
    core = cluster.core
    config_map: Any = find_object(core.read_namespaced_config_map, name, cluster.namespace)
    secret: Any = find_object(core.read_namespaced_secret, name, cluster.namespace)
    objects = (
        # A ConfigMap without a key may be meant so: the store may not need all of them.
        ("ConfigMap", config_map, PLAIN, WARNING, edit_config_map),
        ("Secret", secret, SECRET, missing, write_secret),
    )
    for kind, item, keys, outcome, command in objects:
        if item is ABSENT:
            finding = f"{kind} {name} is missing in namespace {cluster.namespace}"
            yield Check(SUBJECT, missing, finding, apply)
        elif item is not UNSEEN:
            yield _check_data(f"{kind} {name}", item.data or {}, keys, outcome, command)
    if ABSENT in (config_map, secret) or UNSEEN in (config_map, secret):
        return
    for key in sorted(set(config_map.data or ()) & set(secret.data or ())):
        # Which of the two a pod gets depends on their order in its manifest.
        patch = json.dumps([{"op": "remove", "path": f"/data/{key}"}])
        yield Check(
            SUBJECT,
            WARNING,
            f"{key} is in both, ConfigMap and Secret {name}: keep it in one",
            f"{kubectl} patch configmap {name} --type=json -p '{patch}'",
        )


def _check_data(
    title: str, data: JsonMapping, keys: Sequence[str], outcome: str, command: str
) -> Check:
    """Check the keys of a ConfigMap or a Secret.

    Args:
        title: kind and name of the object.
        data: of the object.
        keys: that it should have.
        outcome: where it lacks one.
        command: that mends it.
    """
    lacking = [key for key in keys if key not in data]
    if lacking:
        return Check(SUBJECT, outcome, f"{title} lacks {', '.join(lacking)}", command)
    finding = f"{title}: {', '.join(keys)}"
    if SESSION_TOKEN in data:
        finding += f", {SESSION_TOKEN} (these keys expire, and the run with them)"
    return Check(SUBJECT, OK, finding)
