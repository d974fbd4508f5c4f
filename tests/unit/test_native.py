"""The compiled library: every instruction set gives the same bits, and the choice can be forced."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmx.kernels import Kernels, cpu

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"cpu kernels: {cpu.describe()}")


@pytest.mark.parametrize("vocab", [1, 64, 1001])
def test_philox_has_the_references_bits(isa, vocab):
    assert cpu.native().active() == isa
    seeds, positions = torch.arange(5) * 2**61 - 7, torch.arange(5) * 2**33 + 1
    want = Kernels("cpu", forced="reference").get("philox_uniform")(seeds, positions, 2, vocab)
    assert torch.equal(Kernels("cpu", forced="cpu").get("philox_uniform")(seeds, positions, 2, vocab), want)


def test_portable_is_always_there():
    assert "portable" in cpu.native().isas()


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env})


def test_the_environment_forces_an_instruction_set():
    code = "from llmx.kernels import cpu; print(cpu.native().active())"
    assert run(code, LLMX_ISA="portable").stdout.strip() == "portable"
    refused = run(code, LLMX_ISA="avx1024")
    assert "UsageError: LLMX_ISA=avx1024: this processor or build has no such kernels." in refused.stderr


def test_the_environment_forces_the_reference():
    code = "from llmx.kernels import Kernels; k = Kernels('cpu'); print(k.get('philox_uniform').__module__)"
    assert run(code).stdout.strip() == "llmx.kernels.cpu.random"
    assert run(code, LLMX_KERNELS="reference").stdout.strip() == "llmx.kernels.reference.random"


def test_no_kernel_object_exports_a_weak_symbol():
    """A weak template instance compiled for AVX-512 may be the copy that the linker keeps for everybody."""
    built = ROOT.glob("build/*/CMakeFiles/kernels_*.dir/kernels/cpu/*.o")
    objects = [o for o in built if (ROOT / "kernels" / "cpu" / o.stem).exists()]
    if not objects or shutil.which("nm") is None:
        pytest.skip("no build tree here, or no nm")
    listed = subprocess.run(["nm", "-C", *objects], capture_output=True, text=True, check=True).stdout
    weak = [line for line in listed.splitlines() if line[17:19] in ("W ", "V ", "u ")]
    assert not weak, weak
