"""Chat templates from files, and the sampling that a request leaves unsaid."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from server.fake import FakeLLM, FakeStream, says
from server.model import TEMPLATE
from server.running import running

from llmx.core import SamplingParams
from llmx.errors import UsageError
from llmx.llm import LLM
from llmx.server.defaults import Defaults
from llmx.tokenizer import load_tokenizer
from llmx.tokenizer.chosen import choose_template

CHAT = [{"role": "user", "content": "hi"}]


def params_of(defaults: dict[str, Any], path: str, body: dict[str, Any]) -> SamplingParams:
    """What the engine is asked for."""
    llm = FakeLLM(says("x"))
    asked: list[SamplingParams] = []
    real = llm.open

    def spy(prompt: list[int], params: SamplingParams, **rest: Any) -> FakeStream:
        asked.append(params)
        return real(prompt, params, **rest)

    llm.open = spy  # type: ignore[method-assign]
    with running(llm, defaults=defaults) as server:
        assert server.post(path, body)[0] == 200
    return asked[0]


def model_with(folder: Path, content: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_the_request_goes_before_the_flag_before_the_file_before_the_library(tmp_path: Path) -> None:
    model = model_with(
        tmp_path,
        {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1, "max_new_tokens": 7}
        | {"do_sample": True, "eos_token_id": [1, 2], "transformers_version": "5.0", "min_p": None},
    )
    defaults = Defaults(override='{"top_p": 0.8, "top_k": 20}').of(model)
    expected = {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 7}
    assert defaults == expected
    for path, body in (("completions", {"prompt": "hi"}), ("chat/completions", {"messages": CHAT})):
        params = params_of(defaults, path, body | {"top_k": 5, "temperature": 0})
        assert (params.top_k, params.temperature, params.top_p) == (5, 0, 0.8)
        assert (params.repetition_penalty, params.max_tokens, params.min_p) == (1.1, 7, 0.0)
        assert params_of(defaults, path, body | {"max_tokens": 3}).max_tokens == 3


def test_without_a_file_or_with_none_the_library_decides(tmp_path: Path) -> None:
    assert Defaults().of(tmp_path) == {}
    assert Defaults().of(tmp_path / "model.gguf") == {}
    assert Defaults(override='{"max_new_tokens": 5}').of(None) == {"max_tokens": 5}
    assert Defaults(source="none").of(model_with(tmp_path, {"temperature": 0.1})) == {}
    assert params_of({}, "completions", {"prompt": "hi"}).max_tokens == 16
    assert params_of({}, "chat/completions", {"messages": CHAT}).max_tokens is None


@pytest.mark.parametrize(
    "content",
    [{"temperature": -1}, {"temperature": "hot"}, {"top_k": 1.5}, {"top_p": True}, {"max_new_tokens": 0}, [1]],
    ids=str,
)
def test_a_file_that_says_what_cannot_be_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(UsageError, match=r"generation_config\.json"):
        Defaults().of(model_with(tmp_path, content))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"x"', '{"temprature": 1}', '{"top_k": "5"}', '{"temperature": NaN}', '{"stop": "a"}']
)
def test_a_flag_that_says_what_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--override-generation-config"):
        Defaults(override=text)


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(UsageError, match="--generation-config"):
        Defaults(source="vllm")


def test_the_start_lines_say_how_it_samples(capfd: pytest.CaptureFixture[str]) -> None:
    with running(FakeLLM(says("x")), defaults={"temperature": 0.6, "top_k": 20}):
        assert "samples  temperature 0.6, top_k 20, unless a request says otherwise" in capfd.readouterr().err


# ---- templates ---------------------------------------------------------------------------------------------


def test_a_template_of_a_file_is_used_instead_of_the_models(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}")
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_cache_bytes": 2**20}
    with LLM(str(tiny), chat_template=str(file), **options) as llm, running(llm) as server:
        status, answer = server.call("POST", "/tokenize", {"messages": CHAT})
        assert status == 200
        assert server.call("POST", "/detokenize", {"tokens": answer["tokens"]})[1] == {"prompt": "<|begin|>[hi]"}
        assert server.post("chat/completions", {"messages": CHAT, "max_tokens": 1})[0] == 200


def test_one_of_several_templates_of_the_model_is_chosen_by_name(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "short.jinja").write_text("{{ bos_token }}{{ messages[-1].content }}")
    tokenizer = load_tokenizer(model)
    assert tokenizer.template is not None
    assert tokenizer.template.source == TEMPLATE
    assert choose_template(tokenizer, "short").render(CHAT) == "<|begin|>hi"
    assert choose_template(tokenizer, "default").render(CHAT) == tokenizer.template.render(CHAT)
    with pytest.raises(UsageError, match=r"no chat template file 'long', .*default, short"):
        choose_template(tokenizer, "long")


def test_a_model_without_a_template_gets_one_with_its_special_tokens(tiny: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    tokenizer.template = None
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    assert choose_template(tokenizer, str(file)).render(CHAT) == "<|begin|>hi<|end|>"


@pytest.mark.parametrize("content", [b"{% for %}", b"\xff\xfe{{", b"x" * (5 * 2**20)], ids=["syntax", "bytes", "huge"])
def test_a_broken_template_file_is_refused_by_name(tiny: Path, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.jinja"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"broken\.jinja"):
        choose_template(load_tokenizer(tiny), str(file))
