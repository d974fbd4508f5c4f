"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field, WithJsonSchema
from starlette.responses import Response

from llmx.core import Delta, SamplingParams
from llmx.errors import RequestError
from llmx.server.generation import Generation
from llmx.server.logprobs import CompletionLogprobs, TokenTexts, prompt_logprobs
from llmx.server.parsing import read
from llmx.server.reply import Choice, Reply, respond
from llmx.server.sampling import SamplingFields
from llmx.server.service import Service

MOST_PROMPTS = 1024
IDS = {"type": "array", "items": {"type": "integer"}}
FORMS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}},
    IDS,
    {"type": "array", "items": IDS},
]
Prompt = Annotated[Any, WithJsonSchema({"anyOf": FORMS})]


class CompletionRequest(SamplingFields):
    """`echo` puts the prompt in front of the text; with it `max_tokens` may be 0."""

    default_max_tokens = 16

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def prompt_only(self) -> bool:
        return bool(self.echo) and self.wanted_tokens == 0

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Checked parameters; `defaults` are the model's. RequestError.

        The engine always draws a token, so a prompt alone is a prompt and one token dropped.
        """
        more: dict[str, Any] = {"logprobs": self.logprobs}
        if self.prompt_only:
            more["max_tokens"] = 1
        if self.echo and self.logprobs is not None:
            more["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return self.sampling(defaults, **more)


def prompts(given: Any) -> list[str | list[int]]:
    """The four forms of a prompt as a list: text, texts, token ids, lists of token ids. Raises RequestError."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if _ids(given):
            return [given]
        if len(given) > MOST_PROMPTS:
            raise RequestError(f"prompt holds {len(given)} prompts, more than {MOST_PROMPTS}.", param="prompt")
        if all(isinstance(one, str) for one in given) or all(isinstance(one, list) and _ids(one) for one in given):
            return given
    raise RequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists, and not empty.",
        param="prompt",
    )


def _ids(given: Sequence[Any]) -> bool:
    return bool(given) and all(type(token) is int for token in given)  # True is no token id


class CompletionReply(Reply):
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        generation: Generation,
        model: str,
        body: CompletionRequest,
        texts: TokenTexts,
        given: list[str | list[int]],
    ) -> None:
        super().__init__(generation, model, include_usage=body.include_usage, usage_so_far=body.usage_so_far)
        self.body = body
        self.texts = texts
        self.given = given
        count = len(generation.streams) * generation.n
        self.logprobs = [CompletionLogprobs(texts) for _ in range(count)] if body.logprobs is not None else None

    def hear(self, index: int, delta: Delta) -> Delta:
        if self.body.prompt_only:
            return Delta(delta.index, "", (), finish_reason=delta.finish_reason and "length")
        return delta

    def _generated(self, index: int, delta: Delta) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        return self.logprobs[index].add([one.token for one in delta.logprobs or ()], delta.logprobs or ())

    def opening(self, index: int) -> dict[str, Any] | None:
        if not self.body.echo:
            return None
        at, lists = index // self.generation.n, None
        prompt = self.given[at]
        text = prompt if isinstance(prompt, str) else self.texts.tokenizer.decode(prompt)
        if self.logprobs is not None:
            stream = self.generation.streams[at]
            known = stream.prompt_logprobs
            assert known is not None, "they were asked for"
            lists = self.logprobs[index].add(stream.prompt_token_ids, self._as_asked(known))
        return {"index": index, "text": text, "logprobs": lists, "finish_reason": None}

    def _as_asked(self, known: Sequence[Any]) -> list[Any]:
        """Prompt log-probabilities with as many alternatives as `logprobs` says; `prompt_logprobs` may want more."""
        return [one and replace(one, top=one.top[: self.body.logprobs]) for one in known]

    def pieces(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        return [self.piece(index, delta)] if self.says(delta) else []

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        shape = {
            "index": index,
            "text": delta.text,
            "logprobs": self._generated(index, delta),
            "finish_reason": delta.finish_reason,
        }
        return shape | {"stop_reason": delta.stop_reason} if delta.finish_reason else shape

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        first = self.opening(index)
        all_of_it = Delta(index, choice.text, (), choice.finish_reason, choice.stop_reason, tuple(choice.logprobs))
        shape = self.piece(index, all_of_it) | {"stop_reason": choice.stop_reason}
        if first:
            shape["text"] = first["text"] + shape["text"]
            if self.logprobs is not None:
                shape["logprobs"] = {key: first["logprobs"][key] + more for key, more in shape["logprobs"].items()}
        known = self.generation.streams[index // self.generation.n].prompt_logprobs
        if self.body.prompt_logprobs is not None and known is not None:
            shape["prompt_logprobs"] = prompt_logprobs(known, self.texts)
        return shape


def _encoded(service: Service, given: list[str | list[int]]) -> list[list[int]]:
    return [service.encode(prompt) if isinstance(prompt, str) else prompt for prompt in given]


async def completions(service: Service, request: Request) -> Response:
    """Checks everything, opens the generation, answers. Raises LlmxError before a byte is sent."""
    body = await read(request, CompletionRequest, service.settings.max_body_bytes)
    service.check_model(body.model)
    given = prompts(body.prompt)
    params = await body.apart(lambda: body.params(service.defaults))
    encoded = await asyncio.to_thread(_encoded, service, given)
    params = body.fitted(params, encoded, service.llm.info.max_model_len)
    service.note_unknown(body)
    texts = TokenTexts(service.tokenizer, params.skip_special_tokens)
    generation = await service.open(request, "cmpl", encoded, params, body.salt, prompt_only=body.prompt_only)
    reply = CompletionReply(generation, service.model, body, texts, given)
    return await respond(request, reply, bool(body.stream), service.settings.keep_alive_seconds)
