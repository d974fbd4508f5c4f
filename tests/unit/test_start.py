"""The command line starts fast, and turns what goes wrong into a sentence and an exit code."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "fastapi", "uvicorn", "jinja2", "triton", "yaml")
LIGHT = [f"llmx.{name}" for name in ("cli", "core", "config", "errors", "report")]
LIGHT += ["llmx", *(f"llmx.formats.{name}" for name in ("fields", "gguf", "hub", "safetensors", "structure"))]
COMMANDS = ("generate", "chat", "serve", "bench", "eval", "pull", "env")


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env})


def llmx(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "llmx.cli", *args], capture_output=True, text=True)


def failing(raises: str, *args: str) -> subprocess.CompletedProcess[str]:
    """The command line with one more command, `fail`, whose body is `raises`."""
    return python(
        "import sys, os, signal, typer, llmx.cli as cli\n"
        "from llmx.errors import LlmxError, UsageError, CheckFailed, RequestError\n"
        f"@cli.app.command()\ndef fail():\n    {raises}\n"
        f"sys.argv[1:] = {list(args)!r}\ncli.main()"
    )


@pytest.mark.parametrize("args", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), ["bnech"]])
def test_help_imports_nothing_heavy(args):
    done = python(
        "import sys, llmx.cli\n"
        f"try: llmx.cli.app({args})\n"
        "except SystemExit: pass\n"
        f"print([m for m in {HEAVY} if m in sys.modules])"
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_nothing_heavy(module):
    done = python(f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_help_is_fast():
    """Processor time, not wall time: a busy neighbour must not fail it. The promise is 0.4 s."""
    best = min(_cpu_seconds() for _ in range(5))
    assert best < 0.4, f"`llmx --help` took {best:.2f} s of processor; see `python -X importtime -m llmx.cli`"


def _cpu_seconds() -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "llmx.cli", "--help"], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_names_each_command():
    shown = llmx("--help").stdout
    assert all(name in shown for name in COMMANDS)


def test_the_version_is_the_installed_one():
    import llmx as package

    assert llmx("--version").stdout == f"llmx {package.__version__}\n"


@pytest.mark.parametrize(
    ("raises", "code", "said"),
    [
        ("raise LlmxError('It broke.')", 1, "error: It broke.\n"),
        ("raise UsageError('Wrong flag.', hint='Use another.')", 2, "error: Wrong flag.\nhint: Use another.\n"),
        ("raise RequestError('Too long.', param='prompt')", 2, "error: Too long.\n"),
        ("raise CheckFailed('99 is below 100.')", 3, "error: 99 is below 100.\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(60)", 130, ""),
        ("raise typer.Exit(7)", 7, ""),
        ("raise SystemExit(3)", 3, ""),
    ],
)
def test_each_error_has_its_exit_code_and_no_traceback(raises, code, said):
    done = failing(raises, "fail")
    assert (done.returncode, done.stderr, done.stdout) == (code, said, "")


def test_a_bug_of_ours_is_named_without_a_traceback():
    done = failing("return [][1]", "fail")
    assert done.returncode == 1
    assert done.stderr.startswith("error: unexpected IndexError: list index out of range\nhint: This is a bug.")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("raises", ["raise UsageError('Wrong flag.')", "return [][1]"])
def test_debug_shows_the_traceback(raises):
    done = failing(raises, "--debug", "fail")
    assert done.returncode == (2 if "Usage" in raises else 1)
    assert "Traceback (most recent call last)" in done.stderr
    assert "\nerror: " in done.stderr


@pytest.mark.parametrize("args", [["no-such-command"], ["env", "--no-such-flag"], ["--no-such-flag"], ["env", "extra"]])
def test_an_unknown_word_is_a_usage_error(args):
    done = llmx(*args)
    assert done.returncode == 2
    assert not done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("lines", [1, 100_000])  # the one line is written only when stdout is flushed at the end
def test_a_broken_pipe_is_silent(lines, unbuffered):
    code = (
        "import sys, llmx.cli as cli\n"
        f"@cli.app.command()\ndef flood():\n    sys.stdin.readline()\n    for i in range({lines}): print(i)\n"
        "sys.argv[1:] = ['flood']\ncli.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, said = process.communicate(b"now\n")
    assert (process.returncode, said) == (1, b"")


def test_env_tells_the_processor_the_torch_and_the_kernels(tmp_path: Path):
    import json

    import torch

    from llmx.kernels import cpu

    path = tmp_path / "env.json"
    done = llmx("env", "--json", str(path))
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert report["command"] == "env"
    assert report["environment"]["torch"] == torch.__version__
    assert report["results"]["kernels"]["cpu"]["is"] == cpu.describe()
    assert "philox_uniform" in report["results"]["kernels"]["reference"]["ops"]
    assert torch.__version__ in done.stdout
    assert cpu.describe().split()[0] in done.stdout


def test_a_report_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path):
    done = llmx("env", "--json", str(tmp_path / "none" / "env.json"))
    assert done.returncode == 2
    assert "can't be written" in done.stderr
    assert not done.stdout


def test_sigint_is_not_ignored_here():
    """The tests above send one: a shell that starts this suite in the background disables it; conftest undoes that."""
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
