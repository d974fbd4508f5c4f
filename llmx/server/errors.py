"""OpenAI's error object, for every answer that isn't a success: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from llmx.errors import LlmxError, RequestError, UsageError
from llmx.server.admission import Overloaded
from llmx.server.generation import ClientGone

log = logging.getLogger("llmx.server")

INTERNAL = "Something went wrong inside the server; its log says what."
LONGEST = 1000  # characters of an error's message: it may quote a number or a name, never a whole request
RETRY_AFTER = 5  # seconds, where nothing better is known
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_object(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object: all four fields are there, `param` and `code` may be null."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    short = message if len(message) <= LONGEST else message[: LONGEST - 1] + "…"
    return {"error": {"message": short, "type": kind, "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and error object of what a handler raised. What isn't an `LlmxError` is a bug: its text stays in."""
    if not isinstance(error, LlmxError):
        return 500, error_object(INTERNAL, 500, code="internal_error")
    message = f"{error.message} Hint: {error.hint.removesuffix('.')}." if error.hint else error.message
    if isinstance(error, RequestError):
        return error.status, error_object(message, error.status, error.param, error.code)
    if isinstance(error, UsageError):
        return 400, error_object(message, 400)
    return 503, error_object(message, 503, code="engine_failed")


def refusal(error: Exception) -> Response:
    """The answer to a request whose handler raised `error`."""
    status, body = describe(error)
    headers = {}
    if status in (429, 503):
        headers["Retry-After"] = str(error.retry_after if isinstance(error, Overloaded) else RETRY_AFTER)
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 504:
        headers["X-Should-Retry"] = "false"  # OpenAI's clients would, though it would take as long again
    if status in (408, 503):
        headers["Connection"] = "close"
    return JSONResponse(body, status, headers)


def install(app: FastAPI) -> None:
    """Makes the application answer every failure with the error object, unknown routes and methods included."""

    async def known(request: Request, error: Exception) -> Response:
        return refusal(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message, code = str(error.detail), None
        if error.status_code == 404:
            message, code = "There is no such route; GET /openapi.json lists them.", "not_found"
        elif error.status_code == 405:
            message, code = f"This route does not take {request.method}.", "method_not_allowed"
        return JSONResponse(error_object(message, error.status_code, code=code), error.status_code, error.headers)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        name = str(error.errors()[0]["loc"][-1])[:100]
        return refusal(RequestError(f"{name} is not what this route takes.", param=name))

    app.add_exception_handler(LlmxError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ClientGone, gone)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, known)  # Starlette raises it again afterwards, for the log
