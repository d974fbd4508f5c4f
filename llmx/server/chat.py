"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from llmx.core import Delta, Logprob
from llmx.errors import RequestError
from llmx.server.generation import Generation
from llmx.server.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from llmx.server.messages import Messages, plain, template_kwargs
from llmx.server.parsing import read
from llmx.server.reply import Choice, Reply, respond
from llmx.server.sampling import SamplingFields
from llmx.server.service import Service


class ChatRequest(SamplingFields):
    """`max_completion_tokens` is the newer name of `max_tokens` and wins; without either: as many as fit."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return super().wanted_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def alternatives(self) -> int | None:
        """`SamplingParams.logprobs`: None for no log-probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs goes with logprobs: true only.", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template(self) -> dict[str, Any]:
        """Arguments of the chat template. A continued message is not followed by a new turn."""
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other.", param="continue_final_message"
            )
        continued = bool(self.continue_final_message)
        opens = not continued if self.add_generation_prompt is None else self.add_generation_prompt
        kwargs = template_kwargs(self.chat_template_kwargs)
        return {**kwargs, "add_generation_prompt": opens, "continue_final_message": continued}


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
    params = body.sampling(logprobs=body.alternatives)
    messages, arguments = plain(body.messages), body.template
    prompt = await asyncio.to_thread(service.llm.render, messages, **arguments)
    generation = await service.open("chatcmpl", [prompt], params, body.salt)
    service.note_unknown(body)
    texts = TokenTexts(service.tokenizer, params.skip_special_tokens)
    return await respond(request, ChatReply(generation, service.model, body, texts), bool(body.stream))
