"""The stand-in for AVX-512 that `make emulate` tests kernels with: as the instructions are defined, no more."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from llmx.kernels import cpu

ROOT = Path(__file__).parents[2]
CPU, NATIVE = ROOT / "kernels" / "cpu", ROOT / "tests" / "native"
HEADER, DRIVER = NATIVE / "avx512_emulated.h", NATIVE / "emulated_driver.cpp"
found = cpu.native()
pytestmark = pytest.mark.skipif(
    found is None or not {"avx2", "avx512"} & set(found.isas()), reason=f"no AVX2; cpu kernels: {cpu.describe()}"
)

KNOWN = "_mm512_add_ps(x, _mm512_mask_mov_ps(x, mask, _mm512_setzero_ps()))"
UNKNOWN = {
    "an operation": "_mm512_sqrt_ps(x)",
    "without a register of that width": "_mm512_add_ps(x, _mm512_set4_ps(1.0f, 2.0f, 3.0f, 4.0f))",
    "of masks alone": "_mm512_mask_mov_ps(x, _mm512_kand(mask, 3), _mm512_setzero_ps())",
    "another way to round": "_mm512_roundscale_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC)",
    "another comparison": "_mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_EQ_OQ), _mm512_setzero_ps())",
}
SNIPPET = """#define LLMX_ISA avx512
#include "avx512_emulated.h"
namespace avx512 {
void f(float* p, __mmask16 mask) {
  const __m512 x = _mm512_loadu_ps(p);
  _mm512_storeu_ps(p + mask, VALUE);
}
}
"""


def compiled(source: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    command = [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-march=x86-64-v3", f"-I{NATIVE}", *flags]
    return subprocess.run([*command, str(source)], capture_output=True, text=True)


def test_each_intrinsic_is_as_it_is_defined(tmp_path: Path) -> None:
    done = compiled(DRIVER, "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-o", str(tmp_path / "driver"))
    assert done.returncode == 0, done.stderr
    ran = subprocess.run([tmp_path / "driver"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "ok\n"), ran.stderr


def test_what_kernels_call_is_what_is_emulated_and_checked() -> None:
    # what the set avx512bf16 has beside it is not compiled for this one
    more = re.compile(r"^#if defined\(__AVX512BF16__\)$.*?^#endif$", re.MULTILINE | re.DOTALL)
    names = [
        set(re.findall(r"\b_mm512_\w+", "".join(more.sub("", file.read_text()) for file in files)))
        for files in ([*CPU.glob("*.cpp"), *CPU.glob("*.h")], [DRIVER])
    ]
    defined = re.findall(r"EMULATED \w+ (_mm512_\w+)\(|EACH\(\w+, (\w+), |SHIFT\((\w+)\)\n", HEADER.read_text())
    listed = {whole or f"_mm512_{each or shift}" for whole, each, shift in defined} - {"_mm512_name"}
    assert len(listed) > 40
    assert names == [listed, listed]


def test_anything_else_does_not_compile(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.cpp"
    for what, code in {"what is there": KNOWN, **UNKNOWN}.items():
        snippet.write_text(SNIPPET.replace("VALUE", code))
        done = compiled(snippet, "-Wno-psabi", "-c", "-o", str(tmp_path / "snippet.o"))
        assert (done.returncode == 0) == (code is KNOWN), (what, done.stderr)
        assert code is KNOWN or "error" in done.stderr
