"""From the bytes of a request to a checked model of it: sizes, JSON and types, each refused with one short sentence."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from llmx.errors import RequestError

Body = TypeVar("Body", bound=BaseModel)
BODY_SECONDS = 60.0  # for a body to arrive
INLINE = 64 * 1024  # bytes; parsing more than this goes to a thread, so that streams aren't held up


async def read(request: Request, model: type[Body], limit: int) -> Body:
    """The JSON body as `model`. RequestError: 413 too large, 415 no JSON by its header, 408 too slow, 400 otherwise."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        # A web page may send anything but this to a local server without asking it first (CORS), so nothing else goes.
        raise RequestError(
            "The body must be JSON with the header Content-Type: application/json.", status=415, code="not_json"
        )
    try:
        async with asyncio.timeout(BODY_SECONDS):
            raw = await _body(request, limit)
    except TimeoutError:
        raise RequestError(
            f"The body did not come within {BODY_SECONDS:g} s.", status=408, code="body_too_slow"
        ) from None
    if len(raw) <= INLINE:
        return _parse(raw, model)
    return await asyncio.to_thread(_parse, raw, model)


async def _body(request: Request, limit: int) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise RequestError(f"The body is larger than {limit} bytes.", status=413, code="body_too_large")
        chunks.append(chunk)
    return b"".join(chunks)


def _parse(raw: bytes, model: type[Body]) -> Body:
    try:
        return model.model_validate_json(raw, strict=True)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> RequestError:
    """The first thing wrong, without the input: a wrong body of a few KB would otherwise come back as megabytes."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        said = first["msg"].removeprefix("Invalid JSON: ")
        return RequestError(f"The body is not valid JSON: {said}.", code="invalid_json")
    path = ".".join(str(part) for part in first["loc"])[:100]
    if not path:
        return RequestError("The body must be a JSON object.")
    if first["type"] == "missing":
        return RequestError(f"{path} is required.", param=path)
    said = first["msg"].replace("Input should", "must")
    return RequestError(f"{path} {said}." if said.startswith("must") else f"{path}: {said}.", param=path)
