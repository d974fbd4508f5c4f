"""AutoAWQ and AutoGPTQ as cross-checks: each in an environment of its own, with versions that worked together.

Both are dead upstream, and transformers 5 has dropped them; the quantizers here need neither.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx.errors import LlmxError, UsageError
from llmx.formats.hub import Located, cache_dir
from llmx.quantize import foreign
from llmx.quantize.options import Options
from llmx.quantize.output import STATE, Output
from llmx.report import write_whole

MARKER = ".llmx-backend.json"  # in a finished environment: what was installed
MOST_KLD = 2.0  # nats of the source's own text: beyond it the result is no quantized model (AutoAWQ's fault makes it 9)
# The newest releases, with the newest versions that their authors tried them with.
PINS = {
    "autoawq": ("autoawq==0.2.9", "torch==2.6.0", "transformers==4.51.3"),
    "auto-gptq": ("auto-gptq==0.7.1", "torch==2.6.0", "transformers==4.51.3", "datasets<4", "peft<0.16"),
}
METHODS = {"autoawq": "awq", "auto-gptq": "gptq"}
WITHOUT_CUDA = {
    "autoawq": "autoawq 0.2.9 writes broken files on a CPU: it restores weights from a state dict taken with .cpu(), "
    "which on a CPU is no copy, so scales are applied twice to weights and once to norms (on SmolLM2-135M a mean KL "
    "divergence of 9.1 from the source, in 965 s for 16 texts)",
    "auto-gptq": 'auto-gptq 0.7.1 does not quantize without CUDA ("OSError: Load pretrained model to do quantization '
    'requires CUDA available.")',
}

Say = Callable[[str], None]
Texts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Backend:
    """venv: None for llmx's own folder of it. create: make the environment if it is not there."""

    name: str
    venv: Path | None = None
    create: bool = False

    @property
    def folder(self) -> Path:
        return self.venv or cache_dir() / "backends" / self.name

    @property
    def python(self) -> Path:
        return self.folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def check(backend: Backend, options: Options, model: str) -> None:
    """UsageError for what it can't do here, with the command that does it without."""
    name = backend.name
    if name not in PINS:
        raise UsageError(f"--backend {name} is not known; there are {', '.join(PINS)}.", hint="leave it out")
    method = METHODS[name]
    if options.method != method or options.form != method:
        raise UsageError(f"--backend {name} makes --{method} weights in the format {method} only.")
    if options.head or options.ignore is not None:
        raise UsageError(f"--backend {name} takes neither --quantize-lm-head nor --ignore.")
    if not has_cuda():
        raise UsageError(f"{WITHOUT_CUDA[name]}.", hint=f"without it: llmx quantize {model} --{method}")


def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def ready(backend: Backend, say: Say) -> None:
    """An environment with the package. UsageError where there is none and none may be made; LlmxError if it fails."""
    if (backend.folder / MARKER).is_file() or (backend.venv is not None and backend.python.exists()):
        return
    if not backend.create:
        raise UsageError(
            f"There is no environment with {backend.name} in {backend.folder}.",
            hint=f"--create-backend-venv makes one there with {', '.join(PINS[backend.name])} (several GB)",
        )
    say(f"making an environment in {backend.folder}")
    for command in install_commands(backend):
        _run(command, say, f"The environment for {backend.name} could not be made")
    write_whole(backend.folder / MARKER, json.dumps({"pins": PINS[backend.name]}) + "\n")


def install_commands(backend: Backend) -> list[list[str]]:
    python, pins = str(backend.python), PINS[backend.name]
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    commands = [[sys.executable, "-m", "venv", "--clear", str(backend.folder)], [*pip, torch, "setuptools", "wheel"]]
    # autoawq's setup asks the torch that is there for its version
    return [*commands, [*pip, "--no-build-isolation", *pins]]


def quantize(
    backend: Backend, located: Located, options: Options, dtype: str, texts: Texts, path: Path, say: Say, *, force: bool
) -> None:
    """Has it make the folder `path`; config and tokenizer files are the source's, as always."""
    ready(backend, say)
    output = Output(path, 0, {"backend": backend.name}, resume=False, force=force)
    work = output.folder / STATE
    job = {
        "backend": backend.name, "model": str(located.path.resolve()), "out": str((work / "made").resolve()),
        "texts": [list(text) for text in texts], "longest": max(map(len, texts)), "bits": options.bits,
        "group": options.group, "symmetric": options.symmetric, "damp": options.damp, "dtype": dtype,
    }  # fmt: skip
    write_whole(work / "job.json", json.dumps(job))
    say(f"{backend.name} is at work")
    script = shutil.copyfile(foreign.__file__, work / "run.py")  # beside it here are modules of the packages' names
    _run([str(backend.python), str(script), str(work / "job.json")], say, f"{backend.name} failed")
    made = work / "made"
    weights = [one for one in made.iterdir() if one.name.endswith((".safetensors", ".safetensors.index.json"))]
    if not any(one.suffix == ".safetensors" for one in weights):
        raise LlmxError(f"{backend.name} wrote no safetensors file; what it wrote is in {made}.")
    for one in weights:
        one.rename(output.folder / one.name)
    output.write_config(located.path, _said(made, backend.name))
    _look(Located("hf", output.folder, path.name))
    output.finish()


def _said(made: Path, name: str) -> dict[str, Any]:
    """The `quantization_config` that it wrote."""
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    old = made / "quantize_config.json"
    found = config.get("quantization_config") or (json.loads(old.read_text("utf-8")) if old.is_file() else None)
    if not isinstance(found, dict):
        raise LlmxError(f"{name} wrote no quantization_config; what it wrote is in {made}.")
    return {"quant_method": METHODS[name], **found}


def _look(located: Located) -> None:
    """LlmxError where `llmx inspect` finds an error in what was written."""
    from llmx.inspect.examine import examine

    for finding in examine(located).findings:
        if finding.level == "error":
            raise LlmxError(f"What it wrote is wrong: {finding.message}", hint=f"it is in {located.path}")


def check_loss(found: dict[str, Any], path: Path) -> None:
    """LlmxError where the result, measured against its source, is no quantized model any more."""
    kld = float(found["kld"]["mean"])
    if not kld <= MOST_KLD:
        shutil.move(path, path.with_name(f"{path.name}.failed"))
        raise LlmxError(
            f"The result says something else than its source: a mean KL divergence of {kld:.2f}, at most {MOST_KLD:g} "
            "is expected.",
            hint=f"it is in {path}.failed",
        )


def _run(command: list[str], say: Say, what: str) -> None:
    """Lines of its output go to `say`. LlmxError with the last of them if it fails."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    last = ""
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=kept, text=True,
                              errors="replace") as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip():
                    last = line.strip()[-300:]
                    say(last)
    except OSError as error:
        raise LlmxError(f"{what}: {command[0]} can't be run: {error.strerror}.") from error
    if process.returncode:
        raise LlmxError(f"{what}: {last or f'exit code {process.returncode}'}.".replace("..", "."))
