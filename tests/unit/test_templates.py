"""Chat templates against transformers' own rendering, and what a hostile one may not do."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest
import tokenizer_samples as samples

from llmx.errors import LlmxError, RequestError, UsageError
from llmx.templates import ChatTemplate, sandbox
from llmx.tokenizer import load_tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = """{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}
    {% set system_message = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{% else %}
    {% set loop_messages = messages %}
    {% set system_message = '' %}
{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% set content = system_message + message['content'] if loop.index0 == 0 else message['content'] %}
    {% if message['role'] == 'user' %}
{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' -}}
    {% elif message['role'] == 'assistant' %}
{{- ' '  + content.strip() + ' ' + eos_token -}}
    {% endif %}
{% endfor %}"""
TRIMMED = "{% for message in messages %}[{{ message.role }}]{{ message.content | trim }}<|eot_id|>{% endfor %}"
TOOLS = """{{- bos_token }}
{%- set ns = namespace(found=false, text='') %}
{%- macro line(name, value='') -%}
  {{ name | upper }}: {{ value | trim }}
{% endmacro %}
{%- if tools is not none %}
{{- line('tools', value=tools | map(attribute='function') | map(attribute='name') | join(', ')) }}
{%- for tool in tools %}{{ tool | tojson(indent=2) }}{{ "\\n" }}{% endfor %}
{%- endif %}
{%- for message in messages if message.role != 'skip' %}
{%- if message.role == 'stop' %}{% break %}{% endif %}
{%- if loop.first %}{% set ns.found = true %}{% endif %}
{%- set ns.text = ns.text ~ message.role[0] %}
<|{{ message['role'] }}|>{% if message.tool_calls is defined %}
{%- for call in message.tool_calls %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}
{%- else %}{% generation %}{{ message.content }}{% endgeneration %}{% endif %}
{%- if not loop.last %}<|next {{ loop.index }}/{{ loop.length }}|>{% endif %}
{%- endfor %}
{{ ns.found }} {{ ns.text | length }} {{ "%s-%03d" | format("x", 7) }} {{ 'ab' * 2 }} {{ 2 ** 5 }} {{ documents }}
{%- for k, v in {'b': 1, 'a': 2} | dictsort %} {{ k }}={{ v }}{% endfor %}
{%- if thinking | default(false) %} think{% endif %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [
    {"role": "system", "content": "Be <b>brief</b> & 'kind'. "},
    {"role": "user", "content": '  Hi 🫠 "you" {{ bos_token }} {% raw %}\n'},
    {"role": "assistant", "content": "Hello. "},
    {"role": "user", "content": "客单价?"},
]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"q": "<é>", "n": [1, None, True]}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"q": "x"}}}


def oracle(source: str, messages: list[dict[str, Any]], **more: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=source, **SPECIALS, **more)
    return str(rendered[0])


@pytest.mark.parametrize("source", [CHATML, LLAMA2, TOOLS], ids=["chatml", "llama 2", "tools"])
@pytest.mark.parametrize("prompt", [True, False])
def test_a_conversation_renders_as_in_transformers(source, prompt) -> None:
    ours = ChatTemplate(source, SPECIALS).render(TALK, add_generation_prompt=prompt)
    assert ours == oracle(source, TALK, add_generation_prompt=prompt)
    assert "🫠" in ours


def test_tools_and_variables_render_as_in_transformers() -> None:
    talk = [*TALK, {"role": "skip", "content": ""}, {"role": "assistant", "tool_calls": [CALL]}, {"role": "stop"}]
    ours = ChatTemplate(TOOLS, SPECIALS).render(talk, add_generation_prompt=True, tools=[TOOL], thinking=True)
    assert ours == oracle(TOOLS, talk, add_generation_prompt=True, tools=[TOOL], thinking=True)
    assert 'look({"q": "x"})' in ours
    assert "TOOLS: look" in ours
    assert ours.endswith(" think<|assistant|>")


def test_the_answer_is_begun_unless_told_otherwise() -> None:
    template = ChatTemplate(CHATML, SPECIALS)
    assert template.render(TALK) == template.render(TALK, add_generation_prompt=True)
    assert template.render(TALK).endswith("<|im_start|>assistant\n")
    assert not template.render(TALK, add_generation_prompt=False).endswith("assistant\n")


@pytest.mark.parametrize("source", [CHATML, LLAMA2, TRIMMED], ids=["chatml", "llama 2", "trimmed"])
@pytest.mark.parametrize("content", ["Sure, here is", "Sure, \n", "", " x "])
def test_the_final_message_is_left_open_as_in_transformers(source, content) -> None:
    talk = [*TALK, {"role": "assistant", "content": content}]
    ours = ChatTemplate(source, SPECIALS).render(talk, continue_final_message=True)
    assert ours == oracle(source, talk, continue_final_message=True)
    assert ours.rstrip().endswith(content.strip())


