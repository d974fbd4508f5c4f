"""Linear layers whose rows are rounded to 8 bits: each sum of products is exact, and the rest is one chain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmx.kernels import Kernels, cpu
from llmx.kernels.reference.linear import round_rows
from llmx.schemes.base import Axis, Kind, Segment, apply
from llmx.schemes.blocks import BlockScheme, PartedScheme
from tests.unit.test_linear_packed import BLOCKS, as_plain, draw, packed_of, random_blocks

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"cpu kernels: {cpu.describe()}")
PARTED = [scheme for scheme in BLOCKS if isinstance(scheme, PartedScheme)]
KERNELS = Kernels("cpu", forced="cpu", activations="int8")
BOTH = pytest.mark.parametrize("how", ["int8", "int8-pow2"])


def linear(x: Tensor, *segments: tuple[str, Tensor, int, Tensor | None], how: str = "int8") -> Tensor:
    result: Tensor = KERNELS.get("linear_packed")(x, segments, how)
    return result


def made(scheme: BlockScheme, n_out: int, n_in: int) -> tuple[str, Tensor, int, None, Tensor]:
    """A segment, and its weights in float64."""
    stored = random_blocks(scheme, n_out, n_in)
    layout, packed = packed_of(scheme, stored)
    weight = scheme.unpack_blocks(stored.reshape(-1, scheme.block_bytes)).reshape(n_out, n_in)
    return layout, packed, n_out, None, weight.double()


@pytest.mark.parametrize("scheme", PARTED, ids=lambda s: s.kind)
@pytest.mark.parametrize(("n_out", "n_in"), [(1, 256), (40, 512), (130, 768)])
@BOTH
def test_a_product_is_that_of_the_rounded_row(isa: str, how: str, scheme: PartedScheme, n_out: int, n_in: int) -> None:
    *segment, weight = made(scheme, n_out, n_in)
    for rows in (1, 2, 3, 5, 8, 13, 33):
        x = draw(rows, n_in, seed=rows) * torch.logspace(-3, 3, n_in)
        rounded = round_rows(x, how == "int8-pow2").double()
        bound = rounded.abs() @ weight.abs().T + 1e-30
        assert float(((linear(x, tuple(segment), how=how) - rounded @ weight.T).abs() / bound).max()) < 2e-6


@pytest.mark.parametrize("scheme", PARTED, ids=lambda s: s.kind)
def test_where_scales_are_powers_of_two_both_ways_give_the_same_bits(isa: str, scheme: PartedScheme) -> None:
    """Adding to a weight's exponent is a product, of weights that are zero too."""
    *segment, weight = made(scheme, 40, 512)
    assert bool((weight == 0.0).any()) or scheme.kind in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
    for rows in (1, 2, 3, 4, 8, 12, 33):
        x = draw(rows, 512, seed=rows).clamp(-3, 3)
        x[:, ::32] = 127.0 / 32.0
        x *= 2.0 ** torch.arange(-48, 48, 6).repeat_interleave(32)
        x[:, 64:96] = 0.0
        assert torch.equal(linear(x, tuple(segment), how="int8-pow2"), linear(x, tuple(segment)))


def test_powers_of_two_as_they_are_defined() -> None:
    x = torch.zeros(6, 32)
    x[:, :2] = torch.tensor([127.0, 127.5, 254.0, 1.0, -64.0, 255.0])[:, None]
    x[:, 2] = 0.75
    steps = torch.tensor([1.0, 2.0, 2.0, 1 / 64, 1.0, 4.0])[:, None]
    assert torch.equal(round_rows(x, True), (x / steps).round() * steps)
    small, large = 2.0**-93, 2.0**106
    edge = torch.tensor([[small], [small * 1.001], [large], [large * 1.001], [torch.inf], [torch.nan]]).expand(-1, 32)
    got = round_rows(edge, True)
    assert not got[0].any()
    assert got[3:].isnan().all()
    assert torch.allclose(got[1:3], edge[1:3], rtol=1 / 127)


