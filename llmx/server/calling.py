"""The tools of a chat request, and the calls in its messages, checked before anything is made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llmx.errors import RequestError
from llmx.grammar import schema_text
from llmx.server.callgrammar import Wish

MOST_TOOLS, MOST_CALLS = 128, 128
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
CHOICES = ("none", "auto", "required")

PARAMETERS: dict[str, Any] = {"type": "object"}
FUNCTION: dict[str, Any] = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}
TOOL: dict[str, Any] = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": FUNCTION},
}
TOOLS = {"anyOf": [{"type": "array", "items": TOOL, "maxItems": MOST_TOOLS}, {"type": "null"}]}
NAMED = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
}
CHOICE = {"anyOf": [{"enum": list(CHOICES)}, NAMED, {"type": "null"}]}


def read_tools(given: Any) -> list[dict[str, Any]]:
    """The definitions, as they came. RequestError naming the one that is wrong."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise _wrong("tools", "must be a list of tools")
    if len(given) > MOST_TOOLS:
        raise RequestError(f"There are {len(given)} tools; at most {MOST_TOOLS} are allowed.", param="tools")
    names: set[str] = set()
    for n, tool in enumerate(given):
        name = _read_tool(tool, f"tools.{n}")
        if name in names:
            raise _wrong(f"tools.{n}.function.name", f"is {name!r} a second time; names must differ")
        names.add(name)
    return given


def _read_tool(tool: Any, where: str) -> str:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise _wrong(where, 'must be {"type": "function", "function": {…}}')
    function, where = tool["function"], f"{where}.function"
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _wrong(f"{where}.name", "must be 1 to 64 letters, digits, underscores and dashes")
    for key, kind, what in (("description", str, "a string"), ("strict", bool, "true or false")):
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise _wrong(f"{where}.{key}", f"must be {what}")
    parameters = function.get("parameters")
    if parameters is not None:
        where = f"{where}.parameters"
        if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
            raise _wrong(where, "must be a JSON schema of an object")
        schema_text(parameters, param="tools")  # for its caps
    return name


def wish_for(tools: Sequence[dict[str, Any]], choice: Any, several: bool | None) -> Wish:
    """What is wanted with `tools`. RequestError where `tool_choice` is not one of its forms, or has no such tool."""
    if isinstance(choice, dict):
        inner = choice.get("function")
        name = inner.get("name") if isinstance(inner, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            raise _wrong("tool_choice", _FORMS)
        chosen = tuple(tool for tool in tools if tool["function"]["name"] == name)
        if not chosen:
            raise RequestError(f"tool_choice names {name[:64]!r}, which is not among the tools.", param="tool_choice")
        return Wish(tuple(tools), chosen, must=True, several=False)
    if choice is not None and choice not in CHOICES:
        raise _wrong("tool_choice", _FORMS)
    if choice == "required" and not tools:
        raise RequestError("tool_choice is required, and there are no tools.", param="tool_choice")
    if choice == "none" or not tools:
        return Wish()
    strict = any(tool["function"].get("strict") for tool in tools)
    return Wish(tuple(tools), tuple(tools), choice == "required", several is not False, strict)


_FORMS = 'must be "none", "auto", "required" or {"type": "function", "function": {"name": "…"}}'


def check_calls(messages: Sequence[Mapping[str, Any]]) -> None:
    """The assistant's calls and the tools' answers to them. As OpenAI has it, an answer refers to a call before it.

    RequestError naming the message.
    """
    made: set[str] = set()
    for at, message in enumerate(messages):
        where = f"messages.{at}"
        if message["role"] == "assistant" and message.get("tool_calls") is not None:
            made.update(_read_calls(message["tool_calls"], f"{where}.tool_calls"))
        elif message["role"] == "tool":
            id = message.get("tool_call_id")
            if not isinstance(id, str):
                raise RequestError(f"{where}.tool_call_id is required.", param=f"{where}.tool_call_id")
            if id not in made:
                raise _wrong(f"{where}.tool_call_id", "must be the id of a call in tool_calls of a message before it")


def _read_calls(calls: Any, where: str) -> list[str]:
    if not isinstance(calls, list) or len(calls) > MOST_CALLS:
        raise _wrong(where, f"must be a list of at most {MOST_CALLS} calls")
    for n, call in enumerate(calls):
        one = f"{where}.{n}"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise _wrong(one, 'must be {"id": "…", "type": "function", "function": {…}}')
        if not isinstance(call.get("id"), str) or not call["id"]:
            raise _wrong(f"{one}.id", "must be a string")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise _wrong(f"{one}.function.name", "must be a string")
        _read_arguments(function.get("arguments"), f"{one}.function.arguments")
    return [call["id"] for call in calls]


def _read_arguments(arguments: Any, where: str) -> None:
    try:
        if isinstance(arguments, str) and isinstance(json.loads(arguments or "{}"), dict):
            return
    except (ValueError, RecursionError):
        pass
    raise _wrong(where, "must be a string that holds a JSON object")


def _wrong(where: str, what: str) -> RequestError:
    """`param` is the request's own field for tools, and the message that is wrong for messages."""
    return RequestError(f"{where} {what}.", param="tools" if where.startswith("tools.") else where)
