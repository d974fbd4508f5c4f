"""The reference linear, the layers on it, and that a row's bits do not depend on the other rows."""

from __future__ import annotations

import pytest
import torch
from checkpoints import randn
from torch.nn import functional

from llmx.kernels import Kernels
from llmx.kernels.reference.linear import linear, on_amd
from llmx.layers.embedding import Embedding
from llmx.layers.linear import Linear
from llmx.schemes.base import Axis, Kind, Segment
from llmx.schemes.dense import SCHEME as DENSE
from llmx.schemes.gguf_q8_0 import SCHEME as Q8_0

LAYOUT = {"weight": (Axis(Kind.OUT), Axis(Kind.IN))}
SHAPES = [(576, 576), (960, 576), (64, 32), (1, 32), (3, 64), (48, 64), (130, 52), (96, 1536)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n_out", "n_in"), SHAPES)
def test_a_row_has_the_same_bits_among_1_to_40_rows(n_out: int, n_in: int, dtype: torch.dtype) -> None:
    x, weight, bias = randn(300, n_in).to(dtype), randn(n_out, n_in, seed=1), randn(n_out, seed=2)
    whole = linear(x, weight, bias)
    for rows in [*range(1, 41), 64, 100, 257]:
        start = rows % 7
        assert torch.equal(linear(x[start : start + rows], weight, bias), whole[start : start + rows]), rows


@pytest.mark.parametrize("amd", [on_amd(), False])
@pytest.mark.parametrize("threads", [1, 2])
def test_nor_does_it_with_more_threads(threads: int, amd: bool, monkeypatch) -> None:
    """What is right on any processor is, on AMD's, too."""
    monkeypatch.setattr("llmx.kernels.reference.linear.on_amd", lambda: amd)
    torch.set_num_threads(threads)
    for n_out, n_in in ((1536, 576), (128, 896), (16, 4096)):
        x, weight = randn(530, n_in), randn(n_out, n_in, seed=1)
        whole = linear(x, weight, None)
        assert all(torch.equal(linear(x[5 : 5 + n], weight, None), whole[5 : 5 + n]) for n in (1, 2, 3, 5, 33, 130))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_product_in_float32_rounded_once(dtype: torch.dtype) -> None:
    x, weight, bias = randn(9, 256).to(dtype), randn(70, 256, seed=1), randn(70, seed=2)
    got = linear(x, weight, bias)
    assert got.dtype == dtype
    exact = functional.linear(x.double(), weight.double(), bias.double())
    spacing = torch.finfo(dtype).eps * exact.abs() + 1e-4
    assert bool(((got.double() - exact).abs() <= spacing).all())
    unrounded = linear(x.float(), weight, bias)
    assert torch.equal(got, unrounded.to(dtype))


def test_no_rows_give_no_rows() -> None:
    assert linear(torch.empty(0, 32), randn(5, 32), None).shape == (0, 5)


def dense(n_out: int, seed: int, bias: bool = False) -> Segment:
    return Segment(DENSE, n_out, LAYOUT, {"weight": randn(n_out, 64, seed=seed)}, randn(n_out) if bias else None, True)


def test_segments_lie_side_by_side_in_order_and_each_run_of_a_scheme_is_one_call(monkeypatch) -> None:
    packed = Segment(Q8_0, 32, LAYOUT, Q8_0.pack(randn(32, 64, seed=3), "Q8_0"))
    segments = [dense(16, 1, bias=True), dense(8, 2), packed, dense(4, 4)]
    calls = []

    def counted(x, run, kernels):
        calls.append(len(run))
        return type(DENSE).apply(DENSE, x, run, kernels)

    monkeypatch.setattr(DENSE, "apply", counted)
    layer = Linear(segments, 64, Kernels("cpu", "reference"))
    x = randn(6, 64, seed=5)
    got = layer(x)
    assert layer.n_out == 60
    assert calls == [2, 1]
    parts = [linear(x, s.tensors["weight"], s.bias) for s in (segments[0], segments[1])]
    parts += [
        linear(x, Q8_0.unpack(packed.tensors, torch.float32), None),
        linear(x, segments[3].tensors["weight"], None),
    ]
    assert torch.equal(got, torch.cat(parts, 1))


def test_a_linear_asserts_the_width_of_its_input() -> None:
    with pytest.raises(AssertionError, match="64 inputs"):
        Linear([dense(4, 0)], 64, Kernels("cpu", "reference"))(randn(2, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("forced", ["reference", None])
def test_an_embedding_row_is_the_unpacked_row(dtype: torch.dtype, forced: str | None) -> None:
    place = {"hidden": 64, "kernels": Kernels("cpu", forced)}
    packed = Q8_0.pack(randn(20, 64), "Q8_0")
    rows = Q8_0.unpack(packed, dtype)
    ids = torch.tensor([19, 0, 7, 7])
    whole = Embedding(Q8_0, packed, {"weight": 0}, dtype, first=0, rows=20, whole=True, **place)
    assert torch.equal(whole(ids), rows[ids])
    assert whole(ids).dtype == dtype
    upper = {"weight": packed["weight"][5:10]}
    part = Embedding(Q8_0, upper, {"weight": 0}, dtype, first=5, rows=5, whole=False, **place)
    assert torch.equal(part(ids), torch.stack([rows[0] * 0, rows[0] * 0, rows[7], rows[7]]))
    assert part(ids).dtype == dtype
