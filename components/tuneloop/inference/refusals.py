"""Refusals of a server, and how an application of FastAPI answers with them: ``{"error": one line}``."""

import asyncio

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from tuneloop.core.component import convert_validation_error
from tuneloop.core.errors import Retryable, UserError

REFUSAL_S = 1.0
"""Seconds before a request without a valid token is answered, so that a connection cannot guess tokens faster."""


class Refused(RuntimeError):
    """The server refuses a request, with an HTTP `status` and one line."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        super().__init__(reason)


async def refuse_stranger(told: str) -> JSONResponse:
    """Answer 401 after `REFUSAL_S`, and close the connection; the rest of the request is not read."""
    await asyncio.sleep(REFUSAL_S)
    return JSONResponse({"error": told}, 401, {"WWW-Authenticate": "Bearer", "Connection": "close"})


def create_app(mistake: int) -> FastAPI:
    """Create an application that turns errors into answers: UserError with status `mistake`, Retryable with 503."""
    app = FastAPI(openapi_url=None, strict_content_type=False)

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        if isinstance(
            error, RequestValidationError
        ):  # its errors() are pydantic's, below the place in the request
            for found in error.errors():
                where = found["loc"][1:]
                found["loc"] = where if where and found["type"] != "json_invalid" else ("body",)
        if isinstance(error, ValidationError | RequestValidationError):
            error = convert_validation_error(error)  # type: ignore[arg-type]
        if isinstance(error, HTTPException):  # no such route, or another method
            error = Refused(
                error.status_code, f"{request.method} {request.url.path}: {error.detail}"
            )
        status = (
            error.status
            if isinstance(error, Refused)
            else mistake
            if isinstance(error, UserError)
            else 503
        )
        told = str(error).encode(errors="replace").decode()
        if status == 401:
            return await refuse_stranger(told)
        return JSONResponse({"error": told}, status, {"Retry-After": "1"} if status == 503 else {})

    for kind in (
        Refused,
        UserError,
        Retryable,
        ValidationError,
        RequestValidationError,
        HTTPException,
    ):
        app.add_exception_handler(kind, refuse)
    return app
