"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from llmx.core import Delta, Logprob
from llmx.errors import RequestError
from llmx.server.generation import Generation
from llmx.server.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from llmx.server.messages import TemplateFields, render
from llmx.server.parsing import read
from llmx.server.reply import Choice, Reply, respond
from llmx.server.sampling import SamplingFields
from llmx.server.service import Service


class ChatRequest(SamplingFields, TemplateFields):
    """`max_completion_tokens` is the newer name of `max_tokens` and wins; without either: as many as fit."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return super().wanted_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """`SamplingParams.logprobs`: None for no log-probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs goes with logprobs: true only.", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class ChatReply(Reply):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, generation: Generation, model: str, body: ChatRequest, texts: TokenTexts) -> None:
        super().__init__(generation, model, include_usage=body.include_usage, usage_so_far=body.usage_so_far)
        self.wants_logprobs = bool(body.logprobs)
        self.texts = texts

    def _logprobs(self, logprobs: list[Logprob]) -> dict[str, Any] | None:
        return chat_logprobs(logprobs, self.texts) if self.wants_logprobs else None

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        shape = {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(list(delta.logprobs)) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        return shape | {"stop_reason": delta.stop_reason} if delta.finish_reason else shape

    def extra(self) -> dict[str, Any]:
        known = self.generation.streams[0].prompt_logprobs
        return {} if known is None else {"prompt_logprobs": prompt_logprobs(known, self.texts)}


async def chat(service: Service, request: Request) -> Response:
    """Checks everything, opens the generation, answers. Raises LlmxError before a byte is sent."""
    body = await read(request, ChatRequest, service.settings.max_body_bytes)
    service.check_model(body.model)
    params = body.sampling(service.defaults, logprobs=body.alternatives)
    prompt = await render(service, body)
    service.note_unknown(body)
    texts = TokenTexts(service.tokenizer, params.skip_special_tokens)
    generation = await service.open(request, "chatcmpl", [prompt], params, body.salt)
    reply = ChatReply(generation, service.model, body, texts)
    return await respond(request, reply, bool(body.stream), service.settings.keep_alive_seconds)
