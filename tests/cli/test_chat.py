"""`llmx chat`: turns, the commands, interrupts; with a model loaded here, and with a server."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from server.model import build
from server.running import eventually, running
from typer.testing import CliRunner, Result

from llmx.cli import app
from llmx.core import SamplingParams
from llmx.llm import LLM

SMALL = ["--device", "cpu", "--dtype", "float32", "--threads", "1"]
GREEDY = ["--temperature", "0", "--max-tokens", "8"]
PATIENCE = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), device="cpu", dtype="float32", threads=1, kv_cache_bytes=2**24) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _nothing_of_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))
    for name in ("LLMX_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def chat(*arguments: object, stdin: str | bytes = "", **variables: str) -> Result:
    return CliRunner().invoke(app, ["chat", *(str(one) for one in arguments)], input=stdin, env=variables)


class Fake(ThreadingHTTPServer):
    """A server that answers each question with the next of `answers`: pieces of text, None for a wait without end, or
    bytes to be sent as they are. It keeps every request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: list[list[Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.refusal: tuple[int, bytes] | None = None
        self.finish = "stop"
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Fake

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode())

    def do_POST(self) -> None:
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.authorizations.append(self.headers["Authorization"])
        if self.server.refusal is not None:
            self._send(*self.server.refusal)
            return
        answer = self.server.answers.pop(0)  # also if nobody is there any more to hear it
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b": a comment\n\n")
        for piece in answer:
            if piece is None:
                self.server.over.wait(PATIENCE)
                return
            self.wfile.write(piece if isinstance(piece, bytes) else event({"delta": {"content": piece}}))
        self.wfile.write(event({"delta": {}, "finish_reason": self.server.finish}) + b"data: [DONE]\n\n")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def event(choice: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@pytest.fixture
def fake() -> Iterator[Fake]:
    server = Fake()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def said(request: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in request["messages"]]


def test_a_model_loaded_here_answers_as_the_library_does_with_all_that_was_said(model: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    messages, answers = [{"role": "system", "content": "Be brief."}], []
    for question in ("Hello", "And\nyou?"):
        messages.append({"role": "user", "content": question})
        answers.append(llm.chat(messages, params)[0].outputs[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    result = chat(model, *SMALL, *GREEDY, "--system", "Be brief.", stdin="Hello\nAnd\\\nyou?\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)
    assert "(cut off: that was the most tokens allowed)" in result.stderr


def test_a_model_loaded_here_refuses_what_does_not_fit(model: Path) -> None:
    result = chat(model, *SMALL, stdin="x" * 1000)
    assert result.exit_code == 2
    assert "the context of 256 must hold it" in result.stderr


def test_a_server_of_ours_answers_as_the_library_does(llm: LLM) -> None:
    want = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0.0, max_tokens=8))
    with running(llm) as server:
        result = chat("--url", f"http://127.0.0.1:{server.port}", *GREEDY, stdin="Hello\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == want[0].outputs[0].text + "\n"


def test_a_server_gets_the_history_and_only_the_settings_that_were_made(fake: Fake) -> None:
    fake.answers = [["Hi", " there", "."], ["Fine."]]
    result = chat("--url", fake.url, "--top-k", 3, stdin="Hello\n\nHow are you?\n", LLMX_SEED="7")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "Hi there.\nFine.\n"
    first, second = fake.requests
    assert first == {"model": "first", "stream": True, "top_k": 3, "seed": 7, "messages": first["messages"]}
    assert said(first) == [("user", "Hello")]
    assert said(second) == [("user", "Hello"), ("assistant", "Hi there."), ("user", "How are you?")]
    assert fake.authorizations == [None, None]


def test_the_name_the_path_and_the_key_are_those_that_were_given(fake: Fake) -> None:
    fake.answers = [["a"], ["b"]]
    assert chat("second", "--url", f"{fake.url}/v1/", stdin="1\n", OPENAI_API_KEY="sk-2").exit_code == 0
    both = {"OPENAI_API_KEY": "sk-2", "LLMX_API_KEY": " sk-1\n"}
    assert chat("second", "--url", f"{fake.url}/v1", "--max-tokens", 0, stdin="1\n", **both).exit_code == 0
    assert [request["model"] for request in fake.requests] == ["second", "second"]
    assert fake.authorizations == ["Bearer sk-2", "Bearer sk-1"]
    assert "max_tokens" not in fake.requests[1]


def test_commands_change_the_conversation(fake: Fake, tmp_path: Path) -> None:
    fake.answers = [["one"], ["two"], ["three"]]
    path = tmp_path / "talk.json"
    lines = [
        "/system Be kind.",
        "a",
        f"/save {path}",
        "b",
        f"/save {path}",
        "/reset",
        "/system",
        "c",
        "/help",
        "/exit",
        "d",
    ]
    result = chat("--url", fake.url, stdin="\n".join(lines))
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "one\ntwo\nthree\n"
    system, a, one = ("system", "Be kind."), ("user", "a"), ("assistant", "one")
    assert [said(request) for request in fake.requests] == [
        [system, a],
        [system, a, one, ("user", "b")],
        [("user", "c")],
    ]
    saved = json.loads(path.read_text())
    assert saved["model"] == "first"
    assert said(saved) == [system, a, one, ("user", "b"), ("assistant", "two")]
    assert "/reset" in result.stderr


def test_quotes_and_backslashes_make_messages_of_several_lines(fake: Fake) -> None:
    fake.answers = [["1"], ["2"], ["3"], ["4"]]
    text = '"""\n/reset\n\n  b"""\na\\\nb\\\n\n"""one line"""\n"""never closed\nc'
    assert chat("--url", fake.url, stdin=text).exit_code == 0
    asked = [said(request)[-1][1] for request in fake.requests]
    assert asked == ["/reset\n\n  b", "a\nb", "one line", "never closed\nc"]


def test_what_is_cut_off_is_told(fake: Fake) -> None:
    fake.answers, fake.finish = [["long"]], "length"
    assert "(cut off" in chat("--url", fake.url, stdin="a\n").stderr


@pytest.mark.parametrize(
    ("stdin", "says"),
    [
        (b"/rest\n", "/rest is no command.\nhint: Did you mean /reset?"),
        (b"/save\n", "/save needs the name of a file."),
        (b"/save /\n", "/ is there already."),
        (b"/save /no/such/folder\n", "/no/such/folder can't be written: No such file"),
        (b"\xff\n", "Standard input is not UTF-8 text: byte 0"),
    ],
)
def test_a_line_that_cannot_be_is_an_error_and_a_hint(fake: Fake, stdin: bytes, says: str) -> None:
    result = chat("--url", fake.url, stdin=stdin)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert says in result.stderr


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (400, b'{"error": {"message": "Too long."}}', "answered 400: Too long.\n"),
        (401, b'{"error": {"message": "No key."}}', "answered 401: No key.\nhint: Put the key into LLMX_API_KEY."),
        (500, b"<html>", "answered 500: no reason given\n"),
        (200, b"data: {\n\n", "sent something else than OpenAI's JSON: b'{'"),
        (200, b"data: [1]\n\n", "sent something else than OpenAI's JSON: b'[1]'"),
        (200, b"data: [DONE]\n\n", "the answer broke off.\n"),
        (200, b'{"choices": []}', "the answer broke off.\n"),
        (200, b'data: {"error": {"message": "The engine died."}}\n\ndata: [DONE]\n\n', ": The engine died.\n"),
    ],
)
def test_a_server_that_refuses_or_errs_is_an_error_and_exit_code_1(
    fake: Fake, status: int, body: bytes, says: str
) -> None:
    fake.refusal = (status, body)
    result = chat("--url", fake.url, stdin="a\nb\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {fake.url}/v1")
    assert says in result.stderr
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--url", "127.0.0.1:1"], 2, "--url 127.0.0.1:1 is no address of a server."),
        (["--url", "http://127.0.0.1:1"], 1, "http://127.0.0.1:1/v1 can't be reached: Connection refused."),
        (["--url", "http://127.0.0.1:1", "--kv-cache-dtype", "auto"], 2, "--kv-cache-dtype is for a model loaded here"),
        (["--url", "http://127.0.0.1:1", "--top-p", "2"], 2, "top_p must be"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], code: int, says: str) -> None:
    result = chat(*arguments, stdin="a\n")
    assert result.exit_code == code
    assert says in result.stderr


class Terminal:
    """`llmx chat --url` with a pseudo-terminal for its standard input, output and errors."""

    def __init__(self, fake: Fake, cache: Path) -> None:
        self.end, theirs = pty.openpty()
        environment = {**os.environ, "LLMX_CACHE": str(cache), "TERM": "dumb", "INPUTRC": "/dev/null"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", TERMINAL, "chat", "--url", fake.url],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""

    def until(self, text: str) -> str:
        """What is shown up to and with `text`, from where the last call ended."""
        while text not in self.seen:
            assert select.select([self.end], [], [], PATIENCE)[0], f"no {text!r} in {self.seen!r}"
            try:
                more = os.read(self.end, 4096)
            except OSError:  # the other end is closed
                more = b""
            assert more, f"no {text!r} in {self.seen!r}"
            self.seen += more.decode()
        before, found, self.seen = self.seen.partition(text)
        return before + found

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def interrupt_the_prompt(self) -> None:
        """Ctrl-C until it is heard: Python's readline misses a signal that comes just before it waits for a key."""
        for _ in range(int(PATIENCE)):
            self.type("\x03")
            if select.select([self.end], [], [], 1.0)[0]:
                break
        self.until("(interrupted")


# The pseudo-terminal becomes the controlling one, so that Ctrl-C is a signal.
TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from llmx.cli import main; main()"


@contextmanager
def terminal(fake: Fake, cache: Path) -> Iterator[Terminal]:
    session = Terminal(fake, cache)
    try:
        yield session
    finally:
        session.process.kill()
        session.process.wait()
        os.close(session.end)


def test_at_a_terminal_ctrl_c_ends_the_answer_and_keeps_what_was_said(fake: Fake, tmp_path: Path) -> None:
    fake.answers = [["Well, \x1b[31m", None], [None], ["Yes."]]
    with terminal(fake, tmp_path) as session:
        session.until("first. /help lists the commands")
        session.until(">>> ")
        session.type("Is it?\n")
        assert "\ufffd[31m" in session.until("[31m"), "control characters are not obeyed"
        session.type("\x03")
        session.until("(interrupted")
        session.until(">>> ")
        session.type("Say something.\n")
        assert eventually(lambda: len(fake.requests) == 2)
        session.type("\x03")
        session.until("(interrupted")
        session.until(">>> ")
        session.type("half a li")
        session.until("half a li")
        session.interrupt_the_prompt()
        session.until(">>> ")
        session.type("/nothing\n")
        session.until("error: /nothing is no command.")
        session.until(">>> ")
        session.type("So?\\\n")
        session.until("... ")
        session.type("Really?\n")
        session.until("Yes.")
        session.until(">>> ")
        session.type("\x04")
        assert session.process.wait(PATIENCE) == 0
    partial = [("user", "Is it?"), ("assistant", "Well, \x1b[31m")]
    assert said(fake.requests[2]) == [*partial, ("user", "So?\nReally?")]
    history = (tmp_path / "chat_history").read_text().splitlines()
    assert history == ["Is it?", "Say something.", "/nothing", "So?\\", "Really?"]
    assert (tmp_path / "chat_history").stat().st_mode & 0o077 == 0


def test_at_a_terminal_an_error_of_the_server_ends_nothing(fake: Fake, tmp_path: Path) -> None:
    fake.answers, fake.refusal = [["Here."]], (503, b'{"error": {"message": "Busy."}}')
    with terminal(fake, tmp_path) as session:
        session.until(">>> ")
        session.type("a\n")
        session.until("answered 503: Busy.")
        session.until(">>> ")
        fake.refusal = None
        session.type("b\n")
        session.until("Here.")
        session.until(">>> ")
        session.type("/exit\n")
        assert session.process.wait(PATIENCE) == 0
    assert said(fake.requests[1]) == [("user", "b")]