def with_large_ones(rows: int, n_in: int, seed: int) -> Tensor:
    """One number of 30 is many times the others: of 32 there may be one such, several or none."""
    generator = torch.Generator().manual_seed(1000 + seed)
    large = torch.rand(rows, n_in, generator=generator) < 1 / 30
    large[:, :32] = False
    return draw(rows, n_in, seed=seed) * torch.where(large, 50.0, 1.0)


@pytest.mark.parametrize("scheme", PARTED, ids=lambda s: s.kind)
@BOTH
def test_what_exceeds_the_rest_is_multiplied_as_it_is(isa: str, how: str, scheme: PartedScheme) -> None:
    *segment, weight = made(scheme, 40, 512)
    for rows in (1, 3, 4, 12, 33):
        x = with_large_ones(rows, 512, seed=rows)
        rounded = round_rows(x, how == "int8-pow2").double()
        kept = (rounded == x.double()) & (x.abs() > 8 * x.abs().median())
        assert 0 < int(kept.sum()) < rows * 512 / 32
        bound = rounded.abs() @ weight.abs().T + 1e-30
        got = linear(x, tuple(segment), how=how)
        assert float(((got - rounded @ weight.T).abs() / bound).max()) < 2e-6


def test_a_single_large_number_costs_the_others_nothing() -> None:
    for powers in (False, True):
        x = draw(50, 32, seed=3)
        alone = x.clone()
        alone[:, 7] = 0.0
        x[:, 7] = 1001.0
        got = round_rows(x, powers)
        assert torch.equal(got[:, 7], x[:, 7])
        got[:, 7] = 0.0
        assert torch.equal(got, round_rows(alone, powers))
        x[:, 20] = -900.0  # two: neither is apart
        assert bool((round_rows(x, powers)[:, :7].abs() <= 8.0).all())
        assert not torch.equal(round_rows(x, powers)[:, 20], x[:, 20])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q8_0", "Q6_K", "Q2_K"])
@BOTH
def test_a_rows_bits_depend_on_neither_rows_nor_threads(isa: str, how: str, kind: str) -> None:
    *segment, _ = made(next(s for s in PARTED if s.kind == kind), 100, 768)
    segment[3] = draw(100, seed=5)
    x, threads = with_large_ones(33, 768, seed=4), torch.get_num_threads()
    alone = torch.cat([linear(row[None], tuple(segment), how=how) for row in x])
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            for rows in range(1, 34):
                assert torch.equal(linear(x[:rows], tuple(segment), how=how), alone[:rows])
    finally:
        torch.set_num_threads(threads)


def test_extremes_are_exact(isa: str) -> None:
    """The largest codes against the largest numbers, of either sign: 16 bits hold the sums of a group."""
    for kind, low, high in (("Q4_1", 0, 15), ("Q4_0", -8, 7), ("Q8_0", -128, 127)):
        scheme = next(s for s in PARTED if s.kind == kind)
        for code in (low, high):
            byte = {"Q4_1": code * 17, "Q4_0": (code + 8) * 17, "Q8_0": code & 255}[kind]
            block = torch.full((scheme.block_bytes,), byte, dtype=torch.uint8)
            scales = torch.tensor([1.0, 0.0]).half()[: 2 if kind == "Q4_1" else 1].view(torch.uint8)
            block[: len(scales)] = scales
            layout, packed = packed_of(scheme, block.expand(16, -1).repeat(1, 8).contiguous())
            for sign in (127.0, -127.0):
                got = linear(torch.full((3, 256), sign), (layout, packed, 16, None))
                assert torch.equal(got, torch.full((3, 16), code * sign * 256))


