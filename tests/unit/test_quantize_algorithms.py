"""Rounding, GPTQ, AWQ and 8-bit weights on small matrices, against definitions written down another way."""

import pytest
import torch
from torch import Tensor

from llmx.quantize import grids, source
from llmx.quantize.awq import Clipped, clip, find_scales
from llmx.quantize.gptq import gptq
from llmx.quantize.gram import Gram
from llmx.quantize.grids import (
    Rounding,
    nearest,
    pieces,
    ranged,
    round_to_nearest,
    row_losses,
    rows_of,
    search,
)
from llmx.quantize.source import Lazy, Unit
from llmx.quantize.widths import fp8, int8_rows, rounded_rows, smooth

SYMMETRIC = Rounding(4, 32, True)
ASYMMETRIC = Rounding(4, 32, False)
BOTH = pytest.mark.parametrize("rounding", [SYMMETRIC, ASYMMETRIC], ids=["symmetric", "asymmetric"])


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(tokens: int, width: int, seed: int = 1) -> Tensor:
    """Correlated, some of them large, as a model's are."""
    mixed = draw(tokens, width, seed=seed) @ (draw(width, width, seed=seed + 1) / width**0.5 + torch.eye(width))
    return mixed * (1 + 10 * (torch.arange(width) % 17 == 3))


@BOTH
def test_every_weight_gets_the_code_whose_value_is_nearest(rounding: Rounding) -> None:
    weight = draw(6, 96)
    grid = round_to_nearest(weight, rounding)
    for row in range(6):
        for column in range(96):
            group = column // 32
            values = (torch.arange(16) - float(grid.zeros[row, group])) * grid.scales[row, group]
            least = (values - weight[row, column]).abs().min()
            assert (grid.weight()[row, column] - weight[row, column]).abs() <= least * (1 + 1e-5)


def test_symmetric_scales_are_two_absolute_maxima_over_fifteen_and_zeros_eight() -> None:
    weight = draw(3, 64)
    grid = round_to_nearest(weight, SYMMETRIC)
    wanted = (weight.reshape(3, 2, 32).abs().amax(-1) / 7.5).half().float()
    assert torch.equal(grid.scales, wanted)
    assert (grid.zeros == 8).all()


def test_an_asymmetric_group_of_one_sign_still_has_zero_in_its_range() -> None:
    weight = draw(4, 64).abs() + 1
    for side in (weight, -weight):
        grid = round_to_nearest(side, ASYMMETRIC)
        assert ((grid.weight() - side).abs() <= grid.scales.repeat_interleave(32, 1) * 0.51).all()
        assert set(grid.zeros.flatten().tolist()) <= {0, 15}


@BOTH
def test_a_group_of_zeros_and_one_of_tiny_numbers_stay_finite(rounding: Rounding) -> None:
    weight = torch.cat([torch.zeros(2, 32), draw(2, 32) * 1e-7], 1)
    made = round_to_nearest(weight, rounding).weight()
    assert made.isfinite().all()
    assert (made[:, :32] == 0).all()
    assert (made - weight).abs().max() < 1e-6


@BOTH
def test_the_search_takes_the_range_with_the_least_weighted_error(rounding: Rounding) -> None:
    weight, metric = draw(5, 64), draw(64, seed=3).square()
    found = nearest(weight, *search(weight, rounding, metric), rounding).weight()

    def losses(made: Tensor) -> Tensor:
        return ((made - weight).square() * metric).reshape(5, 2, 32).sum(-1)

    shrinks = [1 - 0.025 * step for step in range(21)]
    tried = [losses(nearest(weight, *ranged(weight, rounding, s), rounding).weight()) for s in shrinks]
    torch.testing.assert_close(losses(found), torch.stack(tried).amin(0))
    assert losses(found).sum() < losses(round_to_nearest(weight, rounding).weight()).sum()


def test_with_a_hessian_the_search_takes_the_range_with_the_least_output_error_of_the_group() -> None:
    weight, x = draw(5, 64), inputs(200, 64)
    found = nearest(weight, *search(weight, ASYMMETRIC, Gram.of(x.T @ x).blocks(32)), ASYMMETRIC).weight()

    def losses(made: Tensor) -> Tensor:
        return torch.stack([((made - weight)[:, s] @ x[:, s].T).square().sum(1) for s in (slice(32), slice(32, 64))], 1)

    shrinks = [1 - 0.025 * step for step in range(21)]
    tried = [losses(nearest(weight, *ranged(weight, ASYMMETRIC, s), ASYMMETRIC).weight()) for s in shrinks]
    torch.testing.assert_close(losses(found), torch.stack(tried).amin(0), rtol=1e-3, atol=1e-5)


