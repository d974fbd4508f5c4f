"""Tool calls and thoughts over HTTP, with openai's client: in every format, plain and streamed, there and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from server import tool_templates as templates
from server.running import Running, running
from server.scripted import NAMES, ScriptedLLM

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CITY = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
USER = {"role": "user", "content": "What is 2 + 3, and how is the weather in Zürich?"}
TWO = [("add", '{"a": 2, "b": 3}'), ("get_weather", '{"city": "Zürich"}')]
OBJECTS = ['{"name": "add", "arguments": {"a": 2, "b": 3}}', '{"name": "get_weather", "arguments": {"city": "Zürich"}}']
LLAMA = OBJECTS[0].replace("arguments", "parameters")
FORMATS = [
    ("hermes", templates.HERMES, "Let me see.\n" + "\n".join(f"<tool_call>\n{o}\n</tool_call>" for o in OBJECTS), 2),
    ("llama3_json", templates.LLAMA, LLAMA, 1),
    ("llama3_json", templates.LLAMA, f"<|python_tag|>{LLAMA}<|eot_id|>", 1),
    ("mistral", templates.MISTRAL, f"[TOOL_CALLS] [{', '.join(OBJECTS)}]", 2),
    ("mistral", templates.MISTRAL_NEW, "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in TWO), 2),
    ("granite", templates.GRANITE, f"<|tool_call|>[{', '.join(OBJECTS)}]<|end_of_text|>", 2),
    ("phi4_mini", templates.PHI, f"<|tool_call|>[{', '.join(OBJECTS)}]<|/tool_call|>", 2),
]
IDS = ["hermes", "llama bare", "llama tagged", "mistral list", "mistral names", "granite", "phi"]


@contextmanager
def serving(template: str, *says: str, **settings: Any) -> Iterator[tuple[OpenAI, ScriptedLLM, Running]]:
    llm = ScriptedLLM(template, templates.SPECIALS.get(template, ()))
    llm.says = list(says)
    with (
        running(llm, queued_tokens=10**6, **settings) as server,
        OpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        yield client, llm, server


def ask(client: OpenAI, messages: Any = (USER,), tools: Any = (ADD, CITY), **more: Any) -> Any:
    return client.chat.completions.create(model="fake", messages=list(messages), tools=list(tools), **more)


def gather(stream: Any) -> tuple[str, list[tuple[str, str]], list[str | None], str]:
    """(content, calls, finish reasons, thoughts) of a stream, each chunk checked against OpenAI's rules."""
    content, thoughts, calls, reasons = "", "", [], []
    for chunk in stream:
        if not chunk.choices:
            continue
        (choice,) = chunk.choices
        delta = choice.delta
        content += delta.content or ""
        thoughts += getattr(delta, "reasoning_content", None) or ""
        assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
        for call in delta.tool_calls or ():
            if call.index == len(calls):
                assert re.fullmatch(r"call_\w{20,}", call.id)
                assert call.type == "function"
                calls.append((call.function.name, call.function.arguments))
            else:
                assert (call.id, call.type, call.function.name) == (None, None, None)
                assert call.index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + call.function.arguments)
        if choice.finish_reason:
            reasons.append(choice.finish_reason)
    return content, calls, reasons, thoughts


