"""Authentication of callers, and the namespaces in which they may have sessions."""

import hashlib
import hmac
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.server_token import create_token_file
from tuneloop.inference.refusals import REFUSAL_S, Refused
from tuneloop.kube.connection import read_api_message

REMEMBERED = 30.0
"""Seconds for which an answer of the API server is cached; a token that is revoked meanwhile is still accepted."""
MOST = 4096
"""The number of accepted tokens, and of refused tokens, whose answer is cached."""
WAITING = 256
"""The maximum number of unknown tokens that wait for the API server's answer."""
PREFIX = "tml-"
"""Tinker's client library accepts a key with this prefix, or a JWT."""
LOCAL = "local"


@contextmanager
def translate_refusals(namespace: str) -> Iterator[None]:
    """Raise Refused if the API server refuses; Retryable if it fails or, with no `namespace`, refuses the gateway."""
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
            raise Refused(
                403, f"namespace {namespace!r} is not served here: {read_api_message(error)}"
            ) from error
        if error.status in (400, 404, 422):
            raise Refused(422, read_api_message(error)) from error
        raise Retryable(f"the API server: {read_api_message(error)}") from error
    except HTTPError as error:
        raise Retryable(
            f"the API server does not answer ({type(error).__name__}); try again"
        ) from error


@dataclass(frozen=True)
class Caller:
    """A caller whose token was accepted; `namespace` is that of a service account."""

    user: str
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()
    namespace: str = ""


class TokenReviews:
    """Access by tokens for `audience` (empty: the API server), to namespaces where the caller may create workflows."""

    def __init__(self, api: Any, audience: str) -> None:
        from kubernetes import client

        self.authentication = client.AuthenticationV1Api(api)
        self.authorization = client.AuthorizationV1Api(api)
        self.audience = audience
        self._allowed: dict[tuple[Caller, str], tuple[float, bool]] = {}
        self._callers: dict[bytes, tuple[float, Caller | None]] = {}
        self._refused: dict[
            bytes, tuple[float, Caller | None]
        ] = {}  # separate, so that a flood evicts no caller
        self._waiting = 0  # tokens of strangers
        self._lanes = (
            anyio.CapacityLimiter(4),
            anyio.CapacityLimiter(4),
        )  # a flood of tokens delays only new callers

    async def caller(self, token: str) -> Caller | None:
        """Return the owner of a token; None if it is not valid."""
        key = hashlib.sha256(token.encode()).digest()
        now = time.monotonic()
        for answers in (self._callers, self._refused):
            if (known := answers.get(key)) and now - known[0] < REMEMBERED:
                return known[1]
        stranger = key not in self._callers
        if stranger and self._waiting >= WAITING:
            await anyio.sleep(REFUSAL_S)
            raise Refused(
                503, f"already {WAITING} tokens wait for the API server's answer; try again"
            )
        self._waiting += stranger
        try:
            caller = await anyio.to_thread.run_sync(
                self._review, token, limiter=self._lanes[not stranger]
            )
        finally:
            self._waiting -= stranger
        for answers in (
            self._callers,
            self._refused,
        ):  # a revoked token counts as unknown from now on
            answers.pop(key, None)
        answers = self._callers if caller else self._refused
        answers[key] = now, caller
        if len(answers) > MOST:
            answers.pop(next(iter(answers)))
        return caller

    def allowed(self, caller: Caller, namespace: str) -> bool:
        """Return whether the caller may use the sessions of a namespace."""
        key = (caller, namespace)
        now = time.monotonic()
        if (known := self._allowed.get(key)) and now - known[0] < REMEMBERED:
            return known[1]
        answer = self._ask(caller, namespace)
        self._allowed = {k: v for k, v in self._allowed.items() if now - v[0] < REMEMBERED} | {
            key: (now, answer)
        }
        return answer

    def _review(self, token: str) -> Caller | None:
        spec = {"token": token, **({"audiences": [self.audience]} if self.audience else {})}
        with translate_refusals(""):
            status = self.authentication.create_token_review(
                {"spec": spec}, _request_timeout=30
            ).status
        # An API server without audiences leaves them out: the token may then be meant for another service.
        if not status.authenticated or (
            self.audience and self.audience not in (status.audiences or ())
        ):
            return None
        user = status.user
        account = user.username.removeprefix("system:serviceaccount:")
        extra = tuple((name, tuple(values)) for name, values in sorted((user.extra or {}).items()))
        namespace = account.partition(":")[0] if account != user.username else ""
        return Caller(user.username, tuple(user.groups or ()), extra, namespace)

    def _ask(self, caller: Caller, namespace: str) -> bool:
        attributes = {
            "group": "argoproj.io",
            "resource": "workflows",
            "verb": "create",
            "namespace": namespace,
        }
        extra = {name: list(values) for name, values in caller.extra}
        spec = {
            "resourceAttributes": attributes,
            "user": caller.user,
            "groups": list(caller.groups),
            "extra": extra,
        }
        try:
            with translate_refusals(namespace):
                ask = self.authorization.create_namespaced_local_subject_access_review
                answer = ask(
                    namespace,
                    {"metadata": {"namespace": namespace}, "spec": spec},
                    _request_timeout=30,
                )
        except Refused:  # no such namespace, or the gateway has no permission in it
            return False
        return bool(answer.status.allowed)


class TokenFile:
    """A token for the namespace ``local``, in a file. Raises UserError if it cannot be used, or others can read it."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            create_token_file(path, PREFIX)
            if path.stat().st_mode & 0o077:
                raise UserError(
                    "--token-file", str(path), "others can read it: chmod 600, or choose another"
                )
            self.token = path.read_text().strip()
        except OSError as error:
            raise UserError(
                "--token-file", str(path), f"cannot be used ({error.strerror})"
            ) from error
        if not self.token:
            raise UserError("--token-file", str(path), "is empty; remove it, and another is made")

    async def caller(self, token: str) -> Caller | None:
        known = hmac.compare_digest(token.encode(), self.token.encode())
        return Caller(LOCAL, namespace=LOCAL) if known else None

    def allowed(self, caller: Caller, namespace: str) -> bool:
        return namespace == LOCAL


Access = TokenReviews | TokenFile
"""Authentication and authorisation, each with `caller` and `allowed`."""


def token_of(headers: Any) -> str:
    """Read the bearer token of a request, or Tinker's key; raise Refused (401) where it has none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    token = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    if not token:
        raise Refused(401, "no token: send Authorization: Bearer TOKEN, or X-API-Key: TOKEN")
    return token
