"""`llmx serve` as a process: its port, its first words, its signals, and its engine's process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import urllib.request
from pathlib import Path

import pytest
from openai import APIConnectionError, AuthenticationError, OpenAI
from server.running import PATIENCE, eventually
from server.served import STREAM, Served, alive, command, connected, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")


def test_it_says_how_to_use_it_and_that_line_works(tiny: Path) -> None:
    with serving(tiny, "--served-model-name", "mine") as served:
        url, body = re.search(r"Try: curl (\S+) -H 'Content-Type: application/json' -d '(.*)'\n", served.said).groups()  # type: ignore[union-attr]
        request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            assert json.load(answer)["choices"][0]["message"]["role"] == "assistant"
        assert json.loads(body)["model"] == "mine"
        assert "context 256 tokens × 4 sequences; KV cache" in served.said
        assert "LlamaForCausalLM" in served.said
        served.process.send_signal(signal.SIGTERM)
        engine = served.engine
        assert served.ended() == 0
        assert not alive(engine)
        assert "Traceback" not in served.said


def test_a_taken_port_is_said_at_once(tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with command(str(tiny), "--port", str(port)) as process:
            _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert said.startswith(f"error: Port {port} on 127.0.0.1 is taken.\nhint: ")


@pytest.mark.parametrize(
    "arguments",
    [["--host", "no.such.host.invalid"], ["--port", "70000"], ["--drain-seconds", "-1"], ["--dtype", "int3"]],
)
def test_a_wrong_flag_is_one_sentence_and_exit_code_2(tiny: Path, arguments: list[str]) -> None:
    with command(str(tiny), *arguments) as process:
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "Traceback" not in said
    assert arguments[0].lstrip("-").split("=")[0] in said


def test_a_broken_model_file_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    broken = tmp_path / "z.gguf"
    # Version 3 with one tensor "t" of 1 × 0 elements: a zero dimension has crashed other readers.
    head = b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + bytes(8) + (1).to_bytes(8, "little") + b"t"
    broken.write_bytes(head + (2).to_bytes(4, "little") + (1).to_bytes(8, "little") + bytes(8 + 4 + 8))
    with command(str(broken), "--port", "0") as process:
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert said.startswith("error: ")
    assert "Traceback" not in said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_lets_the_running_stream_finish(tiny: Path, number: int, code: int) -> None:
    with serving(tiny) as served, connected(served) as client:
        engine = served.engine
        stream = client.completions.create(model="tiny", stream=True, **STREAM)
        next(iter(stream))
        os.kill(engine, signal.SIGSTOP)  # so that the stream runs when the signal comes, however fast the machine is
        served.process.send_signal(number)
        assert eventually(lambda: "Stopping: up to 30 s for 1 running request(s)" in served.said)
        os.kill(engine, signal.SIGCONT)
        last = [chunk.choices[0].finish_reason for chunk in stream][-1]
        assert last == "length"
        assert served.ended() == code
        assert not alive(engine)
        with pytest.raises(APIConnectionError):
            client.models.list()


def test_keys_templates_and_defaults_come_from_flags(tiny: Path, tmp_path: Path) -> None:
    keys, template = tmp_path / "keys", tmp_path / "mine.jinja"
    keys.write_text("sk-file\n")
    template.write_text("{{ bos_token }}{{ messages[-1].content }}")
    flags = ("--api-key", "sk-flag", "--api-key-file", str(keys), "--chat-template", str(template))
    flags += ("--override-generation-config", '{"temperature": 0, "max_tokens": 3}', "--max-num-queued-reqs", "0")
    with serving(tiny, *flags, "--allowed-origins", "https://a.org") as served:
        with connected(served) as client, pytest.raises(AuthenticationError):
            client.models.list()
        for key in ("sk-flag", "sk-file"):
            with OpenAI(base_url=served.url, api_key=key, max_retries=0) as client:
                chat = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "the"}])
                assert chat.usage is not None
                assert chat.usage.prompt_tokens == 2
                assert chat.usage.completion_tokens <= 3
        assert "samples  temperature 0, max_tokens 3" in served.said
        assert "sk-" not in served.said


def test_if_the_server_is_killed_its_engine_ends(tiny: Path) -> None:
    with serving(tiny) as served:
        engine = served.engine
        assert alive(engine)
        served.process.kill()
        assert eventually(lambda: not alive(engine))


def test_a_signal_while_the_model_loads_ends_everything(tiny: Path) -> None:
    with command(str(tiny), "--port", "0", "--device", "cpu") as process:
        served = Served(process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        assert eventually(lambda: bool(children.read_text()))
        engine = served.engine
        process.send_signal(signal.SIGTERM)
        assert served.ended() == 0
        assert eventually(lambda: not alive(engine))
        assert "Traceback" not in served.said