def called(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


@pytest.mark.parametrize(("name", "template", "text", "count"), FORMATS, ids=IDS)
def test_calls_are_answered_plain_and_streamed(name: str, template: str, text: str, count: int) -> None:
    with serving(template, text) as (client, llm, server):
        assert server.server.service.dialect.format is not None
        choice = ask(client).choices[0]
        assert called(choice.message) == TWO[:count]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == ("Let me see." if name == "hermes" else None)
        ids = [call.id for call in choice.message.tool_calls]
        assert len(set(ids)) == count
        assert all(re.fullmatch(r"call_\w{20,}", id) for id in ids)
        content, calls, reasons, _ = gather(ask(client, stream=True))
        assert (content, calls, reasons) == (choice.message.content or "", TWO[:count], ["tool_calls"])
        assert all("add" in prompt for prompt in llm.prompts)


@pytest.mark.parametrize(("name", "template", "text", "count"), FORMATS, ids=IDS)
def test_a_format_can_be_named(name: str, template: str, text: str, count: int) -> None:
    plain = "{{ messages[0].content }}{{ tools | tojson }}"
    llm_template = templates.PHI if name == "phi4_mini" else plain
    llm = ScriptedLLM(llm_template, templates.SPECIALS[template])
    llm.says = [text]
    with running(llm, queued_tokens=10**6, tool_call_parser=name) as server:
        status, answer = server.post("chat/completions", {"messages": [USER], "tools": [ADD, CITY]})
    assert status == 200
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"


def test_a_call_that_is_cut_says_length() -> None:
    whole = len(FORMATS[0][2].encode())
    with serving(templates.HERMES, FORMATS[0][2]) as (client, _, _):
        for cut in range(1, whole + 2):
            choice = ask(client, max_tokens=cut).choices[0]
            content, calls, reasons, _ = gather(ask(client, max_tokens=cut, stream=True))
            message = choice.message
            assert choice.finish_reason == ("tool_calls" if cut > whole else "length")
            assert (message.content or "", called(message), [choice.finish_reason]) == (content, calls, reasons)
            assert "<tool_call>" not in content
            for (name, arguments), (right_name, right) in zip(calls, TWO, strict=False):
                assert name == right_name
                assert right.startswith(arguments.rstrip("\ufffd"))  # a character was cut too


def test_text_that_is_no_call_is_content() -> None:
    for text in ("No need.", "<tool_call>\noops\n</tool_call>", "a <tool_ca", '{"name": "add"}', " x \n"):
        with serving(templates.HERMES, text) as (client, _, _):
            choice = ask(client).choices[0]
            assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
            assert gather(ask(client, stream=True)) == (text, [], ["stop"], "")


def test_every_choice_has_its_own_calls() -> None:
    with serving(templates.HERMES, FORMATS[0][2]) as (client, _, _):
        answer = ask(client, n=2)
        assert [called(choice.message) for choice in answer.choices] == [TWO, TWO]
        ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
        assert len(set(ids)) == 4


def test_usage_and_special_tokens_are_as_without_tools() -> None:
    with serving(templates.GRANITE, "Hi<|end_of_text|> there") as (client, _, _):
        answer = ask(client)
        assert answer.choices[0].message.content == "Hi there"
        assert answer.usage.completion_tokens == len("Hi there") + 2
        shown = ask(client, extra_body={"skip_special_tokens": False})
        assert shown.choices[0].message.content == "Hi<|end_of_text|> there"


def test_no_calls_are_looked_for_where_none_are_wanted() -> None:
    text = FORMATS[0][2]
    with serving(templates.HERMES, text) as (client, llm, _):
        for more in ({"tools": []}, {"tool_choice": "none"}):
            choice = ask(client, **more).choices[0]
            assert (choice.message.content, choice.finish_reason) == (text, "stop")
            assert "# Tools" not in llm.prompts[-1]


def test_parallel_tool_calls_false_gives_one() -> None:
    with serving(templates.HERMES, FORMATS[0][2]) as (client, _, _):
        choice = ask(client, parallel_tool_calls=False).choices[0]
        assert called(choice.message) == TWO[:1]
        assert gather(ask(client, parallel_tool_calls=False, stream=True))[1] == TWO[:1]


# ---- there and back -----------------------------------------------------------------------------------------


def oracle(template: str, messages: list[dict[str, Any]], tools: list[Any] | None, **more: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        [messages], tools=tools, chat_template=template, add_generation_prompt=True, **NAMES, **more
    )
    return str(rendered[0])


def as_transformers_wants(messages: list[dict[str, Any]], id: str | None = None) -> list[dict[str, Any]]:
    """The arguments as objects, and ids as this model wants them."""
    copied = json.loads(json.dumps(messages))
    for message in copied:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            call["id"] = id or call["id"]
        if id and "tool_call_id" in message:
            message["tool_call_id"] = id
        if message["content"] is None:
            message["content"] = ""
    return copied


@pytest.mark.parametrize(("name", "template", "text", "count"), FORMATS[:5], ids=IDS[:5])
def test_results_go_back_as_transformers_would_write_them(name: str, template: str, text: str, count: int) -> None:
    with serving(template, text, "It is 5.") as (client, llm, _):
        message = ask(client).choices[0].message
        answered = message.model_dump(exclude_none=True) | {"content": message.content}
        answered["tool_calls"] = answered["tool_calls"][:1]
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "5"}
        talk = [USER, answered, result]
        assert ask(client, messages=talk).choices[0].message.content == "It is 5."
        short = None
        if name == "mistral":
            found = re.search(r'"call_id": "(\w{9})"', llm.prompts[-1])
            assert found
            short = found[1]
        assert llm.prompts[0] == oracle(template, [USER], [ADD, CITY])
        assert llm.prompts[1] == oracle(template, as_transformers_wants(talk, short), [ADD, CITY])


