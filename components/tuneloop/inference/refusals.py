"""Refusals of a server, and how an application of FastAPI answers: ``{"error": one line}``.

`create_app` is the base of the rollout server (`inference/http_api.py`), the sandbox server and the
gateway (`extensions/gateway/app.py`, `extensions/gateway/worker.py`). Clients decide by the status
whether to retry (`core/http.py: is_transient`, `inference/engines/_connection.py: LATER`), and read
the key ``error`` (`inference/engines/_connection.py: _refuse`).
"""

import asyncio

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from tuneloop.core.component import convert_validation_error
from tuneloop.core.errors import Retryable, UserError

REFUSAL_S = 1.0
"""Seconds before a request without a valid token is answered.

A connection can guess tokens no faster. `extensions/gateway/access.py` waits as long.
"""


class Refused(RuntimeError):
    """The server refuses a request, with an HTTP `status` and one line."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        super().__init__(reason)


async def refuse_stranger(reason: str) -> JSONResponse:
    """Answer 401 after `REFUSAL_S`, and close the connection; the rest is not read."""
    await asyncio.sleep(REFUSAL_S)
    headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
    return JSONResponse({"error": reason}, 401, headers)


def create_app(mistake: int) -> FastAPI:
    """Create an application that turns errors into answers; Retryable is 503.

    An error of another class is answered with 500 by FastAPI; one that callers cause has to be
    among the `kinds` below.

    Args:
        mistake: the status of UserError, which errors of validation become: 400 of the rollout and
            the sandbox server, 422 of the gateway.
    """
    # Clients that send JSON without its content type are served, too.
    app = FastAPI(openapi_url=None, strict_content_type=False)

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RequestValidationError):
            _shorten_places(error)
        if isinstance(error, ValidationError | RequestValidationError):
            error = convert_validation_error(error)  # type: ignore[arg-type]
        status = 503
        reason = str(error)
        if isinstance(error, Refused):
            status = error.status
        elif isinstance(error, UserError):
            status = mistake
        elif isinstance(error, HTTPException):
            # There is no such route, or it has another method.
            status = error.status_code
            reason = f"{request.method} {request.url.path}: {error.detail}"
        # A reason may quote half a character of the request.
        reason = reason.encode(errors="replace").decode()
        if status == 401:
            return await refuse_stranger(reason)
        headers = {"Retry-After": "1"} if status == 503 else {}
        return JSONResponse({"error": reason}, status, headers)

    kinds = (
        Refused,
        UserError,
        Retryable,
        ValidationError,
        RequestValidationError,
        HTTPException,
    )
    for kind in kinds:
        app.add_exception_handler(kind, refuse)
    return app


def _shorten_places(error: RequestValidationError) -> None:
    """Make the paths of pydantic's errors begin below the body of the request."""
    for problem in error.errors():
        # In text that is not JSON, pydantic's path is the number of a character.
        is_json = problem["type"] != "json_invalid"
        path = problem["loc"][1:]
        problem["loc"] = path if path and is_json else ("body",)
