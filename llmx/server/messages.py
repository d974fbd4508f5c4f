"""The chat request's `messages` and the template's extra arguments, checked before a template sees them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from llmx.errors import RequestError
from llmx.server.calling import TOOLS, check_calls, read_tools

if TYPE_CHECKING:
    from llmx.server.service import Service

MOST_MESSAGES = 2048
RESERVED = (
    *("messages", "conversation", "chat_template", "tools", "documents", "tokenize", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "continue_final_message", "add_generation_prompt"),
)
DEEPEST, MOST_NODES, MOST_CHARACTERS = 5, 128, 16 * 1024  # of chat_template_kwargs

TEXT_PARTS = {
    "type": "array",
    "items": {"type": "object", "properties": {"type": {"const": "text"}, "text": {"type": "string"}}},
}
Content = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, TEXT_PARTS, {"type": "null"}]})]


class Message(BaseModel):
    """One turn. What else it holds (`name`, `reasoning_content`, …) is handed to the template as it is."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class TemplateFields(BaseModel):
    """What the chat template gets."""

    messages: Messages
    tools: Annotated[Any, WithJsonSchema(TOOLS)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

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


async def render(service: Service, body: TemplateFields, tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
    """The token ids of a chat, by the model's template. `tools`: None: all that the request has. RequestError."""
    if tools is None:
        tools = await asyncio.to_thread(read_tools, body.tools)
    if tools:
        service.dialect.check()
    messages, arguments = plain(body.messages), body.template
    arguments |= service.dialect.arguments(messages, tools)
    return await asyncio.to_thread(service.render, messages, arguments)


def plain(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as the template takes them, each content a string. Raises RequestError naming the message."""
    turns = [{**message.model_dump(), "content": _text(message, at)} for at, message in enumerate(messages)]
    for turn in turns:
        if turn.get("reasoning") is not None:  # vLLM's word for what templates call reasoning_content
            turn.setdefault("reasoning_content", turn["reasoning"])
    check_calls(turns)
    return turns


def _text(message: Message, at: int) -> str:
    where, content = f"messages.{at}.content", message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant" and (message.model_extra or {}).get("tool_calls"):
            return ""
        raise RequestError(f"{where} is required.", param=where)
    if not isinstance(content, list) or not content:
        raise RequestError(f"{where} must be a string or a list of text parts.", param=where)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f'{where} may only hold parts like {{"type": "text", "text": "…"}}.', param=where)
    return "".join(part["text"] for part in content)


def template_kwargs(given: dict[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs` within bounds: they run through the template's loops. Raises RequestError."""
    name = "chat_template_kwargs"
    for key in given or {}:
        if key in RESERVED:
            raise RequestError(f"{name} may not set {key}.", param=name)
    nodes = _nodes(given or {}, 0)
    size = len(json.dumps(given)) if nodes <= MOST_NODES else 0
    if nodes > MOST_NODES or size > MOST_CHARACTERS:
        raise RequestError(f"{name} may hold {MOST_NODES} values and {MOST_CHARACTERS} characters at most.", param=name)
    return given or {}


def _nodes(value: Any, depth: int) -> int:
    if depth > DEEPEST:
        raise RequestError(f"chat_template_kwargs is nested more than {DEEPEST} deep.", param="chat_template_kwargs")
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(_nodes(child, depth + 1) for child in children)