def test_continuing_and_beginning_an_answer_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="exclude") as caught:
        ChatTemplate(CHATML, {}).render(TALK, add_generation_prompt=True, continue_final_message=True)
    assert caught.value.status == 400


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    template = ChatTemplate("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(RequestError, match="can't be continued"):
        template.render(TALK, continue_final_message=True)


def test_parts_of_text_are_joined_into_one() -> None:
    template = ChatTemplate(CHATML, {})
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}]
    assert template.render([{"role": "user", "content": parts}]) == template.render(
        [{"role": "user", "content": "Hi you"}]
    )


def test_an_empty_or_absent_content_is_taken() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {})
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None},
    ]
    assert template.render(talk) == "[a][][]"


def test_the_arguments_of_a_tool_call_reach_the_template_as_an_object() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.q }}", {})
    call = {"function": {"name": "f", "arguments": '{"q": "é"}'}}
    assert template.render([{"role": "assistant", "tool_calls": [call]}]) == "é"
    assert call["function"]["arguments"] == '{"q": "é"}'  # the caller's messages are left alone


def test_the_template_for_tools_is_taken_when_there_are_some() -> None:
    template = ChatTemplate("plain", {}, named={"tool_use": "with tools", "rag": "other"})
    assert template.render(TALK) == template.render(TALK, tools=[]) == "plain"
    assert template.render(TALK, tools=[TOOL]) == "with tools"


def test_the_date_is_todays() -> None:
    before = datetime.now().year
    year = ChatTemplate("{{ strftime_now('%Y') }}", {}).render(TALK)
    assert before <= int(year) <= datetime.now().year


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        {"role": "user"},
        [{}],
        ["hi"],
        [{"role": 1, "content": "x"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": {"type": "text", "text": "x"}}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": object}],
        [{"role": "user", "tool_calls": ["x"]}],
        [{"role": "user", "tool_calls": [{"function": {"arguments": "{"}}]}],
        [{"role": "user", "tool_calls": 5}],
    ],
    ids=repr,
)
def test_wrong_messages_are_the_requests_error(messages) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(CHATML, {}).render(messages)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_deeply_nested_values_are_refused() -> None:
    deep: Any = "x"
    for _ in range(500):
        deep = [deep]
    with pytest.raises(RequestError, match="64 deep"):
        ChatTemplate(CHATML, {}).render(TALK, extra=deep)


def test_what_the_template_refuses_is_told_with_its_words() -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(RequestError, match="roles must alternate"):
        ChatTemplate(LLAMA2, SPECIALS).render(talk)


@pytest.mark.parametrize("source", ["{{ messages[0].absent.more }}", "{{ 1 / 0 }}", "{{ messages[0].content + 1 }}"])
def test_a_template_that_trips_over_messages_is_the_requests_error(source) -> None:
    with pytest.raises(RequestError, match="can't render these messages"):
        ChatTemplate(source, {}).render(TALK)


@pytest.mark.parametrize("name", ["messages", "documents", "raise_exception", "range"])
def test_variables_may_not_replace_what_the_template_relies_on(name) -> None:
    template = ChatTemplate(CHATML, {})
    with pytest.raises(RequestError, match=name):
        template.render(TALK, **{name: "x"})


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ x",
        "{% endif %}",
        "{{ x | no_such_filter }}",
        "{% unknown %}",
        "{{ " + "(" * 3000,
        "x" * (2**20 + 1),
    ],
    ids=lambda source: source[:20],
)
def test_a_broken_template_is_one_sentence_when_it_is_first_used(source) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(UsageError, match="chat template") as caught:
        template.check()
    assert len(caught.value.message) < 500
    with pytest.raises(UsageError, match="chat template"):
        template.render(TALK)


# ---- hostile templates ------------------------------------------------------------------------------------

ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "attr filter": "{{ '' | attr('__class__') }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(range) }}",
    "format_map": "{{ '{a.__class__.__mro__}'.format_map({'a': 1}) }}",
    "namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "namespace argument": "{{ namespace(__init__=1) }}",
    "append": "{% set _ = messages.append(1) %}",
    "pop": "{% set _ = messages[0].pop('role') %}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "generator": "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "self": "{{ self.__init__.__globals__ }}",
    "lipsum": "{{ lipsum.__globals__ }}",
    "meter": "{{ _meter.__init__.__globals__ }}",
    "map attr": "{{ messages | map(attribute='__class__') | list }}",
    "strftime": "{{ strftime_now.__self__ }}",
}


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_a_template_reaches_nothing_of_python(source) -> None:
    try:
        text = ChatTemplate(source, {}).render(TALK, add_generation_prompt=False)
    except LlmxError:
        return
    assert text in ("", "[Undefined, Undefined, Undefined, Undefined]")  # what is forbidden can also be undefined


def nested(outer: str, inner: str, body: str = "") -> str:
    return f"{{% for a in {outer} %}}{{% for b in {inner} %}}{body}{{% endfor %}}{{% endfor %}}"


def grown(step: str, start: str = "'xx'", before: str = "") -> str:
    """`ns.s` set to `step` time and again."""
    turns = f"{{% for i in range(99) %}}{before}{{% set ns.s = {step} %}}{{% endfor %}}"
    return f"{{% set ns = namespace(s={start}) %}}{turns}"


