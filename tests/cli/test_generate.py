"""`llmx generate`: stdout is the text, stderr the talk; what it says is what `LLM` gives."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server.model import build
from typer.testing import CliRunner, Result

from llmx.cli import app
from llmx.commands.generate import Script, read_prompt
from llmx.core import Delta, SamplingParams
from llmx.errors import UsageError
from llmx.llm import LLM

SMALL = ["--device", "cpu", "--dtype", "float32", "--threads", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), device="cpu", dtype="float32", threads=1, kv_cache_bytes=2**24) as llm:
        yield llm


def generate(model: Path, *flags: str, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(app, ["generate", "-m", str(model), *SMALL, *flags], input=stdin)


def report(model: Path, *flags: str, stdin: bytes = b"") -> dict[str, Any]:
    result = generate(model, "--json", *flags, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


GREEDY = ("--temperature", "0", "--max-tokens", "12")


def test_stdout_is_the_text_that_the_library_gives_and_nothing_else(model: Path, llm: LLM) -> None:
    output = llm.generate("The sea is", SamplingParams(temperature=0.0, max_tokens=12))[0]
    result = generate(model, "The sea is", "--raw", *GREEDY)
    assert result.exit_code == 0
    assert result.stdout == output.outputs[0].text + "\n"
    last = result.stderr.splitlines()[-1]
    assert f"{len(output.prompt_token_ids)} prompt tokens; first token after" in last
    assert "12 tokens at" in last
    assert "finished by length" in last


@pytest.mark.parametrize("argument", [["-"], []])
def test_the_prompt_can_come_from_standard_input(model: Path, llm: LLM, argument: list[str]) -> None:
    found = report(model, *argument, "--raw", *GREEDY, stdin="naïve 客\n".encode())
    assert found["results"]["prompt_token_ids"] == llm.tokenizer.encode("naïve 客")


def test_an_argument_wins_over_standard_input(model: Path, llm: LLM) -> None:
    found = report(model, "this", "--raw", *GREEDY, stdin=b"not this")
    assert found["results"]["prompt_token_ids"] == llm.tokenizer.encode("this")


def test_a_model_with_a_template_is_chatted_with_unless_raw_is_given(model: Path, llm: LLM) -> None:
    user = {"role": "user", "content": "Hi"}
    asked = {
        (): [user],
        ("--chat",): [user],
        ("--system", "Be kind."): [{"role": "system", "content": "Be kind."}, user],
    }
    for flags, messages in asked.items():
        found = report(model, "Hi", *flags, *GREEDY)
        assert found["results"]["prompt_token_ids"] == llm.render(messages)
    assert report(model, "Hi", "--raw", *GREEDY)["results"]["prompt_token_ids"] == llm.tokenizer.encode("Hi")


def test_without_a_template_the_prompt_is_continued_and_chat_is_refused(model: Path, llm: LLM, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (plain / file.name).write_bytes(file.read_bytes())
    assert report(plain, "Hi", *GREEDY)["results"]["prompt_token_ids"] == llm.tokenizer.encode("Hi")
    for flags in (["--chat"], ["--system", "Be kind."]):
        result = generate(plain, "Hi", *flags)
        assert result.exit_code == 2
        assert "no chat template" in result.stderr


def test_the_report_holds_texts_ids_usage_timings_and_the_model(model: Path, llm: LLM) -> None:
    found = report(model, "Hi", "--raw", "--n", "3", "--seed", "11", "--max-tokens", "9", "--logprobs", "2")
    params = SamplingParams(n=3, seed=11, temperature=0.7, max_tokens=9, logprobs=2)
    expected = llm.generate("Hi", params)[0]
    results = found["results"]
    assert [choice["index"] for choice in results["choices"]] == [0, 1, 2]
    for choice, output in zip(results["choices"], expected.outputs, strict=True):
        assert choice["text"] == output.text
        assert choice["token_ids"] == list(output.token_ids)
        assert choice["finish_reason"] == output.finish_reason
        assert output.logprobs is not None
        assert [one["logprob"] for one in choice["logprobs"]] == [one.value for one in output.logprobs]
        assert all(len(one["top"]) == 2 for one in choice["logprobs"])
    given = sum(len(output.token_ids) for output in expected.outputs)
    prompt = len(expected.prompt_token_ids)
    assert results["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": given,
        "total_tokens": prompt + given,
        "cached_tokens": 0,
    }
    assert 0 < results["timings"]["ttft_seconds"] <= results["timings"]["total_seconds"]
    assert found["command"] == "generate"
    assert found["schema_version"] == 1
    assert found["model"]["name"] == str(model)
    assert found["model"]["parameters"] == llm.info.parameters
    assert found["model_defaulted"] is False
    assert found["kernels"]
    assert found["seeds"] == {"sampling": 11}


def test_a_run_without_a_seed_can_be_repeated_with_the_seed_it_reports(model: Path) -> None:
    flags = ("Hi", "--raw", "--temperature", "1.5", "--max-tokens", "16")
    first, other = report(model, *flags), report(model, *flags)
    again = report(model, *flags, "--seed", str(first["seeds"]["sampling"]))
    assert first["seeds"] != other["seeds"]
    assert again["results"]["choices"] == first["results"]["choices"]
    assert other["results"]["choices"] != first["results"]["choices"]


def test_a_stop_string_ends_the_text_before_it(model: Path, llm: LLM) -> None:
    text = llm.generate("The sea is", SamplingParams(temperature=0.0, max_tokens=12))[0].outputs[0].text
    stop = text[4:6]
    found = report(model, "The sea is", "--raw", *GREEDY, "--stop", "never said", "--stop", stop)
    choice = found["results"]["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_several_texts_are_set_apart_by_a_blank_line(model: Path, llm: LLM) -> None:
    outputs = llm.generate("Hi", SamplingParams(n=2, seed=1, temperature=0.7, max_tokens=6))[0].outputs
    result = generate(model, "Hi", "--raw", "--n", "2", "--seed", "1", "--max-tokens", "6")
    assert result.stdout == f"{outputs[0].text}\n\n{outputs[1].text}\n"


def test_interleaved_texts_are_shown_in_order_and_the_first_at_once() -> None:
    shown: list[str] = []
    script = Script(2, shown.append)
    script.add(Delta(0, "a", (1,)))
    script.add(Delta(1, "x", (2,)))
    assert shown == ["a"]
    script.add(Delta(1, "y", (3,), "length"))
    script.add(Delta(0, "b", (4,), "stop"))
    script.end()
    assert "".join(shown) == "ab\n\nxy\n"
    assert [choice.finish_reason for choice in script.choices] == ["stop", "length"]


def test_what_an_interrupt_leaves_is_shown_and_marked() -> None:
    shown: list[str] = []
    script = Script(2, shown.append)
    script.add(Delta(0, "a", (1,)))
    script.add(Delta(1, "x", (2,)))
    script.end()
    assert "".join(shown) == "a\n\nx\n"
    assert {choice.finish_reason for choice in script.choices} == {"abort"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--logprobs", "1"], "--logprobs shows in the JSON report only."),
        (["--raw", "--system", "x"], "--system needs a chat template"),
        (["--top-p", "0"], "top_p must be above 0"),
        (["--temperature", "-1"], "temperature must be between 0"),
        (["--stop", ""], "stop string may not be empty"),
        (["--max-tokens", "5000"], "more than the context of 256"),
        (["--device", "tpu"], "--device tpu is not known"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(model: Path, flags: list[str], says: str) -> None:
    result = generate(model, "Hi", *flags)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_standard_input_that_is_no_text_is_refused(model: Path) -> None:
    result = generate(model, stdin=b"ab\xff")
    assert result.exit_code == 2
    assert "not UTF-8 text: byte 2" in result.stderr


def test_a_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    with pytest.raises(UsageError, match="There is no prompt"):
        read_prompt(None)


def test_no_model_means_the_demo_and_stderr_says_so(tmp_path: Path) -> None:
    environment = {"LLMX_CACHE": str(tmp_path), "LLMX_DEMO_WHEEL": str(tmp_path / "absent.whl")}
    result = CliRunner().invoke(app, ["generate", "Hi"], env=environment)
    assert result.stderr.startswith("No model given: using `demo`")
    assert result.exit_code == 1
    assert "error: " in result.stderr


@pytest.mark.slow
def test_the_demo_answers_and_the_report_says_that_it_was_assumed(demo: Path) -> None:
    result = CliRunner().invoke(
        app, ["generate", "What is the capital of Germany?", "--json", *GREEDY, "--device", "cpu"]
    )
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["model_defaulted"] is True
    assert found["model"]["path"] == str(demo)
    assert "Berlin" in found["results"]["choices"][0]["text"]


def test_bad_files_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(7))
    script = (
        "import sys; from llmx.cli import app\n"
        f"try: app(['generate', 'Hi', '-m', {str(tmp_path / 'bad.gguf')!r}])\n"
        "except SystemExit as end: code = end.code\n"
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n", done.stderr
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_an_interrupt_prints_what_there_is_and_exits_130(model: Path, json_flag: list[str]) -> None:
    flags = ["Hi", "--raw", "--n", "32", "--max-tokens", "0", "--seed", "1", *SMALL, *json_flag]
    command = [sys.executable, "-c", INTERRUPTED, "generate", "-m", str(model), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("begun"):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "abort" in err.splitlines()[-1]
    if json_flag:
        choices = json.loads(out)["results"]["choices"]
        assert "abort" in {choice["finish_reason"] for choice in choices}
        assert any(choice["token_ids"] for choice in choices)
    else:
        assert out.strip()


# Tells when the first text has come: with --json nothing else shows it.
INTERRUPTED = """
import sys
from llmx.cli import main
from llmx.commands.generate import Script
add = Script.add
def first(self, delta):
    add(self, delta)
    if len(self.arrivals) == 1:
        print("begun", file=sys.stderr, flush=True)
Script.add = first
main()
"""
