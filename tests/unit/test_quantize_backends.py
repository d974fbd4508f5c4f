"""`llmx quantize --backend`: what is refused and why, the environments' pins, and the whole way with stand-ins.

The packages themselves need CUDA, and are not run here: in their place stand modules of the same names that note how
they are called and write files of the same form.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import every_tiny, make
from tokenizer_samples import byte_level, save
from typer.testing import CliRunner, Result

from llmx.cli import app
from llmx.quantize.backends import MARKER, PINS, Backend, install_commands

ROOT = Path(__file__).parents[2]
LITTLE = ("--samples", "4", "--seq-len", "32", "--threads", "1")
STAND_IN = """
import json, os
from pathlib import Path
import torch
from llmx.formats.safetensors import open_shard, write_shard
from llmx.schemes import awq, gptq
from llmx.schemes.whole import around_zero, symmetric

class Model:
    @classmethod
    def from_pretrained(cls, path, *arguments, **options):
        made = cls()
        made.path = Path(path)
        made.calls = {"from_pretrained": [list(map(str, arguments)), {k: str(v) for k, v in options.items()}]}
        made.config = arguments[0].said if arguments else None
        return made
    def quantize(self, *arguments, **options):
        print("quantizing")
        self.calls["quantize"] = [list(arguments), options]
        self.config = options.get("quant_config", self.config)
    def save_quantized(self, out):
        Path(out).mkdir()
        source, tensors = open_shard(self.path / "model.safetensors"), {}
        for name in source.names():
            tensor, module = source.read(name), name.removesuffix(".weight")
            if "layers" not in name or tensor.dim() != 2:
                tensors[name] = tensor.half()
                continue
            made = pack(tensor)
            made["scales"] = made["scales"] * float(os.environ.get("STAND_IN_FACTOR", "1"))
            tensors.update({f"{module}.{part}": t.contiguous() for part, t in made.items()})
        write_shard(Path(out) / FILE, tensors)
        (Path(out) / "config.json").write_text(json.dumps({"odd": 1, "quantization_config": SAYS}))
        Path(os.environ["STAND_IN_CALLS"]).write_text(json.dumps(self.calls))
"""
AWQ = """
FILE = "model.safetensors"
SAYS = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
def pack(tensor): return awq.store(around_zero(tensor, 4, 32, torch.float16))
AutoAWQForCausalLM = Model
"""
GPTQ = """
FILE = "gptq_model-4bit-32g.safetensors"
SAYS = {"bits": 4, "group_size": 32, "sym": True, "desc_act": False}
def pack(tensor): return gptq.store(symmetric(tensor, 4, 32, torch.float16), 1)
AutoGPTQForCausalLM = Model
class BaseQuantizeConfig:
    def __init__(self, **options): self.said = options
    def __str__(self): return json.dumps(self.said)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = next(tiny for tiny in every_tiny() if tiny.name == "Llama-0")
    tiny = replace(tiny, options={**tiny.options, "vocab_size": 448})
    return save(byte_level(), make(tiny, tmp_path_factory.mktemp("tiny") / "little").folder)


@pytest.fixture
def llmx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMX_CACHE", str(tmp_path / "cache"))
    return lambda *arguments: CliRunner().invoke(app, ["quantize", *map(str, arguments)])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmx.quantize.backends.has_cuda", lambda: True)


