"""The findings of a cluster's checks: problems, their fixes, and reads that were denied."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.kube.connection import ApiRefusal

INSTALL = "manifests/third-party/README.md says how to install it"
NAMESPACES = {"local": "tuneloop", "kfp": "kubeflow"}
"""Folder of ``manifests/overlays`` → the namespace of its objects. `NAMESPACED` has the same
keys."""
NAMESPACED = {
    "local": "resources: [../../namespaced]\\ncomponents: [../../components/s3]\\n",
    "kfp": "resources: [../kfp]\\n",
}
"""The same folder → what an overlay for another namespace has in its place, as `printf` takes
it."""
ADMIN = "ask an admin of the cluster (docs/cluster.md, What an admin gives once)"
"""A remedy that the admin of a namespace has no right to."""
DENIED = re.compile(r'cannot (\w+) resource "([^"]+)"')
"""Finds verb and resource in the API server's message of a status of 403."""
# Of one task or thread: two checks at once do not share their list.
_denied_reads: ContextVar[list[str] | None] = ContextVar("denied_reads", default=None)

ABSENT = "absent"
UNSEEN = "not for this account to see"
"""What `find_object` returns in place of an object. Both are texts, and so true: a caller compares
its result with both before it uses it."""


def apply_manifests(namespace: str, overlay: str = "local") -> str:
    """Return the command that creates what a namespace needs, from the repository's root.

    Args:
        namespace: of the runs; any but the overlay's gets an overlay of its own.
        overlay: ``local`` for Argo Workflows, ``kfp`` for Kubeflow Pipelines.
    """
    if namespace == NAMESPACES[overlay]:
        return f"kubectl apply -k manifests/overlays/{overlay}"
    folder = f"manifests/overlays/{namespace}"
    lines = f"namespace: {namespace}\\n{NAMESPACED[overlay]}"
    return (
        f"mkdir -p {folder} && printf '{lines}' > {folder}/kustomization.yaml"
        f" && kubectl apply -k {folder}"
    )


def create_namespace(name: str) -> str:
    """Return the command that creates a namespace: with its overlay, or as an admin does it."""
    return (
        apply_manifests(name) if name == NAMESPACES["local"] else f"kubectl create namespace {name}"
    )


class Problem(UserError):
    """A problem that prevents a workflow from running, and the command that fixes it.

    Attributes:
        found: what is wrong, without the remedy.
        command: the command, or sentence, that fixes it.

    The line is ``{finding}; {command}{otherwise}``: `otherwise` is a second remedy, which begins
    with a comma or a blank. `doctor` prints `found` and `command` by themselves, without
    `otherwise`. The remedy of any other UserError it splits at the last semicolon
    (`cluster/doctor.py: _refuse`).
    """

    def __init__(
        self,
        field: str,
        value: object,
        finding: str,
        *,
        command: str,
        otherwise: str = "",
    ) -> None:
        super().__init__(field, value, f"{finding}; {command}{otherwise}")
        self.found = finding
        self.command = command


@contextmanager
def record_denied_reads() -> Iterator[list[str]]:
    """Yield a list of the reads that the account has no permission for, such as ``list nodes``.

    Reads are added to it while the block runs.
    """
    reads: list[str] = []
    token = _denied_reads.set(reads)
    try:
        yield reads
    finally:
        _denied_reads.reset(token)


def find_object(read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of `read`; ABSENT for a status of 404; UNSEEN for 403."""
    try:
        return read(*args, **kwargs)
    except ApiRefusal as error:
        if error.status == 404:
            return ABSENT
        if error.status != 403:
            raise
        reads = _denied_reads.get()
        if reads is not None:
            # The message names the verb and the resource, which the caller does not know.
            match = DENIED.search(error.message)
            reads.append(" ".join(match.groups()) if match else f"read it: {error.message}")
        return UNSEEN


def is_absent(read: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Return whether the object of `read` does not exist.

    An object that the account may not read counts as existing.
    """
    return find_object(read, *args, **kwargs) is ABSENT
