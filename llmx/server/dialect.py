"""How a model writes calls and thoughts, by its chat template: what goes into a prompt, what comes out of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from llmx.errors import RequestError
from llmx.grammar import from_json_schema, validate
from llmx.server import tools
from llmx.server.answers import Answer
from llmx.server.callgrammar import Wish, Writer
from llmx.server.calls import Format, ToolParser
from llmx.server.thoughts import ThoughtParser, find_marks
from llmx.templates import ChatTemplate

if TYPE_CHECKING:
    from llmx.tokenizer import Tokenizer

TAIL = 16  # tokens of a prompt that may hold the mark that thoughts begin with
MOST_LOCATED = 16  # tools that are looked at one by one where together they are refused


class Dialect:
    """One per model. `format` and `marks` are None for a model that has no such thing, or where it is switched off.

    UsageError for parsers that don't exist.
    """

    def __init__(self, tokenizer: Tokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto") -> None:
        self._template = tokenizer.template if isinstance(tokenizer.template, ChatTemplate) else None
        source = self._template.for_tools.source if self._template else ""
        source = source if isinstance(source, str) else ""
        self._off = tool_parser == tools.OFF
        self.format: Format | None = tools.find(tool_parser, source)
        self.marks = find_marks(reasoning_parser, source)
        self._tokenizer = tokenizer
        self._specials = {tokenizer.token(token): token for token in sorted(tokenizer.special_ids)}

    def check(self) -> None:
        """RequestError if this model can't be given tools."""
        if self._off:
            raise RequestError("Tools are switched off on this server.", param="tools", code="unsupported_parameter")
        if self._template is None or not self._takes_tools(self._template):
            reason = "The model's chat template takes no tools."
        elif self.format is None:
            reason = "This server does not know how this model writes tool calls."
        else:
            return
        raise RequestError(reason, param="tools", code="unsupported_parameter")

    def _takes_tools(self, template: ChatTemplate) -> bool:
        own = self.format is not None and self.format.takes_tools
        return own or not {"tools", "xml_tools"}.isdisjoint(template.for_tools.variables)

    def arguments(self, messages: list[dict[str, Any]], functions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What the template gets because of tools; changes `messages` where the model wants them otherwise."""
        more = self.format.adapt(messages, functions) if self.format and self.format.adapt else {}
        if functions and self._template is not None:
            names = self._template.for_tools.variables
            name = "tools" if "tools" in names or "xml_tools" not in names else "xml_tools"  # SmolLM3's word for it
            more = {**more, name: list(functions)}
        return more

    def visible(self, wish: Wish) -> tuple[int, ...]:
        """Special tokens that the text must show for us to see them."""
        format = self.format if wish.functions else None
        marks = (*(self.marks or ()), *((*format.markers, *format.ends, *format.inside) if format else ()))
        return tuple(self._specials[mark] for mark in marks if mark in self._specials)

    def thinks(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt has begun the thoughts for the model."""
        if self.marks is None:
            return False
        return self._tokenizer.decode(prompt[-TAIL:], skip_special=False).rstrip().endswith(self.marks[0])

    @cached_property
    def _close(self) -> int | None:
        """The token that ends thoughts, if it is one."""
        if self.marks is None:
            return None
        ids = self._tokenizer.encode(self.marks[1], add_special=False)
        return ids[0] if len(ids) == 1 else None

    def answer(self, wish: Wish, thinks: bool, skip_special: bool) -> Answer:
        """A parser for one answer. thinks: see the method. skip_special: the text shows no special tokens."""
        thoughts = ThoughtParser(self.marks, thinks) if self.marks else None
        if not wish.functions or self.format is None:
            return Answer(thoughts, None, self._close)
        names = [tool["function"]["name"] for tool in wish.functions]
        hidden = frozenset(self._specials) if skip_special else frozenset()
        limit = 1 if self.format.single or not wish.several else None
        return Answer(thoughts, ToolParser(self.format, names, limit=limit, hidden=hidden), self._close)

    def grammar(self, wish: Wish, thinks: bool, answer: str | None) -> str | None:
        """What the text must follow; None: it is free. answer: what the answer must, apart from calls and thoughts.

        RequestError for tools whose schemas can't be used.
        """
        if wish.must or (wish.strict and answer is None):
            answer = None
        elif answer is None or not (wish.functions or self.marks):
            return answer
        written = Writer(self.format, self.marks, self._specials).write(wish, thinks, answer)
        if wish.allowed:
            try:
                validate(written, param="tools")
            except RequestError:
                for tool in wish.allowed[:MOST_LOCATED]:
                    _check_parameters(tool["function"])
                raise
        return written


def _check_parameters(function: Mapping[str, Any]) -> None:
    try:
        validate(from_json_schema(function.get("parameters") or {}))
    except RequestError as error:
        said = f"The parameters of {function['name']}: {error.message}"
        raise RequestError(said, param="tools", code=error.code, status=error.status, hint=error.hint) from None