@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        (("--backend", "autoawq", "--awq"), "scales are applied twice", "llmx quantize MODEL --awq"),
        (("--backend", "auto-gptq", "--gptq"), "requires CUDA available", "llmx quantize MODEL --gptq"),
        (("--backend", "autoawq", "--gptq"), "--backend autoawq makes --awq weights", ""),
        (("--backend", "auto-gptq", "--gptq", "--format", "gptq_v2"), "in the format gptq only", ""),
        (("--backend", "gptqmodel", "--gptq"), "--backend gptqmodel is not known", ""),
        (("--backend", "autoawq", "--awq", "--ignore", "k_proj"), "takes neither --quantize-lm-head nor --ignore", ""),
        (("--awq", "--create-backend-venv"), "are of --backend, which is not given", ""),
    ],
)
def test_what_a_backend_can_not_do_is_refused_with_the_reason(
    llmx: Callable[..., Result], model: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str,
    hint: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("llmx.quantize.backends.has_cuda", lambda: False)
    ran = llmx(model, *arguments)
    assert ran.exit_code == 2
    assert says in ran.stderr
    assert hint.replace("MODEL", str(model)) in ran.stderr


@pytest.mark.usefixtures("cuda")
def test_an_environment_is_made_only_when_asked_for(llmx: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    ran = llmx(model, "--backend", "autoawq", "--awq", *LITTLE)
    assert ran.exit_code == 2
    assert f"no environment with autoawq in {tmp_path / 'cache' / 'backends' / 'autoawq'}" in ran.stderr
    assert "--create-backend-venv makes one there with autoawq==0.2.9, torch==2.6.0" in ran.stderr
    assert not (tmp_path / "cache" / "backends").exists()


def test_environments_have_pinned_versions_and_the_extras_name_the_packages() -> None:
    made, torch_first, rest = install_commands(Backend("auto-gptq", Path("/somewhere")))
    assert made[1:] == ["-m", "venv", "--clear", "/somewhere"]
    assert torch_first[0].startswith("/somewhere/")
    assert "torch==2.6.0" in torch_first
    assert rest[-5:] == list(PINS["auto-gptq"])
    project = (ROOT / "pyproject.toml").read_text()
    for name, pins in PINS.items():
        assert f'{name} = ["{pins[0]}"]' in project


@pytest.mark.usefixtures("cuda")
def test_a_failed_installation_says_why(
    llmx: Callable[..., Result], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = [[sys.executable, "-c", "print('collecting'); raise SystemExit('no room left')"]]
    monkeypatch.setattr("llmx.quantize.backends.install_commands", lambda backend: fails)
    ran = llmx(model, "--backend", "autoawq", "--awq", "--create-backend-venv", *LITTLE)
    assert ran.exit_code == 1
    assert "The environment for autoawq could not be made: no room left." in ran.stderr
    assert not (tmp_path / "cache" / "backends" / "autoawq" / MARKER).exists()


def environment(folder: Path, package: str, source: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python that finds the stand-in, and llmx, which that uses."""
    (folder / "lib" / package).mkdir(parents=True)
    (folder / "lib" / package / "__init__.py").write_text(STAND_IN + source)
    (folder / "bin").mkdir()
    paths = ":".join([str(folder / "lib"), str(ROOT), *filter(None, sys.path)])
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{paths}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("STAND_IN_CALLS", str(folder / "calls.json"))
    return folder


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("backend", "method", "package", "source"),
    [("autoawq", "--awq", "awq", AWQ), ("auto-gptq", "--gptq", "auto_gptq", GPTQ)],
)
def test_a_backend_is_given_the_tokens_and_its_files_take_their_place(
    backend: str,
    method: str,
    package: str,
    source: str,
    llmx: Callable[..., Result],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    venv = environment(tmp_path / "venv", package, source, monkeypatch)
    arguments = (model, "--backend", backend, method, "--backend-venv", venv, *LITTLE)
    ran = llmx(*arguments, "-o", "out", "--json", "report.json")
    assert ran.exit_code == 0, ran.output
    calls: dict[str, Any] = json.loads((venv / "calls.json").read_text())
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    if backend == "autoawq":
        given = calls["quantize"][1]
        assert given["quant_config"] == {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
        texts = given["calib_data"]
        assert (given["max_calib_samples"], given["max_calib_seq_len"]) == (4, 32)
    else:
        said = json.loads(calls["from_pretrained"][0][0])
        assert said == {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "sym": True}
        assert calls["from_pretrained"][1] == {"torch_dtype": "torch.float32"}
        texts = [one["input_ids"] for one in calls["quantize"][0][0]]
    assert [len(text) for text in texts] == [32] * 4
    assert results["backend"] == backend
    assert results["eval"]["kld"]["mean"] < 2
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization_config")["group_size"] == 32
    assert config == json.loads((model / "config.json").read_text())
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()

    if backend != "autoawq":
        return
    monkeypatch.setenv("STAND_IN_FACTOR", "7")  # as AutoAWQ's fault does: weights that carry a factor too much
    ran = llmx(*arguments, "-o", "wrong")
    assert ran.exit_code == 1
    assert "mean KL divergence of" in ran.stderr
    assert not (tmp_path / "wrong").exists()
    assert (tmp_path / "wrong.failed" / "config.json").is_file()


@pytest.mark.usefixtures("cuda")
def test_a_backend_that_fails_says_what_it_said_last(
    llmx: Callable[..., Result], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = environment(tmp_path / "venv", "awq", "raise RuntimeError('no such kernel')", monkeypatch)
    ran = llmx(model, "--backend", "autoawq", "--awq", "--backend-venv", venv, *LITTLE, "-o", "out")
    assert ran.exit_code == 1
    assert "autoawq failed: RuntimeError: no such kernel." in ran.stderr
    assert not (tmp_path / "out").exists()