def test_a_loss_is_the_squared_error_of_the_outputs() -> None:
    weight, made, x = draw(5, 32), draw(5, 32, seed=9), inputs(50, 32)
    wanted = ((weight - made) @ x.T).square().sum(1)
    torch.testing.assert_close(row_losses(weight, made, Gram.of(x.T @ x)), wanted, rtol=1e-4, atol=1e-4)


def surgeon(weight: Tensor, hessian: Tensor, order: list[int], scales: Tensor, zeros: Tensor) -> Tensor:
    """GPTQ as its paper derives it: after each input the inverse of what is left of the Hessian, computed afresh."""
    w, codes, left = weight.double().clone(), torch.zeros(weight.shape), list(order)
    while left:
        inverse = torch.linalg.inv(hessian.double()[left][:, left])
        column = left.pop(0)
        step, zero = scales[:, column // 32].double(), zeros[:, column // 32].double()
        codes[:, column] = (torch.round(w[:, column] / step) + zero).clamp(0, 15)
        error = (w[:, column] - (codes[:, column] - zero) * step) / inverse[0, 0]
        for place, other in enumerate(left, start=1):
            w[:, other] -= error * inverse[0, place]
    return codes


@BOTH
@pytest.mark.parametrize("act_order", [True, False])
def test_gptq_is_the_papers_update_whatever_the_lazy_blocks(rounding: Rounding, act_order: bool) -> None:
    width = 160  # more than one block of columns
    weight, x = draw(6, width), inputs(600, width)
    hessian = x.T @ x
    diagonal = hessian.diagonal()
    damped = hessian + torch.eye(width) * 0.01 * diagonal.mean()
    order = sorted(range(width), key=lambda i: -float(diagonal[i])) if act_order else list(range(width))
    scales, zeros = search(weight, rounding, diagonal + diagonal.mean() * 1e-3)
    wanted = surgeon(weight, damped, order, scales, zeros)
    solved = gptq(weight, Gram.of(hessian), rounding, damp=0.01, act_order=act_order)
    assert solved.damp == 0.01
    assert (solved.grid.codes == wanted).float().mean() > 0.995  # a tie in f32 may go the other way


@BOTH
def test_gptq_is_much_better_than_round_to_nearest_and_never_worse_in_any_row(rounding: Rounding) -> None:
    weight, x = draw(40, 128), inputs(1000, 128)
    solved = gptq(weight, Gram.of(x.T @ x), rounding)
    direct = ((solved.grid.weight() - weight) @ x.T).square().sum(1)
    plain = ((round_to_nearest(weight, rounding).weight() - weight) @ x.T).square().sum(1)
    torch.testing.assert_close(solved.losses, direct, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(solved.nearest, plain, rtol=1e-3, atol=1e-3)
    assert (direct <= plain * 1.001).all()
    assert direct.sum() < 0.5 * plain.sum()


def test_stacked_rows_get_what_they_get_alone() -> None:
    first, second, x = draw(3, 64), draw(5, 64, seed=4), inputs(300, 64)
    hessian = x.T @ x
    both = gptq(torch.cat([first, second]), Gram.of(hessian), SYMMETRIC)
    for rows, weight in ((slice(3), first), (slice(3, 8), second)):
        alone = gptq(weight, Gram.of(hessian), SYMMETRIC)
        assert (both.grid.codes[rows] == alone.grid.codes).float().mean() > 0.99
        torch.testing.assert_close(both.losses[rows], alone.losses, rtol=0.05, atol=0)


def test_dead_inputs_are_rounded_to_nearest_and_bend_nothing() -> None:
    weight, x = draw(8, 64), inputs(300, 64)
    x[:, [5, 40]] = 0
    solved = gptq(weight, Gram.of(x.T @ x), SYMMETRIC)
    assert solved.dead == 2
    alone = nearest(weight, solved.grid.scales, solved.grid.zeros.float(), SYMMETRIC)
    assert torch.equal(solved.grid.codes[:, [5, 40]], alone.codes[:, [5, 40]])
    assert solved.losses.sum() < solved.nearest.sum()


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_hessian_of_few_tokens_is_factored_with_damping(tokens: int) -> None:
    weight, x = draw(8, 64), inputs(tokens, 64) * 1e4
    solved = gptq(weight, Gram.of(x.T @ x), SYMMETRIC, damp=0.0)
    assert solved.damp is not None
    assert solved.damp > 0
    assert solved.losses.sum() <= solved.nearest.sum()


def test_a_hessian_that_is_not_positive_raises_the_damping_until_it_is() -> None:
    weight, x = draw(8, 64), inputs(300, 64)
    hessian = x.T @ x
    hessian -= torch.eye(64) * hessian.diagonal().mean() * 0.05
    solved = gptq(weight, Gram.of(hessian), SYMMETRIC, damp=0.01)
    assert solved.damp in (0.02, 0.04, 0.08, 0.16)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_without_a_finite_hessian_the_rows_are_rounded_to_nearest_and_it_is_said(value: float) -> None:
    weight, x = draw(8, 64), inputs(300, 64)
    hessian = x.T @ x
    hessian[3, 3] = value
    solved = gptq(weight, Gram.of(hessian), SYMMETRIC)
    assert solved.damp is None
    assert torch.equal(solved.grid.codes, round_to_nearest(weight, SYMMETRIC).codes)


def effective_error(weight: Tensor, x: Tensor, scales: Tensor) -> float:
    """What a linear's outputs lose, computed from outputs alone."""
    made = round_to_nearest(weight * scales, ASYMMETRIC).weight()
    return float(((x / scales) @ made.T - x @ weight.T).square().sum())


def test_awq_scales_up_what_matters_and_its_losses_are_output_errors() -> None:
    weights, x = [draw(24, 64), draw(12, 64, seed=8)], inputs(400, 64)
    found = find_scales(weights, Gram.of(x.T @ x), x.abs().mean(0), ASYMMETRIC, torch.arange(64), 64)
    assert found.loss < 0.9 * found.plain
    large = torch.arange(64) % 17 == 3
    assert found.scales[large].min() > found.scales[~large].median()
    ones = torch.ones(64)
    assert found.loss == pytest.approx(sum(effective_error(w, x, found.scales) for w in weights), rel=1e-2)
    assert found.plain == pytest.approx(sum(effective_error(w, x, ones) for w in weights), rel=1e-2)
    for weight in weights:
        assert effective_error(weight, x, found.scales) <= 1.001 * effective_error(weight, x, ones)


def test_awq_leaves_alone_what_no_scale_makes_better() -> None:
    weight = round_to_nearest(draw(24, 64), ASYMMETRIC).weight()  # on its grid already
    x = inputs(400, 64)
    found = find_scales([weight], Gram.of(x.T @ x), x.abs().mean(0), ASYMMETRIC, torch.arange(64), 64)
    assert (found.scales == 1).all()
    assert found.loss == found.plain


def test_inputs_that_one_producer_makes_share_a_scale() -> None:
    weight, x = draw(24, 64), inputs(400, 64)
    owner = torch.arange(64) % 16  # four heads look at one head's values
    found = find_scales([weight], Gram.of(x.T @ x), x.abs().mean(0), ASYMMETRIC, owner, 16)
    assert found.scales.shape == (16,)
    assert found.loss <= found.plain
    assert found.loss == pytest.approx(effective_error(weight, x, found.scales[owner]), rel=1e-2)


def test_awq_survives_silent_inputs() -> None:
    weight, x = draw(24, 64), inputs(400, 64)
    x[:, 7] = 0
    found = find_scales([weight], Gram.of(x.T @ x), x.abs().mean(0), ASYMMETRIC, torch.arange(64), 64)
    assert found.scales.isfinite().all()
    assert (found.scales > 0).all()


def test_clipped_codes_are_no_worse_than_round_to_nearest_of_the_scaled_weights_in_any_row() -> None:
    weight, x = draw(24, 64), inputs(400, 64)
    scales = draw(64, seed=6).abs() + 0.5
    hessian = x.T @ x
    clipped = clip(weight, scales, torch.ones(24), Gram.of(hessian), ASYMMETRIC)
    direct = ((x / scales) @ clipped.grid.weight().T - x @ weight.T).square().sum(0)
    torch.testing.assert_close(clipped.losses, direct, rtol=1e-2, atol=1e-2)
    made = round_to_nearest(weight * scales, ASYMMETRIC).weight()
    plain = ((x / scales) @ made.T - x @ weight.T).square().sum(0)
    assert (direct <= plain * 1.001).all()
    assert direct.sum() < plain.sum()


def test_pieces_of_matrices_give_what_whole_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, x = [draw(150, 256).bfloat16(), draw(90, 256, seed=8).bfloat16()], inputs(400, 256)
    rows = draw(150, seed=5).abs() + 0.5
    assert torch.equal(rows_of(weights, 140, 170), torch.cat([weights[0][140:], weights[1][:20]]).float())

    def made() -> tuple[Tensor, Clipped]:
        found = find_scales(weights, Gram.of(x.T @ x), x.abs().mean(0), ASYMMETRIC, torch.arange(256), 256)
        return found.scales, clip(weights[0], found.scales, rows, Gram.of(x.T @ x), ASYMMETRIC)

    scales, whole = made()
    with monkeypatch.context() as patch:
        patch.setattr(grids, "NUMBERS", 1)
        assert [len(part) for part in pieces(weights)] == [64, 64, 64, 48]
        assert torch.equal(torch.cat(list(pieces(weights))), torch.cat(weights).float())
        again, parts = made()
    assert torch.equal(scales, again)
    assert torch.equal(whole.grid.codes, parts.grid.codes)
    torch.testing.assert_close(whole.losses, parts.losses, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(whole.nearest, parts.nearest, rtol=1e-3, atol=1e-3)
    lazy, read = Lazy([Unit("a", 150, 256), Unit("b", 90, 256)]), iter(weights)
    lazy.load(lambda _: (next(read), None))
    wanted = lazy(x)
    monkeypatch.setattr(source, "WIDENED", 40 * 256)
    torch.testing.assert_close(lazy(x), wanted)
    torch.testing.assert_close(wanted, x @ torch.cat(weights).float().T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(256, 128), (200, 320), (5, 7)])
def test_each_float8_block_has_its_own_scale_ragged_edges_too(shape: tuple[int, int]) -> None:
    weight = draw(*shape) * torch.linspace(0.01, 30, shape[1])
    codes, scale = fp8(weight, "block", torch.float32)
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    for row in range(0, shape[0], 128):
        for column in range(0, shape[1], 128):
            part = weight[row : row + 128, column : column + 128]
            step = part.abs().max() / 448
            assert scale[row // 128, column // 128] == pytest.approx(float(step), rel=1e-6)
            made = codes[row : row + 128, column : column + 128].float() * step
            assert ((made - part).abs() <= part.abs() * 2**-4 + step * 2**-9).all()  # 3 bits of mantissa


def test_float8_scales_by_row_and_by_tensor_reach_the_largest_weight() -> None:
    weight = draw(6, 32)
    for kind, shape in (("channel", (6, 1)), ("tensor", (1,))):
        codes, scale = fp8(weight, kind, torch.bfloat16)
        assert scale.shape == shape
        assert torch.equal(scale, scale.bfloat16().float())
        assert codes.float().isfinite().all()
        assert ((codes.float() * scale - weight).abs() <= weight.abs() * 0.07 + scale * 2**-9).all()


def test_int8_rows_are_within_half_a_step() -> None:
    weight = draw(6, 32)
    codes, scale = int8_rows(weight, torch.bfloat16)
    assert codes.dtype == torch.int8
    assert int(codes.min()) >= -127
    assert ((codes.float() * scale - weight).abs() <= scale * (0.5 + 127 * 2**-8)).all()


def test_smoothquant_makes_outliers_cheaper_and_no_linear_worse() -> None:
    weights, x = [draw(24, 64), draw(12, 64, seed=8)], inputs(400, 64)
    found = smooth(weights, x, x.abs().amax(0), torch.arange(64), 64, torch.float32)
    assert found.alpha is not None
    assert sum(found.losses) < 0.7 * sum(found.plain)
    for weight, loss, plain in zip(weights, found.losses, found.plain, strict=True):
        assert loss <= plain
        codes, scale = int8_rows(weight * found.scales, torch.float32)
        outputs = rounded_rows(x / found.scales) @ (codes.float() * scale).T
        assert float((outputs - x @ weight.T).square().sum()) == pytest.approx(loss, rel=1e-3)
