"""Calls that must come: a model of random weights has no choice but to write right ones, in its own format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError, OpenAI
from server import tool_templates as templates
from server.model import build
from server.running import Running, running
from server.scripted import ScriptedLLM
from server.test_tools import gather

from llmx.core import Request, SamplingParams
from llmx.engine.constraints import Grammars
from llmx.grammar import choice
from llmx.llm import LLM
from llmx.server.callgrammar import Wish
from llmx.server.dialect import Dialect

pytest.importorskip("llguidance", reason="structured output needs llguidance")

MARKS = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>", "</think>"]
COLOUR = {
    "type": "function",
    "function": {
        "name": "paint",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "colour": {"$ref": "#/$defs/colour"},
                "coats": {"type": "integer", "minimum": 1, "maximum": 3},
            },
            "required": ["colour", "coats"],
            "additionalProperties": False,
            "$defs": {"colour": {"enum": ["red", "dark green", "ö\"'"]}},
        },
    },
}
STOP = {
    "type": "function",
    "function": {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (COLOUR, STOP)}
USER = {"role": "user", "content": "x"}
FAMILIES = {
    "hermes": templates.HERMES,
    "llama": templates.LLAMA,
    "mistral list": templates.MISTRAL,
    "mistral names": templates.MISTRAL_NEW,
    "granite": templates.GRANITE,
    "phi": templates.PHI,
    "thinking": templates.THINKING,
    "always thinking": templates.ALWAYS_THINKING,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "marked", specials=MARKS, context=2048)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Callable[[str], Running]]:
    """Serves the model with the template of a family; one engine for all."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        llm = stack.enter_context(
            LLM(str(folder), dtype="float32", device="cpu", threads=1, max_num_seqs=8, kv_cache_bytes=32 * 2**20)
        )
        from llmx.templates import ChatTemplate

        def serve(family: str) -> Running:
            llm.tokenizer.template = ChatTemplate(FAMILIES[family], llm.tokenizer.template.specials)
            return stack.enter_context(running(llm))

        yield serve


def ask(client: OpenAI, **more: Any) -> Any:
    more = {"tools": [COLOUR, STOP], "max_tokens": 200, "temperature": 1.0} | more
    return client.chat.completions.create(model="marked", messages=[USER], **more)


def check(message: Any) -> None:
    for call in message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def wants(server: Running, mark: str, bias: int) -> dict[str, Any]:
    """Makes the model like a special token."""
    (token,) = server.server.service.tokenizer.encode(mark, add_special=False)
    return {"logit_bias": {str(token): bias}}


@pytest.mark.parametrize("family", ["hermes", "granite", "always thinking"])
def test_calls_that_must_come_are_right(served: Callable[[str], Running], family: str) -> None:
    server = served(family)
    more = {"tool_choice": "required", "parallel_tool_calls": False}
    if "thinking" in family:
        more |= wants(server, "</think>", 10)  # or it thinks on and on
    with OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        for seed in range(2 if family == "hermes" else 1):
            choice = ask(client, seed=seed, **more).choices[0]
            assert choice.finish_reason == "tool_calls"
            assert len(choice.message.tool_calls) == 1
            assert choice.message.content is None
            check(choice.message)
        (call,) = choice.message.tool_calls
        content, calls, reasons, _ = gather(ask(client, seed=seed, stream=True, **more))
        assert (content, calls, reasons) == ("", [(call.function.name, call.function.arguments)], ["tool_calls"])
        choice = ask(client, **more | {"tool_choice": {"type": "function", "function": {"name": "stop"}}}).choices[0]
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("stop", "{}")


@pytest.mark.parametrize(
    ("family", "end"),
    [("hermes", "<|end|>"), ("granite", "]")],
)
def test_several_calls_may_come(served: Callable[[str], Running], family: str, end: str) -> None:
    server = served(family)
    more = {"tools": [STOP], "tool_choice": "required", "max_tokens": 150}
    with OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        choice = ask(client, **more, **wants(server, end, -100)).choices[0]  # the first end is not taken
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert len(calls) > 1
    assert set(calls[:-1]) == {("stop", "{}")}
    assert choice.finish_reason == "length"


def test_llama_gets_one_call_as_its_template_demands(served: Callable[[str], Running]) -> None:
    server = served("llama")
    with OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        choice = ask(client, tools=[STOP], tool_choice="required", **wants(server, "<|end|>", -100)).choices[0]
    assert len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize(("family", "mark"), [("mistral names", "[TOOL_CALLS]")])
def test_a_strict_function_is_called_rightly_or_not_at_all(
    served: Callable[[str], Running], family: str, mark: str
) -> None:
    server = served(family)
    with OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        free = ask(client, max_tokens=20, seed=1, **wants(server, mark, -100)).choices[0]
        assert free.message.tool_calls is None
        more = {"tools": [COLOUR], "parallel_tool_calls": False, "max_tokens": 120} | wants(server, mark, 100)
        called = ask(client, seed=1, **more).choices[0]
        (call,) = called.message.tool_calls
        assert call.function.name == "paint"
        check(called.message)


