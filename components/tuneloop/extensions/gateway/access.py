"""Authentication of callers, and the namespaces in which they may have sessions.

`app.py` asks it for each request, before it reads a body. There is a class for a cluster
(`TokenReviews`) and one for one machine (`TokenFile`), with the same two methods, `caller` and
`allowed`: what `app.py` calls is added to both. A further request to the API server needs a right
in `manifests/components/gateway/rights.yaml`. Its tests are in
`tests/extensions/gateway/test_app.py` and `test_hostile.py`.
"""

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
from tuneloop.core.json_types import JsonObject
from tuneloop.core.server_token import create_token_file
from tuneloop.inference.refusals import REFUSAL_S, Refused
from tuneloop.kube.connection import read_api_message

REMEMBERED_S = 30.0
"""Seconds for which an answer of the API server is cached; a token that is revoked meanwhile is
still accepted."""
MOST_ANSWERS = 4096
"""The number of accepted tokens, and of refused tokens, whose answer is cached."""
MOST_WAITING = 256
"""The maximum number of unknown tokens that wait for the API server's answer."""
PREFIX = "tml-"
"""The beginning of the token of `TokenFile`: Tinker's client library accepts a key with this
prefix, or a JWT."""
LOCAL = "local"
"""The user and the one namespace of a gateway on one machine."""


@contextmanager
def translate_refusals(namespace: str) -> Iterator[None]:
    """Raise Refused if the API server refuses; Retryable if it fails or, with no `namespace`,
    refuses the gateway.
    """
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        message = read_api_message(error)
        if error.status in (401, 403) and not namespace:
            problem = "the gateway may ask for no token (ClusterRoleBinding tuneloop-gateway)"
            raise Retryable(f"{problem}: {message}") from error
        if error.status in (401, 403):
            problem = f"namespace {namespace!r} is not served here"
            raise Refused(403, f"{problem}: {message}") from error
        if error.status in (400, 404, 422):
            raise Refused(422, message) from error
        raise Retryable(f"the API server: {message}") from error
    except HTTPError as error:
        problem = f"the API server does not answer ({type(error).__name__})"
        raise Retryable(f"{problem}; try again") from error


@dataclass(frozen=True)
class Caller:
    """A caller whose token was accepted; `namespace` is that of a service account."""

    user: str
    groups: tuple[str, ...] = ()
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()
    namespace: str = ""


