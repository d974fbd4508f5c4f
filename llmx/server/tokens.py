"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from llmx.errors import RequestError
from llmx.server.messages import Messages, TemplateFields, render
from llmx.server.parsing import read

if TYPE_CHECKING:
    from llmx.server.service import Service


class TokenizeRequest(TemplateFields):
    """Either `prompt` or `messages`. `add_special_tokens` is for prompts: of a chat, the template has the say."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]


async def tokenize(service: Service, request: Request) -> Response:
    """{count, max_model_len, tokens, token_strs} of a prompt or a chat. RequestError."""
    body = await read(request, TokenizeRequest, service.settings.max_body_bytes)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Exactly one of prompt and messages is needed.", param="prompt")
    if body.prompt is None:
        tokens = await render(service, body)
    else:
        special = body.add_special_tokens is not False
        tokens = await asyncio.to_thread(service.tokenizer.encode, body.prompt, add_special=special)
    shown = [service.tokenizer.token(token) for token in tokens] if body.return_token_strs else None
    answer = {"count": len(tokens), "max_model_len": service.llm.info.max_model_len, "tokens": tokens}
    return JSONResponse(answer | {"token_strs": shown})


async def detokenize(service: Service, request: Request) -> Response:
    """{prompt}: the text of token ids, special tokens written out. RequestError."""
    body = await read(request, DetokenizeRequest, service.settings.max_body_bytes)
    service.check_model(body.model)
    vocab = service.llm.info.vocab_size
    if outside := [token for token in body.tokens if token >= vocab]:
        raise RequestError(f"Token id {outside[0]} is outside the vocabulary of {vocab}.", param="tokens")
    text = await asyncio.to_thread(service.tokenizer.decode, body.tokens, skip_special=False)
    return JSONResponse({"prompt": text})
