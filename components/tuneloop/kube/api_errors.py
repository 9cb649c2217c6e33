"""Say in one line what went wrong between a client and the API server, and wait for one that is restarting."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tuneloop.core.errors import Retryable, Unavailable, UserError
from tuneloop.kube.connection import IN_CLUSTER, Connection

PATIENCE = 300.0
"""Seconds that an API server may be away while a run is followed: as long as it takes to restart one."""

T = TypeVar("T")


class Unreachable(UserError):
    """The API server does not answer."""


@contextmanager
def translate_api_errors(cluster: Connection) -> Iterator[None]:
    """Say in one line what a refusal of the API server means.

    One that does not answer is the user's mistake only where a user said which one: a pod's own will be back.
    """
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        message = read_api_message(error)
        if error.status in (429, 500, 502, 503, 504):
            raise Unavailable(f"cluster: {cluster.host}: {message}") from error
        raise UserError("cluster", cluster.context, f"refused ({error.status}): {message}") from error
    except HTTPError as error:
        if cluster.context == IN_CLUSTER:
            raise Unavailable(f"cluster: {cluster.host} does not answer ({type(error).__name__})") from error
        remedy = f"{cluster.host} does not answer ({type(error).__name__}); is it running, and is this the context?"
        raise Unreachable("cluster", cluster.context, remedy) from error


def retry_until_available(look: Callable[[], T], *, patience: float = PATIENCE, pause: float = 1.0) -> T:
    """Call `look` until the API server is not in trouble, and return what it gives.

    It is called again after `pause` seconds, then after twice, four times as many, up to 30.

    Raises:
        Retryable, Unreachable: it was in trouble for `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return look()
        except (Retryable, Unreachable):
            if time.monotonic() + pause > deadline:
                raise
            time.sleep(pause)
            pause = min(2 * pause, 30.0)


def read_api_message(error: Any) -> str:
    """Read the API server's own words of an ApiException."""
    try:
        return " ".join(str(json.loads(error.body)["message"]).split())
    except (TypeError, ValueError, KeyError):
        return str(error.reason)
