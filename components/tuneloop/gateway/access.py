"""Who calls, and where they may have sessions."""

import hashlib
import hmac
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import anyio.to_thread

from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.server_token import create_token_file
from tuneloop.inference.refusals import Refused
from tuneloop.kube.connection import read_api_message

REMEMBERED = 30.0
"""Seconds for which an answer of the API server holds; a token withdrawn meanwhile is still taken."""
PREFIX = "tml-"
"""Tinker's client library takes a key that begins like this, or a JWT."""
LOCAL = "local"


@contextmanager
def translate_refusals(namespace: str) -> Iterator[None]:
    """Say what a refusal of the API server means to a caller. Its silence is `Retryable`, and so is a refusal without a
    namespace: then the gateway lacks rights."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        if error.status in (401, 403) and not namespace:
            raise Retryable(
                f"the gateway may ask for no token (ClusterRoleBinding tuneloop-gateway): {read_api_message(error)}"
            ) from error
        if error.status in (401, 403):
            raise Refused(403, f"namespace {namespace!r} is not served here: {read_api_message(error)}") from error
        if error.status in (400, 404, 422):
            raise Refused(422, read_api_message(error)) from error
        raise Retryable(f"the API server: {read_api_message(error)}") from error
    except HTTPError as error:
        raise Retryable(f"the API server does not answer ({type(error).__name__}); try again") from error


@dataclass(frozen=True)
class Caller:
    """Somebody whose token was taken; `namespace` is a service account's."""

    user: str
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()
    namespace: str = ""


class Access(Protocol):
    """Authentication and authorisation."""

    async def caller(self, token: str) -> Caller | None:
        """Return whose token it is; None where it is nobody's."""

    def allowed(self, caller: Caller, namespace: str) -> bool:
        """Return whether sessions of the namespace are the caller's to use."""


class TokenReviews:
    """Tokens and rights of Kubernetes: who may create workflows in a namespace may have sessions there.

    Args:
        audience: that tokens must be meant for; empty: the API server's own.
    """

    def __init__(self, api: Any, audience: str) -> None:
        from kubernetes import client

        self.authentication, self.authorization = client.AuthenticationV1Api(api), client.AuthorizationV1Api(api)
        self.audience = audience
        self._known: dict[Any, tuple[float, Any]] = {}
        self._callers: dict[bytes, tuple[float, Caller]] = {}
        self._lanes = anyio.CapacityLimiter(4), anyio.CapacityLimiter(4)  # a flood of strangers keeps newcomers waiting

    async def caller(self, token: str) -> Caller | None:
        key, now = hashlib.sha256(token.encode()).digest(), time.monotonic()
        if (known := self._callers.get(key)) and now - known[0] < REMEMBERED:
            return known[1]
        if caller := await anyio.to_thread.run_sync(self._review, token, limiter=self._lanes[known is not None]):
            self._callers = dict([*self._callers.items()][-4096:]) | {key: (now, caller)}
        else:  # withdrawn, perhaps: it waits among strangers from now on
            self._callers.pop(key, None)
        return caller

    def allowed(self, caller: Caller, namespace: str) -> bool:
        return bool(self._remembered((caller, namespace), lambda: self._ask(caller, namespace)))

    def _review(self, token: str) -> Caller | None:
        spec = {"token": token, **({"audiences": [self.audience]} if self.audience else {})}
        with translate_refusals(""):
            status = self.authentication.create_token_review({"spec": spec}, _request_timeout=30).status
        # An API server that knows no audiences leaves them out: then nothing says that the token was meant for us.
        if not status.authenticated or (self.audience and self.audience not in (status.audiences or ())):
            return None
        user = status.user
        account = user.username.removeprefix("system:serviceaccount:")
        extra = tuple((name, tuple(values)) for name, values in sorted((user.extra or {}).items()))
        namespace = account.partition(":")[0] if account != user.username else ""
        return Caller(user.username, tuple(user.groups or ()), extra, namespace)

    def _ask(self, caller: Caller, namespace: str) -> bool:
        attributes = {"group": "argoproj.io", "resource": "workflows", "verb": "create", "namespace": namespace}
        extra = {name: list(values) for name, values in caller.extra}
        spec = {"resourceAttributes": attributes, "user": caller.user, "groups": list(caller.groups), "extra": extra}
        try:
            with translate_refusals(namespace):
                ask = self.authorization.create_namespaced_local_subject_access_review
                answer = ask(namespace, {"metadata": {"namespace": namespace}, "spec": spec}, _request_timeout=30)
        except Refused:  # no such namespace, or one that the gateway was given no rights in
            return False
        return bool(answer.status.allowed)

    def _remembered(self, key: Any, ask: Callable[[], Any]) -> Any:
        now = time.monotonic()
        if (known := self._known.get(key)) and now - known[0] < REMEMBERED:
            return known[1]
        answer = ask()
        self._known = {k: v for k, v in self._known.items() if now - v[0] < REMEMBERED} | {key: (now, answer)}
        return answer


class TokenFile:
    """One token in a file that only its owner reads, for the namespace ``local``.

    Raises:
        UserError: the file cannot be written, or others can read it.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            create_token_file(path, PREFIX)
            if path.stat().st_mode & 0o077:
                raise UserError("--token-file", str(path), "others can read it: chmod 600, or choose another")
            self.token = path.read_text().strip()
        except OSError as error:
            raise UserError("--token-file", str(path), f"cannot be used ({error.strerror})") from error
        if not self.token:
            raise UserError("--token-file", str(path), "is empty; remove it, and another is made")

    async def caller(self, token: str) -> Caller | None:
        known = hmac.compare_digest(token.encode(), self.token.encode())
        return Caller(LOCAL, namespace=LOCAL) if known else None

    def allowed(self, caller: Caller, namespace: str) -> bool:
        return namespace == LOCAL


def token_of(headers: Any) -> str:
    """Read the bearer token of a request, or Tinker's key.

    Raises:
        Refused: 401.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    token = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    if not token:
        raise Refused(401, "no token: send Authorization: Bearer TOKEN, or X-API-Key: TOKEN")
    return token
