"""Hold a device lease for a pod on this machine, as the sidecar of its template does on a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tuneloop.argo.lease_sidecar import sidecar
from tuneloop.core import fencing
from tuneloop.sharing.file import STORED
from tuneloop.sharing.opening import open_turns
from tuneloop.sharing.sidecar import arguments

if TYPE_CHECKING:
    from tuneloop.local.executor import Session
    from tuneloop.local.journal import Node
    from tuneloop.local.pod_files import Box


@contextlib.contextmanager
def taken(session: Session, template: Mapping[str, Any], node: Node, box: Box) -> Iterator[None]:
    """What the sidecar of `template` does, for the local executor: its group's document lies in the store.

    Raises:
        Retryable: the run was stopped meanwhile, or the store is in trouble.
    """
    found = sidecar(template)
    if found is None:
        yield
        return
    wanted = arguments(found["args"])
    store = session.parameters["store"]
    place = store if "://" in store else str(session.cwd / store)
    about: Any = {"who": wanted.run, "policy": wanted.policy, "patience": wanted.patience}
    turns = open_turns(f"{place}/{STORED}/{wanted.group}", **about)
    if turns.read().holder:
        session.say(node, f"waits for its turn in group {wanted.group}")
    file = box.local(wanted.file)
    with turns.acquire(stop=session.stopping, told=lambda grant: fencing.write(file, grant)):
        if node.message:
            session.say(node, "")
        yield
