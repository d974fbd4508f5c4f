"""Sums, copies, norms of heads, embeddings and recordings in C++, for every instruction set that runs here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from llmx.kernels import Kernels, cpu
from llmx.schemes import schemes

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"cpu kernels: {cpu.describe()}")
NATIVE, REFERENCE = Kernels("cpu", forced="cpu"), Kernels("cpu", forced="reference")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both(op: str, *args: object) -> tuple[Tensor, Tensor]:
    return NATIVE.get(op)(*args), REFERENCE.get(op)(*args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("width", [1, 17, 576, 1000])
def test_sums_have_the_bits_of_the_reference(isa: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x, y = draw(rows, width).to(dtype), draw(rows, width, seed=1).to(dtype)
    for scale in (1.0, 0.22, 3.0):
        for other in (None, y):
            got, want = both("add_scaled", x, scale, other)
            assert got.dtype == dtype
            assert torch.equal(got, want), (scale, other is None)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
@pytest.mark.parametrize("width", [1, 3, 32, 577])
def test_rows_are_taken(isa: str, dtype: torch.dtype, width: int) -> None:
    x = (draw(20, width) * 10).to(dtype)
    for index in ([0], [19, 0, 7, 7], [20, 5, 10**9], list(range(20)) * 3):
        got, want = both("take_rows", x, torch.tensor(index))
        assert torch.equal(got, want)
    assert torch.equal(NATIVE.get("take_rows")(x.T.contiguous().T, torch.tensor([3])), x[3:4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_joined(isa: str, dtype: torch.dtype) -> None:
    for rows in (1, 9):
        parts = [draw(rows, width, seed=width).to(dtype) for width in (5, 1, 64, 33)]
        for count in (1, 2, 4):
            got, want = both("join_columns", parts[:count])
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (6, 2, 24), (1, 1, 5), (4, 4, 256)])
@pytest.mark.parametrize("whole", [False, True])
def test_norms_of_heads(isa: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, whole: bool) -> None:
    widths = heads * dim, kv_heads * dim
    weights = [draw(width if whole else dim, seed=i) for i, width in enumerate(widths)]
    qkv = (draw(33, widths[0] + 2 * widths[1], seed=3) * 4).to(dtype)
    got, want = both("norm_heads", qkv, *widths, *weights, 1e-6)
    assert got.dtype == dtype
    close = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got, want, rtol=close, atol=close)
    assert torch.equal(got[:, sum(widths) :], qkv[:, sum(widths) :])
    norm = NATIVE.get("rms_norm")(qkv[:, : widths[0]].reshape(-1, len(weights[0])), weights[0], 1e-6)
    assert torch.equal(got[:, : widths[0]], norm.view(33, -1)), "the bits of the norm over plain rows"
    alone = torch.cat([NATIVE.get("norm_heads")(row[None], *widths, *weights, 1e-6) for row in qkv])
    assert torch.equal(got, alone)


@pytest.mark.parametrize("inner", [1, 24, 1536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_gelu(isa: str, inner: int, dtype: torch.dtype) -> None:
    x = (draw(11, 2 * inner) * 3).to(dtype)
    gate, up = x.double().chunk(2, -1)
    want, got = (torch.nn.functional.gelu(gate) * up).to(dtype), NATIVE.get("gelu_mul")(x)
    assert got.dtype == dtype
    close = 2e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got, want, rtol=close, atol=close)
    assert torch.equal(got, torch.cat([NATIVE.get("gelu_mul")(row[None]) for row in x]))


KINDS = [s.kind for s in schemes().values() if hasattr(s, "kind") and NATIVE.get("can_look_up")(s.kind)]


def test_the_common_types_of_blocks_can_be_looked_up() -> None:
    assert set(KINDS) >= {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"}
    assert not NATIVE.get("can_look_up")("IQ1_S")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_have_the_bits_of_the_scheme(isa: str, kind: str, dtype: torch.dtype) -> None:
    """On random bytes: every code, scale and minimum that a type has; numbers that are none stay out."""
    scheme = next(s for s in schemes().values() if getattr(s, "kind", None) == kind)
    size, each = scheme.size, scheme.block_bytes
    raw = torch.randint(0, 256, (40, 3 * each), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    every = scheme.unpack({"weight": raw}, torch.float32)
    good = raw[every.isfinite().all(1)]
    assert len(good) > 5
    ids = torch.tensor([len(good) - 1, 0, 3, 3, 1])
    got = NATIVE.get("look_up")(good, kind, ids, 3 * size, dtype)
    assert got.dtype == dtype
    assert torch.equal(got, scheme.unpack({"weight": good[ids]}, dtype))


@pytest.mark.parametrize(("kind", "stored"), [("F32", DTYPES[0]), ("F16", DTYPES[2]), ("BF16", DTYPES[1])])
@pytest.mark.parametrize("hidden", [1, 33, 576])
def test_plain_embeddings(isa: str, kind: str, stored: torch.dtype, hidden: int) -> None:
    table, ids = draw(9, hidden).to(stored), torch.tensor([8, 0, 4, 4])
    for dtype in DTYPES:
        got = NATIVE.get("look_up")(table, kind, ids, hidden, dtype)
        assert torch.equal(got, table[ids].to(dtype))


def test_a_recording_replays_on_what_now_lies_where_it_read(isa: str) -> None:
    recorder = NATIVE.get("recorder")()
    add, norm, weight = NATIVE.get("add_scaled"), NATIVE.get("rms_norm"), draw(40, seed=9)
    x, y = draw(3, 40), draw(3, 40, seed=1)

    def run() -> Tensor:
        found = x
        for scale in (0.5, 2.0, 3.0):
            found = norm(add(found, scale, y).view(3, 40), weight, 1e-5)
        return found

    result, recorded = recorder.record(run)
    assert recorder.refused is None
    assert len(recorded) == 6
    assert torch.equal(result, run())
    for seed in (5, 6):
        x.copy_(draw(3, 40, seed=seed))
        recorded.replay()
        assert torch.equal(result, run())


def test_a_recording_made_dry_serves_as_many_rows_and_fewer(isa: str) -> None:
    recorder, most = NATIVE.get("recorder")(), 7
    add, norm, gated, take = (NATIVE.get(op) for op in ("add_scaled", "rms_norm", "silu_mul", "take_rows"))
    weight, table = draw(40, seed=9), draw(30, 80, seed=3)
    x, index = draw(most, 40), torch.arange(most) * 3

    def run(rows: int = most) -> Tensor:
        wide = take(table, index[:rows])
        result: Tensor = norm(add(gated(wide), 0.5, x[:rows]), weight, 1e-5)
        return result

    result, recorded = recorder.record(run, most)
    assert recorder.refused is None
    result.zero_()
    for rows in (3, 7, 1, 0, 5):
        before = result.clone()
        recorded.replay_rows(rows, 0)
        assert torch.equal(result[:rows], run(rows))
        assert torch.equal(result[rows:], before[rows:]), "rows that are not asked for stay as they were"
    for rows, units in ((8, 0), (-1, 0), (3, 8)):
        with pytest.raises(ValueError, match="no more rows or units"):
            recorded.replay_rows(rows, units)


def test_what_does_not_follow_the_rows_is_not_recorded_for_fewer() -> None:
    recorder, add, most = NATIVE.get("recorder")(), NATIVE.get("add_scaled"), 7
    x = draw(most, 40)
    _, recorded = recorder.record(lambda: add(x[:5], 2.0, None), most)
    assert recorded is None
    assert recorder.refused == "an op whose rows are not the batch's"
    assert recorder.record(lambda: add(x, 2.0, None), most)[1] is not None
    assert recorder.refused is None


def test_memory_that_is_free_again_serves_later_ops_and_recordings() -> None:
    recorder, add = NATIVE.get("recorder")(), NATIVE.get("add_scaled")
    x = draw(8, 64)

    def run() -> Tensor:
        found = x
        for _ in range(50):
            found = add(found, 1.5, x)
        return found

    kept = recorder.record(run)
    assert recorder.arena.bytes == 2 * x.nbytes
    for _ in range(20):
        recorder.record(run)
    assert recorder.arena.bytes == 3 * x.nbytes, "the first one's result is still held"
    assert torch.equal(kept[0], run())


def test_what_torch_computes_is_not_recorded() -> None:
    recorder, add, x = NATIVE.get("recorder")(), NATIVE.get("add_scaled"), draw(2, 8)
    result, recorded = recorder.record(lambda: add(x, 2.0, None) + 1)
    assert torch.equal(result, x * 2 + 1)
    assert recorded is None
    assert recorder.refused == "aten::add"
    with torch.inference_mode():
        _, recorded = recorder.record(lambda: add(x, 2.0, None).flatten(1)[1:].unflatten(1, (2, 4)).float())
        assert recorded is not None, recorder.refused


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.bfloat16(),
        lambda x: x.to(torch.float64),
        lambda x: x.T.contiguous(),
        lambda x: x.T.reshape(-1),
        lambda x: x.T.flatten(),
    ],
    ids=["bfloat16", "to", "contiguous", "reshape", "flatten"],
)
@pytest.mark.parametrize("inference", [False, True])
def test_an_op_that_copies_where_a_view_will_not_do_is_not_recorded(
    convert: Callable[[Tensor], Tensor], inference: bool
) -> None:
    recorder, add, x = NATIVE.get("recorder")(), NATIVE.get("add_scaled"), draw(2, 8)
    with torch.inference_mode(inference):
        result, recorded = recorder.record(lambda: convert(add(x, 2.0, None)))
    assert torch.equal(result, convert(x * 2))
    assert recorded is None
    assert recorder.refused in ("aten::_to_copy", "aten::clone")


def test_an_error_ends_a_recording() -> None:
    recorder, library = NATIVE.get("recorder")(), cpu.native()
    assert library is not None
    with pytest.raises(ZeroDivisionError):
        recorder.record(lambda: 1 // 0)
    assert recorder.record(lambda: 1)[0] == 1
    with pytest.raises(RuntimeError, match="not recording"):
        library.end()


def test_time_in_ops_is_counted() -> None:
    library = cpu.native()
    assert library is not None
    before = library.inside()
    NATIVE.get("rms_norm")(draw(64, 576), draw(576), 1e-5)
    assert library.inside() > before