class Follower:
    """What a grammar takes, a token after another, with no model."""

    def __init__(self, template: str) -> None:
        self.llm = ScriptedLLM(template, templates.SPECIALS.get(template, ()))
        self.dialect = Dialect(self.llm.tokenizer)
        self.grammars = Grammars(lambda: self.llm.tokenizer, self.llm.tokenizer.vocab_size)

    def takes(self, text: str, wish: Wish, thinks: bool = False, answer: str | None = None) -> bool:
        """Whether `text` may come, and may end there."""
        grammar = self.dialect.grammar(wish, thinks, answer)
        (end,) = self.llm.tokenizer.eos_ids
        params = SamplingParams(max_tokens=1, seed=0, grammar=grammar)
        state = self.grammars.start(Request("x", (0,), params, frozenset([end])))
        for token in self.llm.tokenizer.encode(text, add_special=False):
            if state.push(token) == "abort":
                return False
        (mask,) = state.after([[]])
        return mask is None or bool(mask[end])


PAINT = '{"colour": "dark green", "coats": 2}'
BLUE = PAINT.replace("dark green", "blue")
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "paint", "arguments": %s}\n</tool_call>\n'
    '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    "llama": '{"name": "paint", "parameters": %s}',
    "mistral list": '[TOOL_CALLS][{"name": "paint", "arguments": %s}, {"name": "stop", "arguments": {}}]',
    "mistral names": "[TOOL_CALLS]paint[ARGS]%s[TOOL_CALLS]stop[ARGS]{}",
    "granite": '<|tool_call|>[{"name": "paint", "arguments": %s}, {"name": "stop", "arguments": {}}]',
    "phi": '<|tool_call|>[{"name": "paint", "arguments": %s}]<|/tool_call|>',
}  # fmt: skip


@pytest.mark.parametrize("family", [*WRITTEN, "thinking", "always thinking"])
def test_grammars_take_what_the_format_is_and_nothing_else(family: str) -> None:
    follower = Follower(FAMILIES[family])
    text = WRITTEN[family if family in WRITTEN else "hermes"]
    tools = (COLOUR, STOP)
    must, free = Wish(tools, tools, must=True), Wish(tools, tools, strict=True)
    right, wrong = text % PAINT, text % BLUE
    thinks = family == "always thinking"
    before = "Hm <b>.\n</think>\n\n" if thinks else "<think>\nHm.\n</think>\n\n" if "thinking" in family else ""
    assert follower.takes(before + right, must, thinks)
    assert not follower.takes(before + wrong, must, thinks)
    assert not follower.takes(before + right[:-1], must, thinks)
    assert not follower.takes(before, must, thinks)
    assert not follower.takes(before + "No.", must, thinks)
    assert follower.takes(before + right, free, thinks)
    assert not follower.takes(before + wrong, free, thinks)
    assert follower.takes(before + "No <b>tools</b>.\n", free, thinks)
    only = Wish(tools, (STOP,), must=True, several=False)
    assert not follower.takes(before + right, only, thinks)
    answer = choice(["yes"])
    plain = Wish(tools, tools)
    assert follower.takes(before + "yes", plain, thinks, answer)
    assert follower.takes(before + right, plain, thinks, answer)
    assert not follower.takes(before + "No.", plain, thinks, answer)
    if before:
        assert follower.takes(before + "yes", Wish(), thinks, answer)
        assert follower.takes("yes", Wish(), thinks, answer) == (not thinks)


def test_schemas_that_no_grammar_can_follow_are_refused_by_name(served: Callable[[str], Running]) -> None:
    server = served("hermes")
    wrong = {"type": "object", "properties": {"x": {"type": "nothing"}}}
    tool = {"type": "function", "function": {"name": "odd", "parameters": wrong}}
    with OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        for more in (
            {"tool_choice": "required"},
            {"tools": [STOP, tool | {"function": tool["function"] | {"strict": True}}]},
        ):
            with pytest.raises(BadRequestError, match="The parameters of odd"):
                ask(client, **{"tools": [STOP, tool]} | more)
        assert ask(client, tools=[STOP, tool], max_tokens=1).choices[0].finish_reason == "length"


def test_an_answer_in_a_schema_may_still_be_a_call(served: Callable[[str], Running]) -> None:
    server = served("granite")
    shape = {"name": "x", "schema": {"enum": ["yes", "no"]}}
    more = {"response_format": {"type": "json_schema", "json_schema": shape}, "tools": [STOP], "max_tokens": 60}
    more["parallel_tool_calls"] = False
    with OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        called = ask(client, **more, **wants(server, "<|tool_call|>", 100)).choices[0]
        assert (called.finish_reason, called.message.content) == ("tool_calls", None)
        answered = ask(client, **more, **wants(server, "<|tool_call|>", -100)).choices[0]
        assert answered.finish_reason == "stop"
        assert json.loads(answered.message.content) in ("yes", "no")
