"""Group grids in C++ against their definitions in torch, for every instruction set."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from llmx.kernels import Kernels, cpu
from llmx.quantize import gptq as solver
from llmx.quantize.gptq import gptq
from llmx.quantize.gram import Gram
from llmx.quantize.grids import Rounding, nearest, nearest_errors, round_to_nearest, search, search_in_torch

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"cpu kernels: {cpu.describe()}")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ROUNDINGS = [
    Rounding(bits, group, symmetric, dtype)
    for (bits, group), symmetric, dtype in itertools.product(
        ((2, 16), (3, 64), (4, 128), (8, 48)), (True, False), DTYPES
    )
]
NAMES = [f"{r.bits}-bit g{r.group} {'sym' if r.symmetric else 'asym'} {str(r.dtype)[6:]}" for r in ROUNDINGS]
CASES = pytest.mark.parametrize("rounding", ROUNDINGS, ids=NAMES)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights() -> Tensor:
    """Rows of all sizes, down to where float16's scales are subnormal; one of zeros, one of one sign, one too large."""
    weight = draw(33, 384, seed=1) * 10 ** torch.linspace(-7, 3, 33)[:, None]
    weight[3], weight[5], weight[7, 100] = 0, weight[5].abs(), 3e6
    return weight


@CASES
def test_round_to_nearest_under_scales_is_that_of_torch_to_the_bit(isa: str, rounding: Rounding) -> None:
    weight, columns = weights(), draw(384, seed=2).abs() + 0.2
    wanted = weight - round_to_nearest(weight * columns, rounding).weight() / columns
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        got = nearest_errors(weight, columns, rounding)
        torch.set_num_threads(threads)
        assert torch.equal(got.nan_to_num(), wanted.nan_to_num())  # of an infinite scale both make nothing of use
        assert torch.equal(got.isnan(), wanted.isnan())


@CASES
@pytest.mark.parametrize("quadratic", [False, True], ids=["diagonal", "quadratic"])
def test_the_range_that_is_found_has_the_least_loss(isa: str, rounding: Rounding, quadratic: bool) -> None:
    weight, group = weights(), rounding.group
    weight[7] = 1
    metric = draw(384, seed=3).abs()
    if quadratic:
        half = draw(384 // group, group, group, seed=4)
        metric = half @ half.mT

    def loss(scales: Tensor, zeros: Tensor) -> Tensor:
        error = (nearest(weight, scales, zeros, rounding).weight() - weight).unflatten(1, (-1, group)).double()
        if quadratic:
            return (torch.einsum("rgi,gij->rgj", error, metric.double()) * error).sum(-1)
        return (error.square() * metric.double().unflatten(0, (-1, group))).sum(-1)

    wanted = search_in_torch(weight, rounding, metric)
    got = search(weight, rounding, metric)
    same = (got[0] == wanted[0]) & (got[1] == wanted[1])
    assert same.float().mean() > 0.99  # of two that are as good, sums in another order may take the other
    torch.testing.assert_close(loss(*got), loss(*wanted), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("rows", "n_in"), [(1, 64), (16, 192), (37, 320)])
def test_the_sweep_gives_the_codes_of_torch(
    isa: str, bits: int, rows: int, n_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounding, weight, x = Rounding(bits, 64, True), draw(rows, n_in, seed=5), draw(700, n_in, seed=6)
    hessian = Gram.of(x.T @ x)
    got = gptq(weight, hessian, rounding)
    monkeypatch.setattr(solver, "kernels_for", lambda *_: None)
    wanted = gptq(weight, hessian, rounding)
    assert (
        got.grid.codes == wanted.grid.codes
    ).float().mean() > 0.99  # a tie may fall the other way, with what follows
    torch.testing.assert_close(got.losses.sum(), wanted.losses.sum(), rtol=1e-3, atol=0)


def test_groups_that_the_kernels_do_not_know_are_left_to_torch() -> None:
    can = Kernels("cpu").get("can_group")
    assert can(48, torch.float16)
    assert not can(24, torch.float16)
    assert not can(2048, torch.float16)
    assert not can(64, torch.float64)
    weight, rounding = draw(5, 48, seed=7), Rounding(4, 24, False)
    wanted = weight - round_to_nearest(weight, rounding).weight()
    assert torch.equal(nearest_errors(weight, torch.ones(48), rounding), wanted)
