"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, replace
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field, WithJsonSchema
from starlette.responses import Response

from llmx.core import Delta, Logprob
from llmx.errors import RequestError
from llmx.server.answers import Answer, Part
from llmx.server.callgrammar import Wish
from llmx.server.calling import CHOICE, read_tools, wish_for
from llmx.server.calls import Arguments, Begin, Content
from llmx.server.generation import Generation
from llmx.server.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from llmx.server.messages import TemplateFields, render
from llmx.server.parsing import read
from llmx.server.reply import Choice, Reply, respond
from llmx.server.sampling import SamplingFields
from llmx.server.service import Service

NEVER = {"type": "null", "deprecated": True}


class ChatRequest(SamplingFields, TemplateFields):
    """`max_completion_tokens` is the newer name of `max_tokens` and wins; without either: as many as fit."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tool_choice: Annotated[Any, WithJsonSchema(CHOICE)] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[Any, WithJsonSchema(NEVER)] = None
    function_call: Annotated[Any, WithJsonSchema(NEVER)] = None

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
    def wish(self) -> Wish:
        """What is wanted with the tools, all checked. Raises RequestError."""
        for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
            if getattr(self, old) not in (None, [], "none"):
                raise RequestError(
                    f"{old} is not supported any more; use {new}.", param=old, code="unsupported_parameter"
                )
        return wish_for(read_tools(self.tools), self.tool_choice, self.parallel_tool_calls)


@dataclass(frozen=True)
class Heard(Delta):
    """A delta and what its text was found to be."""

    parts: tuple[Part, ...] = ()


class ChatReply(Reply):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, generation: Generation, model: str, body: ChatRequest, texts: TokenTexts, answers: list[Answer]
    ) -> None:
        super().__init__(generation, model, include_usage=body.include_usage, usage_so_far=body.usage_so_far)
        self.wants_logprobs = bool(body.logprobs)
        self.texts = texts
        self.answers = answers
        self.ids = [f"call_{uuid.uuid4().hex[:24]}" for _ in answers]  # of each answer's calls, before their numbers

    def hear(self, index: int, delta: Delta) -> Delta:
        answer = self.answers[index]
        parts = answer.push(delta.text, delta.token_ids)
        reason = delta.finish_reason
        if reason is not None:
            parts += answer.finish(cut=reason == "length")
            reason = "tool_calls" if reason == "stop" and answer.calls else reason
        fields = {name: getattr(delta, name) for name in Delta.__dataclass_fields__} | {"finish_reason": reason}
        return Heard(**fields, parts=tuple(parts))

    def _logprobs(self, logprobs: list[Logprob]) -> dict[str, Any] | None:
        return chat_logprobs(logprobs, self.texts) if self.wants_logprobs else None

    def whole(self, index: int, choice: Choice) -> dict[str, Any]:
        answer = self.answers[index]
        content = answer.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if not content and (answer.calls or answer.thinking):
            message["content"] = None
        if answer.thinking:
            message |= _thought(answer.thinking)
        if answer.calls:
            message["tool_calls"] = [
                {"id": self._id(index, n), "type": "function", "function": {"name": name, "arguments": arguments}}
                for n, (name, arguments) in enumerate(answer.calls)
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def pieces(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """A chunk for each part: clients look for either content or calls in one. The last has all the rest."""
        assert isinstance(delta, Heard), "deltas() makes them"
        said = [self._said(index, part) for part in delta.parts]
        if not said and not (delta.logprobs or delta.finish_reason or self.usage_so_far):
            return []
        shapes: list[dict[str, Any]] = [
            {"index": index, "delta": one, "logprobs": None, "finish_reason": None} for one in said or [{}]
        ]
        last = shapes[-1]
        last["logprobs"] = self._logprobs(list(delta.logprobs)) if delta.logprobs else None
        if delta.finish_reason:
            last |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
        return shapes

    def _said(self, index: int, part: Part) -> dict[str, Any]:
        """A part as a stream's delta has it."""
        match part:
            case Content(text):
                return {"content": text}
            case Begin(n, name):
                function = {"name": name, "arguments": ""}
                call = {"index": n, "id": self._id(index, n), "type": "function", "function": function}
                return {"tool_calls": [call]}
            case Arguments(n, text):
                return {"tool_calls": [{"index": n, "function": {"arguments": text}}]}
        return _thought(part.text)

    def _id(self, index: int, number: int) -> str:
        return f"{self.ids[index]}{number:x}"

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        if any(answer.may_think for answer in self.answers):
            thought = sum(answer.thinking_tokens for answer in self.answers)
            usage["completion_tokens_details"] = {"reasoning_tokens": min(thought, usage["completion_tokens"])}
        return usage

    def extra(self) -> dict[str, Any]:
        known = self.generation.streams[0].prompt_logprobs
        return {} if known is None else {"prompt_logprobs": prompt_logprobs(known, self.texts)}


def _thought(text: str) -> dict[str, str]:
    """SGLang's and llama.cpp's name for it, and vLLM's."""
    return {"reasoning_content": text, "reasoning": text}


async def chat(service: Service, request: Request) -> Response:
    """Checks everything, opens the generation, answers. Raises LlmxError before a byte is sent."""
    body = await read(request, ChatRequest, service.settings.max_body_bytes)
    service.check_model(body.model)
    alternatives = body.alternatives
    wish = await asyncio.to_thread(lambda: body.wish) if body.tools else body.wish
    params = await body.apart(lambda: body.sampling(service.defaults, logprobs=alternatives))
    prompt = await render(service, body, wish.functions)
    thinks = service.dialect.thinks(prompt)
    if wish.allowed or params.grammar:
        grammar = await asyncio.to_thread(service.dialect.grammar, wish, thinks, params.grammar)
        params = replace(params, grammar=grammar)
    params = replace(params, visible_special_ids=service.dialect.visible(wish))
    params = body.fitted(params, [prompt], service.llm.info.max_model_len)
    service.note_unknown(body)
    texts = TokenTexts(service.tokenizer, params.skip_special_tokens)
    generation = await service.open(request, "chatcmpl", [prompt], params, body.salt)
    answers = [service.dialect.answer(wish, thinks, params.skip_special_tokens) for _ in range(params.n)]
    reply = ChatReply(generation, service.model, body, texts, answers)
    return await respond(request, reply, bool(body.stream), service.settings.keep_alive_seconds)
