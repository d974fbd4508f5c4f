"""What else clients and issue trackers of other servers check: many at once, much at once, and too much."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI
from server.running import ENDLESS, Running, eventually, running
from server.scraping import scraped
from server.scripted import ScriptedLLM

from llmx.llm import LLM
from llmx.tokenizer import Tokenizer
from llmx.tokenizer.pieces import Spelling

USER = {"role": "user", "content": "Tell me."}


def test_the_table_of_behaviours_names_tests_that_exist() -> None:
    here = Path(__file__).parent
    table = (here / "README.md").read_text(encoding="utf-8")
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)] == list(range(1, 51))
    for line in table.splitlines():
        named = re.findall(r"`([\w./]+)::(\w+)`", line)
        assert named or not re.match(r"\| [\w./-]*\d", line), line
        for file, test in named:
            assert f"\ndef {test}(" in (here / file).read_text(encoding="utf-8"), (file, test)


def test_n_greedy_texts_are_equal(server: Running) -> None:
    body = {"prompt": "the", "temperature": 0, "n": 3, "max_tokens": 8, "ignore_eos": True}
    choices = server.post("completions", body)[1]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["text"] for choice in choices}) == 1


def test_n_drawn_texts_differ(server: Running) -> None:
    body = {"prompt": "the", "n": 4, "max_tokens": 12, "seed": 5, "ignore_eos": True}
    assert len({choice["text"] for choice in server.post("completions", body)[1]["choices"]}) == 4


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_echoed_prompts_times_n_come_in_order_of_their_index(server: Running, stream: bool) -> None:
    prompts = ["the quick", "a stitch in"]
    body = {"prompt": prompts, "n": 2, "echo": True, "max_tokens": 3, "logprobs": 1, "seed": 1, "ignore_eos": True}
    plain = server.post("completions", body)[1]["choices"]
    assert [choice["index"] for choice in plain] == [0, 1, 2, 3]
    for at, choice in enumerate(plain):
        assert choice["text"].startswith(prompts[at // 2])
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert None not in choice["logprobs"]["token_logprobs"][1:]
    if stream:
        texts = dict.fromkeys(range(4), "")
        for event in server.events("completions", body)[:-1]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert list(texts.values()) == [choice["text"] for choice in plain]


def test_a_text_that_can_not_fit_is_refused_before_its_tokens_are_counted(
    server: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object, **__: object) -> None:
        raise AssertionError("nobody has to count them")

    monkeypatch.setattr(llm.tokenizer, "encode", encode)
    text = "fox " * 500_000
    for path, body in (
        ("completions", {"prompt": text}),
        ("chat/completions", {"messages": [USER | {"content": text}]}),
    ):
        for stream in (False, True):
            status, answer = server.post(path, body | {"stream": stream})
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert "256" in answer["error"]["message"]
            assert len(answer["error"]["message"]) < 300


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": ["x"] * 1025}, "prompt"),
        ("completions", {"prompt": ["x"] * 600, "n": 2}, "n"),
        ("completions", {"prompt": "x", "logit_bias": {str(at): 1 for at in range(1025)}}, "logit_bias"),
        ("completions", {"prompt": "x", "cache_salt": "x" * 2000}, "cache_salt"),
        ("chat/completions", {"messages": [USER] * 2049}, "messages"),
        ("chat/completions", {"messages": [USER | {"role": 5}] * 2000}, "messages.0.role"),
        ("chat/completions", {"messages": [USER | {"content": [{"type": "x"}] * 5000}]}, "messages.0.content"),
        ("chat/completions", {"messages": [USER], "top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_too_much_is_refused_in_a_few_words(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    status, raw, _ = server.raw("POST", f"/v1/{path}", body)
    assert status == 400
    assert len(raw) < 1000
    assert f'"param":"{param}"'.encode() in raw


def test_deep_nesting_is_refused(server: Running) -> None:
    for depth in (70, 150, 5000):
        deep = b'{"messages": [{"role": "user", "content": "x", "extra": ' + b"[" * depth + b"]" * depth + b"}]}"
        assert server.raw("POST", "/v1/chat/completions", deep)[0] == 400
    assert server.post("chat/completions", {"messages": [USER], "max_tokens": 1})[0] == 200


def test_requests_of_all_kinds_at_once_get_what_each_gets_alone(server: Running) -> None:
    """Among them some that are refused, and clients that leave."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.1, "seed": 1},
        {"temperature": 0.7, "seed": 2, "top_p": 0.9, "extra_body": {"top_k": 20, "min_p": 0.01}},
        {"temperature": 0, "frequency_penalty": 1.5, "logprobs": 3},
        {"temperature": 1.0, "seed": 3, "logit_bias": {"7": 5}, "n": 2},
        {"temperature": 0, "stop": ["e"]},
        {"temperature": 0, "echo": True, "logprobs": 1},
        {"temperature": 7000},
        {"temperature": 0, "extra_body": {"stop_token_ids": [10**6]}},
    ]

    async def one(client: AsyncOpenAI, kind: dict[str, Any]) -> object:
        try:
            answer = await client.completions.create(model="tiny", prompt="the lazy dog", max_tokens=24, **kind)
        except APIStatusError as error:
            return error.status_code, error.body
        return [(choice.text, choice.finish_reason, choice.logprobs) for choice in answer.choices]

    async def leave(client: AsyncOpenAI) -> None:
        stream = await client.completions.create(model="tiny", prompt="a", max_tokens=200, stream=True)
        async for _ in stream:
            break
        await stream.close()

    async def everything() -> None:
        async with AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            alone = [await one(client, kind) for kind in kinds]
            leaving = [asyncio.create_task(leave(client)) for _ in range(6)]
            together = await asyncio.gather(*(one(client, kind) for kind in kinds * 4))
            await asyncio.gather(*leaving)
        assert together == alone * 4

    asyncio.run(everything())


