"""The findings of a cluster's checks: problems with the command that fixes them, and reads that were denied."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.kube.connection import ApiRefusal

INSTALL = "manifests/third-party/README.md says how to install it"
APPLY = "kubectl apply -k manifests/overlays/local"
DENIED = re.compile(r'cannot (\w+) resource "([^"]+)"')
_denied: ContextVar[list[str] | None] = ContextVar("denied", default=None)


class Problem(UserError):
    """A problem that prevents a workflow from running, and the command that fixes it."""

    def __init__(
        self, field: str, value: object, found: str, command: str, otherwise: str = ""
    ) -> None:
        super().__init__(field, value, f"{found}; {command}{otherwise}")
        self.found = found
        self.command = command


ABSENT = "absent"
UNSEEN = "not for this account to see"


@contextmanager
def record_denied_reads() -> Iterator[list[str]]:
    """Yield a list to which each read is added that the account has no permission for, as ``list nodes``."""
    denied: list[str] = []
    token = _denied.set(denied)
    try:
        yield denied
    finally:
        _denied.reset(token)


def find_object(read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of `read`; ABSENT for 404; UNSEEN for 403."""
    try:
        return read(*args, **kwargs)
    except ApiRefusal as error:
        if error.status == 404:
            return ABSENT
        if error.status != 403:
            raise
        if (denied := _denied.get()) is not None:
            match = DENIED.search(error.message)
            denied.append(" ".join(match.groups()) if match else f"read it: {error.message}")
        return UNSEEN


def is_absent(read: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Return whether the object of `read` does not exist; one that the account may not read counts as existing."""
    return find_object(read, *args, **kwargs) is ABSENT
