"""Weights become the bytes that ggml's own quantisers write: in torch, and in C++ for every instruction set.

data/gguf_quantized.json holds what llama.cpp's library makes of a row; data/make_gguf_quantized.py writes it.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from llmx.kernels import Kernels, cpu
from llmx.kernels.reference.quantize import KINDS
from llmx.kernels.reference.quantize import quantize_blocks as REFERENCE
from llmx.schemes import schemes
from tests.data.make_gguf_quantized import rows

STORED = json.loads((Path(__file__).parents[1] / "data" / "gguf_quantized.json").read_text())
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_native)])
def test_the_op_writes_the_bytes_of_torch(isa: str, backend: str, kind: str) -> None:
    quantize = Kernels("cpu", forced=backend).get("quantize_blocks")
    importance = torch.rand(512, generator=torch.Generator().manual_seed(2)) ** 4
    importance[64:300] = 0
    for weights in (odd_rows(), randn(40, 512), randn(3, 3 * KINDS[kind][0])):
        for given in (None, importance[: weights.shape[1]] if weights.shape[1] <= 512 else None):
            want = REFERENCE(weights, kind, given).numpy()
            for threads in (1, 3):
                made = quantize(weights.numpy(), kind, None if given is None else given.numpy(), threads)
                assert np.array_equal(made, want)


@needs_native
def test_rows_at_odd_addresses_and_between_others_are_read_too() -> None:
    quantize = Kernels("cpu", forced="cpu").get("quantize_blocks")
    weights = randn(6, 64).numpy()
    odd = np.frombuffer(b"0" + weights.tobytes(), np.uint8)[1:].view(np.float32).reshape(6, 64)
    assert not odd.flags.aligned
    assert np.array_equal(quantize(odd, "Q8_0"), quantize(weights, "Q8_0"))
    assert np.array_equal(quantize(weights[::2], "Q8_0"), quantize(weights, "Q8_0")[::2])


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_native)])
def test_every_half_is_widened_to_its_number(isa: str, backend: str, kind: str, dtype: torch.dtype) -> None:
    widen = Kernels("cpu", forced=backend).get("widen_halves")
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).reshape(256, 256)
    finite = halves.view(dtype).isfinite().numpy()
    want = halves.view(dtype).float().numpy()
    assert np.array_equal(widen(halves.numpy().view(np.uint16), kind)[finite], want[finite])
    odd = np.frombuffer(b"0" + halves.numpy().tobytes(), np.uint8)[1:].view(np.uint16)
    assert np.array_equal(widen(odd, kind)[finite.reshape(-1)], want[finite])
    assert not np.isfinite(widen(halves.numpy().view(np.uint16), kind)[~finite]).any()