def test_seeded_texts_are_equal_beside_others_without_a_seed(server: Running) -> None:
    asked: Any = {"model": "tiny", "prompt": "the", "max_tokens": 16, "extra_body": {"ignore_eos": True}}

    async def everything() -> tuple[list[str], list[str]]:
        async with AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
            made = [client.completions.create(**asked, **({"seed": 7} if at % 2 else {})) for at in range(16)]
            texts = [answer.choices[0].text for answer in await asyncio.gather(*made)]
        return texts[1::2], texts[::2]

    seeded, drawn = asyncio.run(everything())
    assert len(set(seeded)) == 1
    assert len({*drawn, *seeded}) == 9


def test_many_clients_that_leave_leave_nothing_running(endless: tuple[LLM, Running]) -> None:
    """Plain ones too: nothing shows that they have gone but their connection's end."""
    llm, server = endless
    body = {"prompt": "a stitch in time", "max_tokens": ENDLESS, "ignore_eos": True}
    for stream, begun in ((True, lambda got: b"data:" in got), (False, lambda got: llm.metrics().running > 0)) * 10:
        server.send_and_leave("completions", body | {"stream": stream}, begun)
    gauges = ("llmx:num_requests_running", "llmx:num_requests_waiting", "llmx:kv_cache_usage_perc")
    assert eventually(lambda: all(scraped(server)[name] == 0 for name in gauges))
    assert server.call("GET", "/ready")[0] == 200


def test_more_tokens_than_fit_are_refused_where_asked_for_and_fewer_where_not(server: Running, llm: LLM) -> None:
    context = llm.info.max_model_len
    for at, prompt in (("completions", {"prompt": [1] * 250}), ("chat/completions", {"messages": [USER]})):
        used = 250 if at == "completions" else len(llm.render([USER]))
        room = context - used
        for stream in (False, True):
            status, answer = server.post(at, prompt | {"max_tokens": room + 1, "stream": stream})
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert all(str(number) in answer["error"]["message"] for number in (used, room + 1, context))
        answer = server.post(at, prompt | {"max_tokens": room, "ignore_eos": True})[1]
        assert (answer["usage"]["total_tokens"], answer["choices"][0]["finish_reason"]) == (context, "length")
    answer = server.post("completions", {"prompt": [[1] * 250, [1, 2]], "ignore_eos": True})[1]
    assert answer["usage"]["completion_tokens"] == 6 + 6, "16 where nothing is said, unless they don't fit"


def test_a_chat_begins_once_where_tokenizer_and_template_both_say_so() -> None:
    """llama-like: the tokenizer puts <s> before a text, and the template writes one too."""
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    llm = ScriptedLLM(template)
    tokenizer = llm.tokenizer
    begin = tokenizer.encode("<s>")[0]
    llm.tokenizer = Tokenizer(
        tokenizer.backend,
        Spelling(byte_level=True),
        bos_id=begin,
        add_bos=True,
        eos_ids=tokenizer.eos_ids,
        template=tokenizer.template,
    )
    llm.says = ["ok"]
    with running(llm) as server:
        chat = server.call("POST", "/tokenize", {"messages": [USER]})[1]["tokens"]
        written = server.call("POST", "/tokenize", {"prompt": "<s>[user]Tell me."})[1]["tokens"]
        plain = server.call("POST", "/tokenize", {"prompt": "[user]Tell me."})[1]["tokens"]
        assert chat == written == plain
        assert (chat[0], chat.count(begin)) == (begin, 1)
        bare = server.call("POST", "/tokenize", {"prompt": "[user]Tell me.", "add_special_tokens": False})[1]["tokens"]
        assert bare == chat[1:]
        for path, body in (("chat/completions", {"messages": [USER]}), ("completions", {"prompt": "[user]Tell me."})):
            assert server.post(path, body)[1]["usage"]["prompt_tokens"] == len(chat)
        assert llm.prompts == ["<s>[user]Tell me."] * 2


def test_texts_are_the_same_when_the_cache_is_so_small_that_they_are_put_back_and_computed_again(tiny: Path) -> None:
    body = {"prompt": "the quick", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    prompts = [f"{body['prompt']} {at}" for at in range(8)]
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "max_num_seqs": 8}
    with LLM(str(tiny), kv_cache_bytes=2**18, **options) as llm, running(llm) as server:
        assert llm.info.num_blocks * llm.info.block_size < 8 * 128
        alone = [server.post("completions", body | {"prompt": prompt})[1]["choices"][0]["text"] for prompt in prompts]
        together = server.post("completions", body | {"prompt": prompts})[1]["choices"]
        assert [choice["text"] for choice in together] == alone
        assert {choice["finish_reason"] for choice in together} == {"length"}
        found = scraped(server)
        assert found["llmx:num_preemptions_total"] > 0
        assert found["llmx:kv_cache_usage_perc"] == 0
