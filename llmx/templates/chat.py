"""Chat templates: Jinja2 as transformers renders it, in a sandbox, with bounds on time and size.

Templates come from model files, never from requests. The bounds stop runaway loops and the usual ways to make huge
texts; a template built to burn time inside a single operation of Python's could still do so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
import jinja2.meta
from jinja2.exceptions import SecurityError

from llmx.errors import LlmxError, RequestError, UsageError
from llmx.templates.sandbox import METER, Environment, Meter, Refusal, TooMuch

MAX_SOURCE = 1 << 20  # characters of a template
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
_PROBE_CALL = {"name": "probe", "arguments": {"key": "value"}}
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # stands at the end of the message that is continued; cut off again


class ChatTemplate:
    """A model's chat template.

    source: Jinja2. specials: `bos_token`, `eos_token` and the like, as the template names them. named: further
    templates; `tool_use` is taken when there are tools. The source is compiled when it is first used, so a model with a
    broken template can still complete plain prompts; `check()` compiles it now.
    """

    def __init__(self, source: str, specials: Mapping[str, str], *, named: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.specials = dict(specials)
        self.named = {name: ChatTemplate(other, specials) for name, other in (named or {}).items()}

    def check(self) -> None:
        """UsageError if the template is too large or no Jinja2."""
        _ = self._compiled

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if not isinstance(self.source, str) or len(self.source) > MAX_SOURCE:
            size = f"{len(self.source)} characters" if isinstance(self.source, str) else type(self.source).__name__
            raise UsageError(f"The model's chat template ({size}) must be a text of at most {MAX_SOURCE} characters.")
        try:
            return Environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(f"The model's chat template is broken in line {error.lineno}: {error.message}") from None
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, OverflowError) as error:
            raise UsageError(f"The model's chat template is broken: {_short(error)}.") from None

    @property
    def for_tools(self) -> ChatTemplate:
        """The one of the model's templates that `render` takes where there are tools."""
        return self.named.get("tool_use", self)

    @cached_property
    def variables(self) -> frozenset[str]:
        """What the template reads from outside, such as `messages` and `tools`. UsageError if it is broken."""
        self.check()
        return frozenset(jinja2.meta.find_undeclared_variables(Environment().parse(self.source)))

    @cached_property
    def text_arguments(self) -> bool:
        """Whether the template wants a tool call's arguments as JSON text: it fails on an object and takes the text."""
        return not self._takes_call(_PROBE_CALL) and self._takes_call({**_PROBE_CALL, "arguments": "{}"})

    def _takes_call(self, function: Mapping[str, Any]) -> bool:
        call = {"id": "probe0000", "type": "function", "function": dict(function)}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        values = {**self.specials, "messages": [{"role": "user", "content": "x"}, answer], "tools": None}
        try:
            self._run({**values, "documents": None, "add_generation_prompt": False})
        except LlmxError:
            return False
        return True

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for a conversation, special tokens (also BOS, where the template has it) written out.

        messages: `{"role": ..., "content": ...}`. A content that is a list of `{"type": "text", "text": ...}` is joined
        with nothing in between; keys that are None are left out, and a tool call's `arguments` are parsed (see
        `text_arguments`), both as transformers and vLLM do. add_generation_prompt: begin the assistant's answer (None:
        unless the final message is continued). continue_final_message: leave the last message open. kwargs reach the
        template as variables.
        RequestError for messages that the template does not take, UsageError for a broken template.
        """
        if continue_final_message and add_generation_prompt:
            both = "continue_final_message and add_generation_prompt exclude each other."
            raise RequestError(both, param="continue_final_message")
        begin = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        if tools and "tool_use" in self.named:
            return self.named["tool_use"].render(messages, begin, continue_final_message, tools, **kwargs)
        taken = sorted((RESERVED | set(self._compiled.environment.globals)).intersection(kwargs))
        if taken:
            raise RequestError(f"A chat template variable may not be named {taken[0]}.", param="chat_template_kwargs")
        chat = [_plain_message(message, n) for n, message in enumerate(_listed(messages))]
        for n, message in enumerate(chat):
            for call in message.get("tool_calls") or ():
                _settle_arguments(call, f"messages[{n}]", self.text_arguments)
        final = _open_final(chat) if continue_final_message else ""
        values = {**self.specials, **_plain(kwargs), "tools": _plain(tools) or None, "documents": None}
        text = self._run({**values, "messages": chat, "add_generation_prompt": begin})
        return _cut_final(text, final) if continue_final_message else text

    def _run(self, values: dict[str, Any]) -> str:
        template = self._compiled
        meter = Meter()
        parts, size = [], 0
        try:
            for part in template.generate({**values, METER: meter}):
                parts.append(part)
                size += len(part)
                meter.output(size)
        except Refusal as error:
            raise RequestError(f"The chat template refuses these messages: {_short(error)}", param="messages") from None
        except TooMuch as error:
            raise RequestError(f"The chat template does not finish: {_short(error)}.", param="messages") from None
        except SecurityError as error:
            raise UsageError(f"The model's chat template does what templates may not: {_short(error)}.") from None
        except RecursionError:
            raise RequestError("The chat template does not finish: too deep a recursion.", param="messages") from None
        except Exception as error:  # whatever a template's expressions can raise on these messages
            reason = f"{type(error).__name__}: {_short(error)}"
            raise RequestError(f"The chat template can't render these messages ({reason}).", param="messages") from None
        return "".join(parts)


def _short(error: BaseException) -> str:
    return str(error)[:300]


# ---- messages ---------------------------------------------------------------------------------------------


def _listed(messages: Any) -> list[Any]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list of at least one message.", param="messages")
    return list(messages)


def _plain_message(message: Any, n: int) -> dict[str, Any]:
    where = f"messages[{n}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} must be an object with a text as role.", param="messages")
    plain = {str(key): _plain(value) for key, value in message.items() if value is not None}
    if "content" in plain:
        plain["content"] = _content(plain["content"], where)
    calls = plain.get("tool_calls") or []
    if not isinstance(calls, list) or not all(
        isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls
    ):
        raise RequestError(f"{where}.tool_calls must be objects with a function.", param="messages")
    return plain


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a text or a list of parts.", param="messages")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            what = f"{where}.content has a part of type {str(kind)[:40]!r}; only text is taken."
            raise RequestError(what, param="messages")
        texts.append(part["text"])
    return "".join(texts)


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function"), dict)


def _settle_arguments(call: dict[str, Any], where: str, as_text: bool) -> None:
    """OpenAI's API carries a tool call's arguments as JSON text; most templates want the object."""
    function = call["function"]
    given = function.get("arguments")
    if isinstance(given, str):
        try:
            parsed = json.loads(given or "{}")
        except (ValueError, RecursionError):
            raise RequestError(f"{where}.tool_calls has arguments that are not JSON.", param="messages") from None
        function["arguments"] = (given or "{}") if as_text else parsed
    elif as_text and given is not None:
        function["arguments"] = json.dumps(given, ensure_ascii=False)


def _plain(value: Any, depth: int = 0) -> Any:
    """A copy made of JSON's types: a template sees no object with methods of its own."""
    if depth > 64:
        raise RequestError("The messages or template variables are nested more than 64 deep.", param="messages")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    raise RequestError(f"A chat template takes plain values only, not {type(value).__name__}.", param="messages")


def _open_final(chat: list[dict[str, Any]]) -> str:
    content = chat[-1].get("content")
    if content is None:
        raise RequestError("continue_final_message needs a last message with content.", param="continue_final_message")
    chat[-1]["content"] = f"{content}{_CONTINUED}"
    return str(content)


def _cut_final(text: str, final: str) -> str:
    """The rendered text up to the end of the last message's content; a template may have trimmed the space after it."""
    at = text.rfind(_CONTINUED.strip())
    if at < 0 or final.strip() not in text:
        raise RequestError(
            "The chat template does not write out the last message, so it can't be continued.",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(_CONTINUED, at) else text[:at].rstrip()
