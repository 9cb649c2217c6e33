"""What a platform team says of pods: the section ``cluster.pod``, and ``pod`` of each role.

Its `metadata` and `spec` are a strategic-merge patch of Kubernetes' PodTemplateSpec. The other
settings are shortcuts for the commonest parts of such a patch.

A further shortcut is a field of `PodSettings`, with a line in its `merge` and `build_spec_patch`; where
it cannot be said, it is refused: `extensions/trainers/trainjob_pods.py` and `kfp/task_pod.py`
(`MISSING`). Without the line in `merge`, a role with a `pod` of its own loses it; without those
refusals, it is ignored there. docs/pods.md lists them. Tests: `tests/unit/argo/test_pods.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.pod_schema import DIRECTIVE, RETAINED, find_patch_errors
from tuneloop.workflow.strategic_merge import merge_patches

# A further level is a branch of `pod_security`, `container_security`, `secret_mode` and
# `_build_container`, and of `kfp/task_pod.py`; `extensions/trainers/trainjob_pods.py` refuses all but the first.
Security = Literal["restricted", "openshift", "none"]
MAIN = "main"
"""What a patch calls the container of a stage or a server."""
ARGO_CONTAINERS = ("wait",)
ARGO_INIT_CONTAINERS = ("init",)
"""Argo's own containers of a pod. Where they are missing, what a patch says of them is left out
(`fit_patch`)."""
GPU = "nvidia.com/gpu"
USER = 1000
"""The user and group that the images are made for."""
RESTRICTED_POD: JsonObject = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Security context of a pod: its containers do not run as root."""
OPENSHIFT_POD: JsonObject = {
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""The same where the namespace has a range of users: OpenShift sets user and fsGroup itself."""
RESTRICTED_CONTAINER: JsonObject = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""Security context of a container. Programs write below /tmp and /dev/shm alone (`OWN_PATHS`)."""
ANY_USER = {"USER": "tuneloop", "LOGNAME": "tuneloop"}
"""Variables of a user without a name: torch and vLLM ask for it to name their caches."""
OWN_LABELS = {
    "tuneloop.dev/": "is tuneloop's own",
    "workflows.argoproj.io/": "is Argo's own",
    "kueue.x-k8s.io/queue-name": "is set by cluster.queue",
    "kueue.x-k8s.io/priority-class": "is set by cluster.priority",
}
"""Beginning of a label → why it cannot be set."""
OWN_VARIABLES = ("TUNELOOP_", "PET_")
"""Beginnings of variables that users cannot set: tuneloop's, and torchrun's."""
OWN_FIELDS = {
    "restartPolicy": "is set by what is rendered: leave it out",
    "serviceAccountName": "is set by service_account, which leaves pods with rights theirs",
    "serviceAccount": "is set by service_account, which leaves pods with rights theirs",
    "ephemeralContainers": "cannot be set when a pod is created: leave it out",
}
"""Field of a pod's spec → why a patch cannot set it."""
OWN_CONTAINER_FIELDS = {
    "image": "is set by cluster.images",
    "command": "is the stage's own: leave it out",
    "args": "are the stage's own: leave them out",
}
"""Field of the container ``main`` → why a patch cannot set it."""
DELETES = "would delete containers or fields that a pod needs: leave it out, or name what to change"
OWN_PATHS = ("/tmp", "/dev/shm")
"""Where pods have volumes of tuneloop (`argo/pod_fields.py`)."""
# A further source also needs its text, a branch of `build_volume_source`, and in `kfp/task_pod.py`
# one of `_mount_volume`.
SOURCES = ("pvc", "secret", "configmap", "emptydir", "image")
SOURCE_TEXT = "pvc/NAME, secret/NAME, configmap/NAME, emptydir/SIZE or image/REFERENCE"
ENV_SOURCES = {"secret": "secretRef", "configmap": "configMapRef"}
STORE = "tuneloop-store"
"""ConfigMap and Secret with the store's settings, which pods get as variables, unless
`cluster.credentials` names others. A pod may lack either."""


class Network(BaseModel, frozen=True, extra="forbid", coerce_numbers_to_str=True):
    """The fast network between pods that compute on accelerators; other pods do not get it."""

    rdma: dict[str, int] = Field(
        {},
        description="extended resource → number of it a pod (vpc.amazonaws.com/efa: 4); the "
        "container also gets the capability IPC_LOCK, which the Pod Security level restricted "
        "refuses",
    )
    nccl_env: dict[str, str] = Field({}, description="NCCL's variables: NCCL_SOCKET_IFNAME: eth0")


class PodSettings(BaseModel, frozen=True, extra="forbid", coerce_numbers_to_str=True):
    """What pods have besides tuneloop's own: a patch of a PodTemplateSpec, and shortcuts for it."""

    env: dict[str, str] = Field({}, description="variables of the program: HF_ENDPOINT: URL")
    env_from: list[str] = Field(
        [], description="secret/NAME or configmap/NAME: all its keys are variables"
    )
    image_pull_secrets: list[str] = Field([], description="Secrets of the images' registry")
    service_account: str = Field(
        "",
        description="ServiceAccount of stages and servers; steps that need rights keep theirs; "
        "empty: tuneloop-stage",
    )
    annotations: dict[str, str] = Field({}, description="of the pods")
    labels: dict[str, str] = Field({}, description="of the pods")
    volumes: dict[str, str] = Field({}, description=f"path in the pod → {SOURCE_TEXT}")
    priority_class: str = Field(
        "", description="PriorityClass of the pods; Kueue's is cluster.priority"
    )
    security: Security | None = Field(
        None,
        description="restricted: user, group and fsGroup 1000, no privileges; openshift: the same "
        "without ids, which the namespace gives; none: no security context; null: as cluster.pod, "
        "and there restricted",
    )
    gpu_resource: str = Field(
        "", description=f"resource that `gpus` counts: amd.com/gpu; empty: {GPU}"
    )
    network: Network = Network()
    metadata: dict[str, Any] = Field(
        {}, description="strategic-merge patch of the pods' labels and annotations"
    )
    spec: dict[str, Any] = Field(
        {},
        description="strategic-merge patch of the pods' spec, as `kubectl patch` takes it; the "
        "container of a stage or a server is `main`",
    )

    @model_validator(mode="after")
    def _check(self) -> PodSettings:
        """Refuse what Kubernetes or tuneloop would refuse, by its path."""
        for path, value, remedy in self._find_errors():
            raise UserError(path, value, remedy)
        return self

    def _find_errors(self) -> Iterator[tuple[str, Any, str]]:
        """Yield path, value and remedy of each error."""
        yield from find_patch_errors(self.metadata, "metadata", "ObjectMeta")
        yield from find_patch_errors(self.spec, "spec", "PodSpec")
        for name, value in self.metadata.items():
            if name not in ("labels", "annotations"):
                yield f"metadata.{name}", value, "cannot be set: only labels and annotations can"
        # A queue's label here would be a second way to set it, unseen by the preflight.
        patched_labels = self.metadata.get("labels") or {}
        for prefix, labels in (("labels", self.labels), ("metadata.labels", patched_labels)):
            for label, value in labels.items():
                for start, reason in OWN_LABELS.items():
                    if label.startswith(start):
                        yield f"{prefix}.{label}", value, reason
        yield from _find_spec_errors(self.spec)
        for prefix, variables in (("env", self.env), ("network.nccl_env", self.network.nccl_env)):
            for name in variables:
                if name.startswith(OWN_VARIABLES):
                    yield f"{prefix}.{name}", variables[name], "is tuneloop's own: leave it out"
        # Short forms are Kubernetes' objects for all but their names.
        for source in self.env_from:
            kind, _, name = source.partition("/")
            if kind not in ENV_SOURCES or not name:
                yield "env_from", source, "is neither secret/NAME nor configmap/NAME"
        for path, source in self.volumes.items():
            kind, _, name = source.partition("/")
            if not path.startswith("/") or path in OWN_PATHS:
                remedy = f"is no path of a volume: write an absolute one, not {OWN_PATHS}"
                yield "volumes", path, remedy
            if kind not in SOURCES or (not name and kind != "emptydir"):
                yield f"volumes.{path}", source, f"is no source of a volume: write {SOURCE_TEXT}"

    def merge(self, other: PodSettings | None) -> PodSettings:
        """Return these settings with those of a role, which win where both set one."""
        if other is None:
            return self
        network = Network(
            rdma=self.network.rdma | other.network.rdma,
            nccl_env=self.network.nccl_env | other.network.nccl_env,
        )
        # The order is kept: a registry's Secrets are tried one after the other.
        pull_secrets = dict.fromkeys(self.image_pull_secrets + other.image_pull_secrets)
        return PodSettings(
            env=self.env | other.env,
            env_from=list(dict.fromkeys(self.env_from + other.env_from)),
            image_pull_secrets=list(pull_secrets),
            service_account=other.service_account or self.service_account,
            annotations=self.annotations | other.annotations,
            labels=self.labels | other.labels,
            volumes=self.volumes | other.volumes,
            priority_class=other.priority_class or self.priority_class,
            security=other.security or self.security,
            gpu_resource=other.gpu_resource or self.gpu_resource,
            network=network,
            metadata=merge_patches(self.metadata, other.metadata, "ObjectMeta"),
            spec=merge_patches(self.spec, other.spec),
        )

    @property
    def pod_security(self) -> JsonObject:
        """The security context of a pod; empty where it has none."""
        if self.security == "none":
            return {}
        return OPENSHIFT_POD if self.security == "openshift" else RESTRICTED_POD

    @property
    def container_security(self) -> JsonObject:
        """The security context of a container; empty where it has none."""
        return {} if self.security == "none" else RESTRICTED_CONTAINER

    @property
    def secret_mode(self) -> int:
        """The mode of a Secret's files: a group may read them only where fsGroup makes it theirs."""
        return 0o444 if self.security == "none" else 0o440

    @property
    def gpu(self) -> str:
        """The resource that `gpus` counts."""
        return self.gpu_resource or GPU

    def build_labels(self) -> dict[str, str]:
        """Build the labels of a pod besides tuneloop's."""
        return _merge_texts(self.labels, self.metadata.get("labels"))

    def build_annotations(self) -> dict[str, str]:
        """Build the annotations of a pod besides tuneloop's."""
        return _merge_texts(self.annotations, self.metadata.get("annotations"))

    def build_spec_patch(
        self, is_accelerated: bool, environment_sources: Sequence[JsonObject] = ()
    ) -> JsonObject:
        """Build the patch of a pod's spec: the shortcuts, then `spec`.

        Args:
            is_accelerated: whether the pod's role computes on accelerators, and so gets the fast
                network.
            environment_sources: what the list ``envFrom`` has besides `env_from`.
        """
        # The patch of the user's own comes last, and so has the last word.
        patch: JsonObject = {}
        container = self._build_container(is_accelerated, environment_sources)
        if container:
            patch["containers"] = [{"name": MAIN} | container]
        if self.image_pull_secrets:
            patch["imagePullSecrets"] = [{"name": name} for name in self.image_pull_secrets]
        if self.priority_class:
            patch["priorityClassName"] = self.priority_class
        if self.volumes:
            patch["volumes"] = [
                {"name": f"pod-{index}"} | build_volume_source(source)
                for index, source in enumerate(self.volumes.values())
            ]
        return merge_patches(patch, self.spec)

    def _build_env_sources(self) -> list[JsonObject]:
        """Build the items of the list ``envFrom`` for `env_from`."""
        sources: list[JsonObject] = []
        for source in self.env_from:
            kind, _, name = source.partition("/")
            sources.append({ENV_SOURCES[kind]: {"name": name}})
        return sources

    def _build_container(
        self, is_accelerated: bool, environment_sources: Sequence[JsonObject]
    ) -> JsonObject:
        """Build what the shortcuts say of a pod's container."""
        container: JsonObject = {}
        variables = dict(self.env)
        # The namespace's range has no entry in the image's list of users.
        if self.security == "openshift":
            variables = ANY_USER | variables
        if is_accelerated:
            variables |= self.network.nccl_env
        if variables:
            container["env"] = [{"name": name, "value": value} for name, value in variables.items()]
        if self.env_from:
            # A patch replaces the list, so that it repeats the store's items.
            container["envFrom"] = [*environment_sources, *self._build_env_sources()]
        # An extended resource has to be a limit, and its request the same.
        if is_accelerated and self.network.rdma:
            amounts = {name: str(count) for name, count in self.network.rdma.items()}
            container["resources"] = {"requests": amounts, "limits": amounts}
            container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
        if self.volumes:
            container["volumeMounts"] = [
                {"mountPath": path, "name": f"pod-{index}"}
                for index, path in enumerate(self.volumes)
            ]
        return container


def _merge_texts(first: JsonMapping, second: JsonMapping | None) -> dict[str, str]:
    """Return labels or annotations with a patch of them applied."""
    merged = dict(first)
    for name, value in (second or {}).items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = value
    return merged


def _find_deletions(spec: JsonMapping) -> Iterator[tuple[str, Any, str]]:
    """Yield where a patch of a pod's spec deletes what a pod needs."""
    for directive in (DIRECTIVE, RETAINED):
        if directive in spec:
            yield f"spec.{directive}", spec[directive], DELETES
    for field in ("containers", "initContainers"):
        if field in spec and spec[field] is None:
            yield f"spec.{field}", None, DELETES
        for container in spec.get(field) or []:
            name = container.get("name")
            is_own = name is None or name in (MAIN, *ARGO_CONTAINERS, *ARGO_INIT_CONTAINERS)
            if is_own and container.get(DIRECTIVE) in ("delete", "replace"):
                path = f"spec.{field}" if name is None else f"spec.{field}[{name}]"
                yield f"{path}.{DIRECTIVE}", container[DIRECTIVE], DELETES


def _find_spec_errors(spec: JsonMapping) -> Iterator[tuple[str, Any, str]]:
    """Yield what a patch of a pod's spec must not say, as tuneloop says it."""
    for name, remedy in OWN_FIELDS.items():
        if name in spec:
            yield f"spec.{name}", spec[name], remedy
    yield from _find_deletions(spec)
    # The stage's program is what commits and retries: a patch must not replace it.
    for container in spec.get("containers") or []:
        name = container.get("name")
        path = f"spec.containers[{name}]"
        if name is None or name in ARGO_CONTAINERS:
            continue
        if name != MAIN:
            remedy = (
                f"is neither {MAIN} nor {ARGO_CONTAINERS[0]}, and one more container would keep "
                "the pod from ending: write it below initContainers, with restartPolicy: Always"
            )
            yield path, name, remedy
        for field, remedy in OWN_CONTAINER_FIELDS.items():
            if field in container:
                yield f"{path}.{field}", container[field], remedy
        for variable in container.get("env") or []:
            if str(variable.get("name")).startswith(OWN_VARIABLES):
                yield f"{path}.env[{variable['name']}]", variable, "is tuneloop's own: leave it out"


def build_volume_source(source: str) -> JsonObject:
    """Build the source of a volume from its short form, such as ``secret/NAME``."""
    kind, _, name = source.partition("/")
    if kind == "pvc":
        return {"persistentVolumeClaim": {"claimName": name}}
    if kind == "secret":
        return {"secret": {"secretName": name}}
    if kind == "configmap":
        return {"configMap": {"name": name}}
    if kind == "image":
        return {"image": {"reference": name, "pullPolicy": "IfNotPresent"}}
    return {"emptyDir": {"sizeLimit": name} if name else {}}


def fit_patch(
    patch: JsonMapping,
    *,
    containers: Collection[str] = (),
    init_containers: Collection[str] = (),
) -> JsonObject:
    """Return a patch for a pod whose containers have these names.

    What it says of a container that the pod lacks is left out, as Argo's exist in Argo's pods
    alone. One that is added has an image.

    Args:
        patch: of a pod's spec.
        containers: the pod's containers besides ``main``.
        init_containers: its init containers.
    """
    fitted = dict(patch)
    names_by_field = {
        "containers": [MAIN, *containers],
        "initContainers": init_containers,
    }
    for field, names in names_by_field.items():
        items: list[JsonObject] = []
        for item in fitted.pop(field, None) or ():
            if item.get("name") in names or "image" in item:
                items.append(item)
        # An empty list would be one more difference between two manifests.
        if items:
            fitted[field] = items
    return fitted
