"""Every recipe: the commands in its first lines run as they stand there, with a tiny model and little work."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from server.model import build
from server.running import PATIENCE, eventually
from tiny_gguf import write_gguf
from typer.main import get_command

from llmx.cli import app
from llmx.commands.settings import from_file

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
NAMES = [path.stem for path in RECIPES]
CONTEXT = 8192
# A tiny model has a tiny vocabulary, not a short context: the recipes' lengths stay as they are.
SMALL = {
    **{"LLMX_DEVICE": "cpu", "LLMX_THREADS": "1", "LLMX_MAX_TOKENS": "4", "LLMX_SERVE_PORT": "0"},
    **{"LLMX_MEMORY_UTILIZATION": "0.1", "LLMX_BENCH_JSON": "-", "LLMX_API_KEY": "sk-of-the-test"},
    **{"LLMX_REPETITIONS": "1", "LLMX_REQUESTS": "3", "LLMX_INPUT_LEN": "4:9", "LLMX_OUTPUT_LEN": "3"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = build(tmp_path_factory.mktemp("models") / "tiny")
    config = json.loads((path / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def gguf(folder: Path) -> Path:
    """The same model as one file."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {one["content"] for one in tokenizer["added_tokens"]}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
    }
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    write_gguf(folder.parent / "tiny.gguf", "LlamaForCausalLM", "llama", config, tensors, metadata)
    return folder.parent / "tiny.gguf"


def commands(recipe: Path) -> list[list[str]]:
    """The command lines of its first comment."""
    head = recipe.read_text().split("\n#\n")[1]
    return [shlex.split(line.removeprefix("#")) for line in head.splitlines()]


def environment(model: Path, **more: str) -> dict[str, str]:
    plain = {key: value for key, value in os.environ.items() if not key.startswith("LLMX_")}
    return plain | SMALL | {"LLMX_MODEL": str(model), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def run(line: list[str], stdin: str = "", **variables: str) -> str:
    command = [sys.executable, "-m", "llmx.cli", *line[1:]]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, cwd=ROOT, env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def served(line: list[str], **variables: str) -> Iterator[str]:
    """The address of a server that SIGTERM ends with exit code 0."""
    command = [sys.executable, "-m", "llmx.cli", *line[1:]]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=variables)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stderr.readline, "")))  # type: ignore[union-attr]
    reader.start()
    try:
        assert eventually(lambda: "Try: " in "".join(lines) or process.poll() is not None)
        found = re.search(r"at (http://\S+)/v1", "".join(lines))
        assert found, lines
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0, lines
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stderr.close()  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_a_recipe_has_commands_and_each_of_its_sections_is_one_of_them(recipe: Path) -> None:
    lines = commands(recipe)
    assert lines
    known: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    for line in lines:
        assert line[0] == "llmx"
        found = from_file(recipe, line[1], known)
        assert found or "--config" not in line
        assert "--config" not in line or line[line.index("--config") + 1] == f"recipes/{recipe.name}"
    sections = re.findall(r"^([a-z-]+):(?= *(?:#.*)?$)", recipe.read_text(), re.MULTILINE)
    assert set(sections) <= {line[1] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_a_recipes_commands_run_as_they_stand_there(recipe: Path, folder: Path, gguf: Path) -> None:
    variables = environment(gguf if "gguf" in recipe.stem else folder)
    server = None
    for line in commands(recipe):
        match line[1]:
            case "serve":
                server = line  # the lines after it are tried while it runs
            case "chat" if "--url" in line:
                assert server is not None, "a server comes before those who talk with it"
                with served(server, **variables) as url:
                    line[line.index("--url") + 1] = url
                    del variables["LLMX_MODEL"]  # the server knows its name
                    assert run(line, "Hello\n", **variables).strip()
                    variables = environment(gguf if "gguf" in recipe.stem else folder)
            case "chat":
                assert run(line, "Hello\n", **variables).strip()
            case "generate":
                assert run(line, **variables).strip()
            case "bench":
                results = json.loads(run(line, LLMX_N_PROMPT="8", LLMX_N_GEN="2", **variables))["results"]
                assert results["serving"]["completed"] == 3
            case other:
                pytest.fail(f"no test knows how to run llmx {other}")
