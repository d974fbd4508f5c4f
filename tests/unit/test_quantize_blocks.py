"""Weights become the bytes that ggml's own quantisers write: in torch, and in C++ for every instruction set.

data/gguf_quantized.json holds what llama.cpp's library makes of a row; data/make_gguf_quantized.py writes it.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from llmx.kernels import Kernels, cpu
from llmx.kernels.reference.quantize import KINDS
from llmx.schemes import schemes
from tests.data.make_gguf_quantized import rows

STORED = json.loads((Path(__file__).parents[1] / "data" / "gguf_quantized.json").read_text())
REFERENCE = Kernels("cpu", forced="reference").get("quantize_blocks")
needs_native = pytest.mark.skipif(not cpu.available(), reason=f"cpu kernels: {cpu.describe()}")


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def odd_rows() -> Tensor:
    """(16, 512): what divides by zero, overflows, ties, or has one sign only."""
    x = randn(16, 512)
    x[0], x[1, :256], x[2] = 0, 1, -1
    x[3] *= 1e-20
    x[4, ::2] = 0
    x[5], x[6] = x[5].abs(), -x[6].abs()
    x[7, 3] = 1e4
    x[8] = x[8].round()
    x[9, 32:64] = 0
    x[10] = x[10].exp()
    x[11] *= 1e30
    x[12] *= 1e37
    x[13] *= 1e-6
    x[14, :16] *= 1e-8
    x[15] = x[15].bfloat16()
    return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", ["plain", "importance"])
def test_the_bytes_are_those_of_ggmls_quantiser(kind: str, given: str) -> None:
    weights, importance = rows()
    want = list(base64.b85decode(STORED[kind][given]))
    assert REFERENCE(weights, kind, importance if given == "importance" else None).tolist() == [want]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_the_simple_types_are_as_the_gguf_package_rounds_them(kind: str) -> None:
    weights = torch.cat([randn(50, 512), odd_rows()[:11]])
    want = gguf.quantize(weights.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(REFERENCE(weights, kind), torch.from_numpy(want))


@pytest.mark.parametrize(("kind", "most"), [("Q2_K", 0.31), ("Q3_K", 0.16), ("Q4_K", 0.073), ("Q5_K", 0.037)])
def test_the_gguf_package_reads_weights_back_that_are_near(kind: str, most: float) -> None:
    weights = randn(8, 512)
    stored = REFERENCE(weights, kind)
    back = torch.from_numpy(gguf.dequantize(stored.numpy(), gguf.GGMLQuantizationType[kind]))
    assert float((back - weights).square().mean().sqrt()) < most
    scheme = next(s for s in schemes().values() if getattr(s, "kind", None) == kind)
    assert torch.equal(scheme.unpack({"weight": stored}, torch.float32), back)


@pytest.mark.parametrize("kind", KINDS)
def test_importance_lowers_the_error_where_it_says(kind: str) -> None:
    if kind == "Q8_0":
        pytest.skip("Q8_0 has nothing to choose")
    weights, importance = randn(8, 512), torch.rand(512, generator=torch.Generator().manual_seed(1)) ** 4
    scheme = next(s for s in schemes().values() if getattr(s, "kind", None) == kind)

    def error(stored: Tensor) -> float:
        return float((importance * (scheme.unpack({"weight": stored}, torch.float32) - weights).square()).sum())

    assert error(REFERENCE(weights, kind, importance)) < 0.97 * error(REFERENCE(weights, kind))


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_cpp_writes_the_bytes_of_torch(isa: str, kind: str) -> None:
    quantize = Kernels("cpu", forced="cpu").get("quantize_blocks")
    importance = torch.rand(512, generator=torch.Generator().manual_seed(2)) ** 4
    importance[64:300] = 0
    threads = torch.get_num_threads()
    try:
        for weights in (odd_rows(), randn(40, 512), randn(3, 3 * KINDS[kind][0])):
            for given in (None, importance[: weights.shape[1]] if weights.shape[1] <= 512 else None):
                want = REFERENCE(weights, kind, given)
                for count in (1, 3):
                    torch.set_num_threads(count)
                    assert torch.equal(quantize(weights, kind, given), want)
    finally:
        torch.set_num_threads(threads)