def test_segments_of_different_kinds_are_one_call(isa: str) -> None:
    x, bias = draw(5, 256), draw(20, seed=1)
    *four, weight = made(next(s for s in PARTED if s.kind == "Q4_K"), 20, 256)
    plain = draw(7, 256, seed=2)
    got = linear(x, (four[0], four[1], 20, bias), ("F32", as_plain(plain), 7, None))
    assert got.shape == (5, 27)
    assert torch.equal(got[:, :20], linear(x, (four[0], four[1], 20, bias)))
    assert torch.allclose(got[:, :20].double(), round_rows(x).double() @ weight.T + bias, rtol=1e-4, atol=1e-3)
    exact = KERNELS.get("linear_packed")(x, [("F32", as_plain(plain), 7, None)])
    assert torch.equal(got[:, 20:], exact)  # plain numbers are never multiplied with rounded rows


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["Q4_K", "Q4_0"])
@BOTH
def test_what_is_no_number_stays_none_and_stays_in_its_row(isa: str, how: str, kind: str, bad: float) -> None:
    *segment, _ = made(next(s for s in PARTED if s.kind == kind), 20, 256)
    for rows in (9, 25, 33):  # one tile, shared by threads, and more
        x = draw(rows, 256)
        good = linear(x, tuple(segment), how=how)
        for row in (4, rows - 1):  # rounded with others, and alone
            worse = x.clone()
            worse[row, 100] = bad
            got = linear(worse, tuple(segment), ("F32", as_plain(draw(3, 256)), 3, None), how=how)[:, :20]
            assert got[row].isnan().all()
            keep = torch.arange(rows) != row
            assert torch.equal(got[keep], good[keep])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@BOTH
def test_a_scale_that_is_no_number_stays_none_and_stays_in_its_output(isa: str, how: str, bad: float) -> None:
    scheme = next(s for s in PARTED if s.kind == "Q4_0")
    stored = random_blocks(scheme, 20, 256)
    x = draw(9, 256)
    layout, packed = packed_of(scheme, stored)
    good = linear(x, (layout, packed, 20, None), how=how)
    stored[3, :2] = torch.tensor([bad]).half().view(torch.uint8)
    layout, packed = packed_of(scheme, stored)
    got = linear(x, (layout, packed, 20, None), how=how)
    assert not got[:, 3].isfinite().any()
    keep = torch.arange(20) != 3
    assert torch.equal(got[:, keep], good[:, keep])


@BOTH
def test_zeros_give_zero(isa: str, how: str) -> None:
    *segment, _ = made(next(s for s in PARTED if s.kind == "Q4_K"), 20, 256)
    assert torch.equal(linear(torch.zeros(5, 256), tuple(segment), how=how), torch.zeros(5, 20))


@pytest.mark.parametrize("tiny", [1e-35, 1e-37, 1e-40, 1e-45])
@BOTH
def test_tiny_numbers_give_tiny_ones(isa: str, how: str, tiny: float) -> None:
    """127 by one of them may be infinite, and zero times that no number."""
    x = draw(3, 256) * tiny
    x[:, ::3] = 0.0
    for kind in ("Q4_0", "Q4_K", "Q8_0"):
        *segment, weight = made(next(s for s in PARTED if s.kind == kind), 20, 256)
        off = linear(x, tuple(segment), how=how).double() - x.double() @ weight.T
        assert bool((off.abs() <= 2 * x.double().abs() @ weight.abs().T + 1e-44).all())
    assert bool(((round_rows(x, how == "int8-pow2") - x).abs() <= x.abs().amax()).all())


@pytest.mark.parametrize("activations", ["int8", "int8-pow2", "bf16"])
def test_the_reference_rounds_rows_where_the_kernel_does(activations: str) -> None:
    scheme = next(s for s in PARTED if s.kind == "Q4_1")
    stored, x = random_blocks(scheme, 24, 256), draw(6, 256)
    layout = {"weight": (Axis(Kind.OUT), Axis(Kind.IN, scheme.block_bytes, scheme.size))}
    found = {}
    for backend in ("cpu", "reference"):
        kernels = Kernels("cpu", forced=backend, activations=activations)
        tensors = scheme.prepare({"weight": stored}, layout, torch.float32, kernels)
        found[backend] = apply(x, [Segment(scheme, 24, layout, tensors, None, True)], kernels)
    assert torch.allclose(found["cpu"], found["reference"], rtol=1e-4, atol=1e-3)
    exact = x.double() @ scheme.unpack({"weight": stored}, torch.float32).double().T
    differs = not torch.allclose(found["cpu"].double(), exact, rtol=1e-4, atol=1e-3)
    assert differs == (activations != "bf16")