def test_ids_that_mistral_takes_are_left_alone() -> None:
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    talk = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefgh1", "content": "5"},
    ]
    with serving(templates.MISTRAL, "Good.") as (client, llm, _):
        ask(client, messages=talk)
        assert '"id": "abcdefgh1"' in llm.prompts[0]
        assert '"call_id": "abcdefgh1"' in llm.prompts[0]


def test_a_template_that_wants_arguments_as_text_gets_text() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a":  1}'}}
    talk = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with serving(templates.TEXT_ARGUMENTS, "Good.") as (client, llm, _):
        ask(client, messages=talk)
    assert '{"name": "add", "arguments": {"a":  1}}' in llm.prompts[0]


def test_phi_gets_its_tools_in_the_system_message() -> None:
    with serving(templates.PHI, "Good.") as (client, llm, _):
        ask(client, messages=[{"role": "system", "content": "Be kind."}, USER], tools=[ADD])
        ask(client, tools=[ADD])
    function = json.dumps([ADD["function"]])
    assert llm.prompts[0].startswith(f"<|system|>Be kind.<|tool|>{function}<|/tool|><|end|><|user|>")
    assert llm.prompts[1].startswith(f"<|system|><|tool|>{function}<|/tool|><|end|><|user|>")


def test_smollm3_gets_its_tools_under_its_own_name() -> None:
    with serving(templates.SMOL, "<think>Hm.</think>" + FORMATS[0][2]) as (client, llm, _):
        message = ask(client).choices[0].message
    assert (message.reasoning_content, message.content, called(message)) == ("Hm.", "Let me see.", TWO)
    assert llm.prompts == [oracle(templates.SMOL, [USER], None, xml_tools=[ADD, CITY])]


def test_the_prompt_is_the_one_that_tokenize_counts() -> None:
    with serving(templates.HERMES, "Good.") as (client, _, server):
        usage = ask(client).usage
        status, counted = server.call("POST", "/tokenize", {"messages": [USER], "tools": [ADD, CITY]})
    assert status == 200
    assert counted["count"] == usage.prompt_tokens


def test_the_template_for_tools_tells_the_format() -> None:
    llm = ScriptedLLM("{{ messages[0].content }}", named={"tool_use": templates.HERMES})
    llm.says = [FORMATS[0][2]]
    with running(llm, queued_tokens=10**6) as server:
        status, answer = server.post("chat/completions", {"messages": [USER], "tools": [ADD, CITY]})
    assert status == 200
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 2


# ---- what is refused ----------------------------------------------------------------------------------------


def named(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **more}}


