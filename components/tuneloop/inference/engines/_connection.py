"""Requests to a server of rollouts, this run's or somebody else's.

`Lost` says that another attempt may succeed, and `UserError` that the server would refuse it again.
The caller (`_client.Client`) decides when to ask again.

`inference/engines/endpoint.py` asks its own server in the same way.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from tuneloop.core.errors import Unavailable, UserError, shorten_text
from tuneloop.core.http import Response, Unanswered, is_transient, open_response
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.server_token import build_token_headers

Form = TypeVar("Form")
LATER = (409, 425)
"""Statuses after which another attempt may succeed, besides those of `core/http.py: is_transient`.

`inference/http_api.py` answers 409 where another version is served. A status that is in neither is
the user's mistake, and ends the stage.
"""


class Lost(Unavailable):
    """The server is away, closed the connection, or cannot answer now: a retry may succeed.

    Attributes:
        status: of the answer; None without one.
        sent: the request that was lost, with its limits of retries, where `endpoint.py` sets it.
    """

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.sent: JsonMapping | None = None


class Ended(BaseModel, strict=True):
    """Completions of one request that have ended, as a server's message has them."""

    index: int = Field(ge=0)
    completions: list[JsonObject] = Field(min_length=1)


@contextmanager
def open_answer(
    method: str,
    url: str,
    *,
    server: str,
    timeout_s: float,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[Response]:
    """Yield an answer with status 200.

    Args:
        method: of HTTP.
        url: of the request.
        server: its address in messages.
        timeout_s: seconds without a byte after which the server counts as dead.
        body: sent as JSON; none if None.
        headers: of the request; None: those with the run's token.
        check: called during the wait, which an error of it ends.

    Raises:
        Lost: no answer arrives, or it may be another one later.
        UserError: any other status.
    """
    try:
        with open_response(
            method,
            url,
            timeout_s=timeout_s,
            body=body,
            headers=build_token_headers() if headers is None else headers,
            check=check,
        ) as response:
            if response.status != 200:
                _refuse(response.status, response.read(), server)
            yield response
    except Unanswered as error:
        raise Lost(str(error)) from error


def _refuse(status: int, content: bytes, server: str) -> None:
    """Raise the error that fits a status other than 200."""
    text = " ".join(content.decode(errors="replace").split())
    # Our servers answer {"error": one line}. Of a proxy's HTML page, the beginning is shown.
    try:
        text = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        text = text[:300]
    # The token may just be rotated, so that one side has the old one. A wrong token ends with the
    # caller's patience.
    is_rotating = status == 401 and build_token_headers()
    if is_transient(status) or status in LATER or is_rotating:
        raise Lost(f"answers {status}: {text}", status)
    raise UserError("--endpoint", server, f"answers {status}: {text}")


def read_message(text: bytes) -> JsonObject:
    """Read a message: a JSON object.

    Raises:
        Lost: the text is no JSON object (a proxy's page, or half of a message), or reports an error
            of the server.
    """
    try:
        message = json.loads(text)
    except ValueError as error:
        raise Lost(f"{type(error).__name__}: {error}") from error
    # Another program at this address may answer with a number or a list.
    if not isinstance(message, dict):
        raise Lost(f"answers {shorten_text(repr(message))}, which is no JSON object")
    if "error" in message:
        raise Lost(str(message["error"]))
    return message


def read_form(form: type[Form], fields: JsonMapping, server: str, advice: str) -> Form:
    """Read a part of an answer.

    Args:
        form: the class of the part.
        fields: its fields, as the server gives them.
        server: its address in messages.
        advice: what to do about another form.

    Raises:
        UserError: it has another form.
    """
    try:
        return form(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        problem = f"{field}: {first['input']!r}: {first['msg']}"
    except TypeError as error:
        problem = str(error)
    raise UserError("--endpoint", server, f"answers in another form ({problem}); {advice}")


def read_messages(response: Response) -> Iterator[JsonObject]:
    """Yield the messages of an answer, one a line; an empty line is only a sign of life."""
    for line in filter(bytes.strip, response.lines()):
        yield read_message(line)