MANY = "range(99999)"
GREEDY = {
    "long range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "nested loops": nested(MANY, MANY),
    "nested with loop": nested(MANY, MANY, "{% if loop.first %}{% endif %}"),
    "hidden meter": "{% set _meter = 1 %}" + nested(MANY, MANY),
    "loop over text": nested("'x' * 999999", "'x' * 999999"),
    "macro tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "macro without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "data output": "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "repeated text": "{{ 'x' * 999999999 }}",
    "repeated list": "{{ [0] * 999999999 }}",
    "repeated from the left": "{{ 999999999 * 'x' }}",
    "power": "{{ 9 ** 999999999 }}",
    "squared": grown("ns.s * ns.s", "9"),
    "doubled by +": grown("ns.s + ns.s"),
    "doubled by ~": grown("ns.s ~ ns.s"),
    "doubled by join": grown("[ns.s, ns.s] | join"),
    "doubled by .join": grown("''.join([ns.s, ns.s])"),
    "doubled by %": grown("'%s%s' % (ns.s, ns.s)"),
    "doubled by set": grown("b", before="{% set b %}{{ ns.s }}{{ ns.s }}{% endset %}"),
    "doubled by format": grown("'{0}{0}'.format(ns.s)"),
    "kept texts": grown("ns.s + ['x' * 8000000]", "[]"),
    "squared by replace": grown("ns.s.replace('x', ns.s)"),
    "squared by the replace filter": grown("ns.s | replace('x', ns.s)"),
    "squared by join": grown("(ns.s | list) | join(ns.s)"),
    "center": "{{ 'x' | center(999999999) }}",
    "ljust": "{{ 'x'.ljust(999999999) }}",
    "zfill": "{{ 'x'.zfill(999999999) }}",
    "indent": "{{ 'a\\nb' | indent(width=999999999) }}",
    "percent width": "{{ '%999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (999999999, 1) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "format width": "{{ '{:>999999999}'.format(1) }}",
    "batch": "{{ [1] | batch(999999999, 0) | list }}",
    "tojson": "{{ [1] | tojson(indent=999999999) }}",
}


@pytest.mark.parametrize("source", GREEDY.values(), ids=GREEDY)
def test_a_template_that_takes_too_much_is_stopped(source, monkeypatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    with pytest.raises(LlmxError, match=r"does not finish|broken"):
        ChatTemplate(source, {}).render(TALK)


def test_long_honest_conversations_are_within_the_bounds() -> None:
    talk = [{"role": "user" if n % 2 == 0 else "assistant", "content": "word " * 400} for n in range(1000)]
    assert len(ChatTemplate(TOOLS, SPECIALS).render(talk)) > 2_000_000
    assert len(ChatTemplate(LLAMA2, SPECIALS).render(talk)) > 1_900_000


# ---- where templates come from ----------------------------------------------------------------------------


def test_a_template_is_found_in_each_of_its_places(tmp_path) -> None:
    backend = samples.byte_level()
    named = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "tools of list"}]
    cases: list[tuple[Any, dict[str, str], str | None, str | None]] = [
        (None, {}, None, None),
        ("text", {}, "text", "text"),
        (named, {}, "list", "tools of list"),
        (named[1:], {}, "tools of list", "tools of list"),
        ("text", {"chat_template.jinja": "file"}, "file", "file"),
        ("text", {"additional_chat_templates/tool_use.jinja": "tools file"}, "text", "tools file"),
    ]
    for n, (entry, files, plain, with_tools) in enumerate(cases):
        config = {"bos_token": "<|begin|>"} | ({} if entry is None else {"chat_template": entry})
        folder = samples.save(backend, tmp_path / str(n), tokenizer_config=config)
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content)
        template = load_tokenizer(folder).template
        assert (template and template.render(TALK)) == plain
        assert (template and template.render(TALK, tools=[TOOL])) == with_tools


def test_a_gguf_brings_its_template_and_special_tokens() -> None:
    metadata = samples.gguf_metadata(
        samples.byte_level(), chat_template="{{ bos_token }}{{ eos_token }}", **{"chat_template.tool_use": "tools"}
    )
    template = load_tokenizer("model.gguf", metadata).template
    assert template is not None
    assert template.render(TALK) == "<|begin|><|end|>"
    assert template.render(TALK, tools=[TOOL]) == "tools"


def test_a_model_with_a_broken_template_can_still_be_loaded(tmp_path) -> None:
    folder = samples.save(samples.byte_level(), tmp_path, tokenizer_config={"chat_template": "{% for %}"})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("x")) == "x"
    assert tokenizer.template is not None
    with pytest.raises(UsageError, match="broken"):
        tokenizer.template.render(TALK)


def test_messages_are_data_and_never_template_code() -> None:
    text = ChatTemplate(CHATML, {}).render([{"role": "user", "content": "{{ 7 * 7 }}<&>"}])
    assert "{{ 7 * 7 }}<&>" in text
    assert json.dumps("<&>") in ChatTemplate("{{ messages[0].content | tojson }}", {}).render(
        [{"role": "user", "content": "<&>"}]
    )
