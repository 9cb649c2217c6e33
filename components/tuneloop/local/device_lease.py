"""Hold a device lease for a pod on this machine, as the sidecar of its template does on a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from tuneloop.argo.lease_sidecar import find_lease_sidecar
from tuneloop.core import fencing
from tuneloop.local.execution import Execution
from tuneloop.local.journal import Node
from tuneloop.local.pod_files import PodFilesystem
from tuneloop.sharing.file import STORED
from tuneloop.sharing.opening import open_turns
from tuneloop.sharing.sidecar import parse_arguments


@contextlib.contextmanager
def hold_device_lease(
    execution: Execution, template: Mapping[str, Any], node: Node, files: PodFilesystem
) -> Iterator[None]:
    """Do what the sidecar of `template` does on a cluster: its group's document lies in the store.

    Raises:
        Retryable: the run was stopped meanwhile, or the store is in trouble.
    """
    container = find_lease_sidecar(template)
    if container is None:
        yield
        return
    wanted = parse_arguments(container["args"])
    store = execution.parameters["store"]
    root = store if "://" in store else str(execution.cwd / store)
    options: Any = {"who": wanted.run, "policy": wanted.policy, "patience": wanted.patience}
    turns = open_turns(f"{root}/{STORED}/{wanted.group}", **options)
    if turns.read().holder:
        execution.set_message(node, f"waits for its turn in group {wanted.group}")
    file = files.local_path(wanted.file)
    with turns.acquire(stop=execution.stopping, told=lambda grant: fencing.write_lease_grant(file, grant)):
        if node.message:
            execution.set_message(node, "")
        yield