def after(**message: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": "assistant"} | message]}


DEEP: dict[str, Any] = {"type": "object"}
for _ in range(40):
    DEEP = {"type": "object", "properties": {"x": DEEP}}
ODD = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{oops"}}


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"tools": "x"}, "tools", "list"),
        ({"tools": [5]}, "tools", "tools.0"),
        ({"tools": [{"type": "function"}]}, "tools", "tools.0"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools.0"),
        ({"tools": [named() | {"type": "custom"}]}, "tools", "tools.0"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "tools.0.function.name"),
        ({"tools": [named(name="a b")]}, "tools", "tools.0.function.name"),
        ({"tools": [named(name="a\n")]}, "tools", "tools.0.function.name"),
        ({"tools": [named(name="x" * 65)]}, "tools", "tools.0.function.name"),
        ({"tools": [named(), named()]}, "tools", "second time"),
        ({"tools": [named(name=f"f{n}") for n in range(129)]}, "tools", "128"),
        ({"tools": [named(description=5)]}, "tools", "description"),
        ({"tools": [named(strict="yes")]}, "tools", "strict"),
        ({"tools": [named(parameters=[])]}, "tools", "parameters"),
        ({"tools": [named(parameters={"type": "string"})]}, "tools", "parameters"),
        ({"tools": [named(parameters=DEEP)]}, "tools", "deep"),
        ({"tools": [named(parameters={"type": "object", "description": "x" * 70_000})]}, "tools", "bytes"),
        ({"tools": [ADD], "tool_choice": "always"}, "tool_choice", "required"),
        ({"tools": [ADD], "tool_choice": 5}, "tool_choice", "required"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice", "function"),
        ({"tools": [ADD], "tool_choice": named(name="sub")}, "tool_choice", "'sub'"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [ADD], "parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
        ({"functions": [ADD["function"]]}, "functions", "tools"),
        ({"function_call": {"name": "add"}}, "function_call", "tool_choice"),
        (after(tool_calls=[ODD]), "messages.1.tool_calls.0.function.arguments", "JSON"),
        (after(tool_calls=[{**ODD, "id": 5}]), "messages.1.tool_calls.0.id", "string"),
        (after(tool_calls=[5]), "messages.1.tool_calls.0", "function"),
        (after(tool_calls=5), "messages.1.tool_calls", "list"),
        (after(role="tool", content="5"), "messages.1.tool_call_id", "required"),
        (after(role="tool", content="5", tool_call_id="a"), "messages.1.tool_call_id", "before"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_requests_are_refused_by_name(hermes: Running, fields: Any, param: str, word: str, stream: bool) -> None:
    status, answer = hermes.post("chat/completions", {"messages": [USER], "stream": stream} | fields)
    assert status == 400, answer
    assert answer["error"]["param"] == param
    assert word in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 500


@pytest.fixture(scope="module")
def hermes() -> Iterator[Running]:
    with serving(templates.HERMES, "Good.") as (_, _, server):
        yield server


def test_a_model_that_knows_no_tools_says_so() -> None:
    for template, word in (
        ("{{ messages[0].content }}", "takes no tools"),
        ("{{ messages[0].content }}{{ tools | tojson }}", "does not know how"),
    ):
        with serving(template, "x") as (client, _, _):
            with pytest.raises(BadRequestError, match=word):
                ask(client)
            assert ask(client, tool_choice="none").choices[0].message.content == "x"


def test_tools_can_be_switched_off() -> None:
    with (
        serving(templates.HERMES, "x", tool_call_parser="off") as (client, _, _),
        pytest.raises(BadRequestError, match="switched off"),
    ):
        ask(client)


# ---- thoughts -----------------------------------------------------------------------------------------------

THOUGHT = "<think>\nTwo and three…\n</think>\n\n"


@pytest.mark.parametrize(
    ("template", "text"),
    [(templates.THINKING, THOUGHT), (templates.ALWAYS_THINKING, THOUGHT.removeprefix("<think>\n"))],
)
def test_thoughts_come_apart_from_the_answer(template: str, text: str) -> None:
    with serving(template, text + "It is 5.", text + FORMATS[0][2]) as (client, _, _):
        answer = ask(client)
        message = answer.choices[0].message
        assert (message.content, message.reasoning_content, message.reasoning) == ("It is 5.", *["Two and three…"] * 2)
        details = answer.usage.completion_tokens_details
        assert 0 < details.reasoning_tokens == len(text.removesuffix("\n\n").encode())
        message = ask(client).choices[0].message
        assert (message.content, called(message)) == ("Let me see.", TWO)
        assert message.reasoning_content == "Two and three…"
        stream = ask(client, stream=True, stream_options={"include_usage": True})
        assert gather(stream) == ("Let me see.", TWO, ["tool_calls"], "Two and three…")


def test_a_limit_on_tokens_counts_thoughts_and_answer() -> None:
    with serving(templates.THINKING, THOUGHT + "It is 5.") as (client, _, _):
        answer = client.chat.completions.create(model="fake", messages=[USER], max_completion_tokens=12)
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.content is None
        assert answer.usage.completion_tokens_details.reasoning_tokens <= answer.usage.completion_tokens == 12


def test_thoughts_are_left_in_the_text_where_they_are_not_looked_for() -> None:
    with serving(templates.HERMES, THOUGHT + "Yes.") as (client, _, _):
        assert ask(client).choices[0].message.content == THOUGHT + "Yes."
        assert ask(client).usage.completion_tokens_details is None
    with serving(templates.THINKING, THOUGHT + "Yes.", reasoning_parser="off") as (client, _, _):
        assert ask(client).choices[0].message.content == THOUGHT + "Yes."


def test_a_prompt_that_ends_the_thoughts_leaves_the_answer_alone() -> None:
    with serving(templates.THINKING, "It is 5.") as (client, llm, _):
        message = ask(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0].message
        assert llm.prompts[0].endswith("<think>\n\n</think>\n\n")
        assert message.content == "It is 5."
        assert not hasattr(message, "reasoning_content")