class TokenReviews:
    """Access by tokens of the cluster, to namespaces where the caller may create workflows."""

    def __init__(self, api: Any, audience: str) -> None:
        """Ask the API server by its client `api`.

        Args:
            audience: that tokens must have been issued for; empty: the API server's.
        """
        from kubernetes import client

        self.authentication = client.AuthenticationV1Api(api)
        self.authorization = client.AuthorizationV1Api(api)
        self.audience = audience
        self._allowed: dict[tuple[Caller, str], tuple[float, bool]] = {}
        # Refused tokens are apart, so that a flood of them evicts no caller.
        self._callers: dict[bytes, tuple[float, Caller | None]] = {}
        self._refused: dict[bytes, tuple[float, Caller | None]] = {}
        # A flood of unknown tokens delays only new callers: the others have threads of their own.
        self._unknown_waiting = 0
        self._unknown_threads = anyio.CapacityLimiter(4)
        self._caller_threads = anyio.CapacityLimiter(4)

    async def caller(self, token: str) -> Caller | None:
        """Return the owner of a token; None if it is not valid.

        Raises Refused (503) if too many unknown tokens wait for an answer.
        """
        key = hashlib.sha256(token.encode()).digest()
        time_s = time.monotonic()
        for answers in (self._callers, self._refused):
            if key in answers:
                answered_at, caller = answers[key]
                if time_s - answered_at < REMEMBERED_S:
                    return caller
        if key in self._callers:
            caller = await self._review_on_thread(token, self._caller_threads)
        else:
            if self._unknown_waiting >= MOST_WAITING:
                await anyio.sleep(REFUSAL_S)
                problem = f"already {MOST_WAITING} tokens wait for the API server's answer"
                raise Refused(503, f"{problem}; try again")
            self._unknown_waiting += 1
            try:
                caller = await self._review_on_thread(token, self._unknown_threads)
            finally:
                self._unknown_waiting -= 1
        # A token that was revoked counts as unknown from time_s on.
        self._callers.pop(key, None)
        self._refused.pop(key, None)
        answers = self._callers if caller else self._refused
        answers[key] = (time_s, caller)
        if len(answers) > MOST_ANSWERS:
            answers.pop(next(iter(answers)))
        return caller

    async def _review_on_thread(self, token: str, threads: anyio.CapacityLimiter) -> Caller | None:
        return await anyio.to_thread.run_sync(self._review, token, limiter=threads)

    def allowed(self, caller: Caller, namespace: str) -> bool:
        """Return whether the caller may use the sessions of a namespace."""
        key = (caller, namespace)
        time_s = time.monotonic()
        recent = {k: v for k, v in self._allowed.items() if time_s - v[0] < REMEMBERED_S}
        if key not in recent:
            recent[key] = (time_s, self._ask(caller, namespace))
        self._allowed = recent
        return recent[key][1]

    def _review(self, token: str) -> Caller | None:
        spec: JsonObject = {"token": token}
        if self.audience:
            spec["audiences"] = [self.audience]
        with translate_refusals(""):
            review = self.authentication.create_token_review({"spec": spec}, _request_timeout=30)
        status = review.status
        if not status.authenticated:
            return None
        # An API server without audiences leaves them out: the token may then be meant for another
        # service.
        if self.audience and self.audience not in (status.audiences or ()):
            return None
        user = status.user
        account = user.username.removeprefix("system:serviceaccount:")
        extra = tuple((name, tuple(values)) for name, values in sorted((user.extra or {}).items()))
        namespace = account.partition(":")[0] if account != user.username else ""
        return Caller(user.username, tuple(user.groups or ()), extra, namespace)

    def _ask(self, caller: Caller, namespace: str) -> bool:
        # Who may create workflows in a namespace may run any program there.
        review = {
            "metadata": {"namespace": namespace},
            "spec": {
                "resourceAttributes": {
                    "group": "argoproj.io",
                    "resource": "workflows",
                    "verb": "create",
                    "namespace": namespace,
                },
                "user": caller.user,
                "groups": list(caller.groups),
                "extra": {name: list(values) for name, values in caller.extra},
            },
        }
        try:
            with translate_refusals(namespace):
                answer = self.authorization.create_namespaced_local_subject_access_review(
                    namespace, review, _request_timeout=30
                )
        except Refused:
            # The namespace does not exist, or the gateway has no permission in it.
            return False
        return bool(answer.status.allowed)


class TokenFile:
    """Access by one token, to the namespace ``local``."""

    def __init__(self, path: Path) -> None:
        """Read the token from a file, which is made if it does not exist.

        Raises UserError if it cannot be used, or others can read it.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            create_token_file(path, PREFIX)
            if path.stat().st_mode & 0o077:
                remedy = "others can read it: chmod 600, or choose another"
                raise UserError("--token-file", str(path), remedy)
            self.token = path.read_text().strip()
        except OSError as error:
            problem = f"cannot be used ({error.strerror})"
            raise UserError("--token-file", str(path), problem) from error
        if not self.token:
            raise UserError("--token-file", str(path), "is empty; remove it, and another is made")

    async def caller(self, token: str) -> Caller | None:
        # The time of a comparison must not tell how much of a token is right.
        is_valid = hmac.compare_digest(token.encode(), self.token.encode())
        return Caller(LOCAL, namespace=LOCAL) if is_valid else None

    def allowed(self, caller: Caller, namespace: str) -> bool:
        return namespace == LOCAL


Access = TokenReviews | TokenFile
"""Authentication and authorisation, each with `caller` and `allowed`."""


def token_of(headers: Any) -> str:
    """Read the bearer token of a request, or Tinker's key.

    Raises Refused (401) if it has none.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    token = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    if not token:
        raise Refused(401, "no token: send Authorization: Bearer TOKEN, or X-API-Key: TOKEN")
    return token
