"""The Triton ops at the shapes of real models on a CUDA device, against the reference there."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from op_cases import SIZE, apart, attend, batch_of, draw, options_of, pools  # noqa: E402

from llmx.kernels import Kernels  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
BOTH = tuple(Kernels("cuda", forced=name) for name in ("cuda", "reference"))
CLOSE = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # as parts of a result's length
SHAPES = [(32, 8, 128), (9, 3, 64), (4, 1, 256), (32, 32, 80), (71, 1, 64)]
MIXED = [(0, 300), (4000, 1), (4000, 8), (1500, 200), (0, 1), (2047, 1)]  # prefills, decodes and a chain of drafts


def check(
    batch: Any, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, pool: torch.dtype | None = None, **options: Any
) -> None:
    for name in ("tokens", "prefix", "base", "paths"):
        if getattr(batch, name) is not None:
            setattr(batch, name, getattr(batch, name).cuda())
    batch.tables = [table.cuda() for table in batch.tables]
    held = [p if p is None else p.contiguous().cuda() for p in pools(batch, kv_heads, dim, pool or dtype)]
    options = {name: x.cuda() if name == "sinks" else x for name, x in options_of(options, heads).items()}
    q = draw(len(batch.tokens), heads, dim, seed=3).to("cuda", dtype)
    got, want = (attend(kernels, batch, q, held, **options) for kernels in BOTH)
    assert apart(got, want) <= CLOSE[dtype]
    again = attend(BOTH[0], batch, q, held, **options)
    assert torch.equal(got, again)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (4, 1, 256), (32, 32, 80), (71, 1, 64)]
)
def test_attention_of_a_mixed_batch(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    check(batch_of(MIXED), heads, kv_heads, dim, dtype)


@pytest.mark.parametrize("pool", [torch.float16, torch.int8])
@pytest.mark.parametrize("dtype", CLOSE)
def test_attention_over_a_cache_of_another_type(dtype: torch.dtype, pool: torch.dtype) -> None:
    check(batch_of(MIXED), 32, 8, 128, dtype, pool)


@pytest.mark.parametrize("options", [{"window": 1024}, {"cap": 30.0}, {"first": 1, "window": 100}, {"sinks": 2.0}])
def test_attention_with_a_window_or_a_cap(options: dict[str, Any]) -> None:
    check(batch_of(MIXED), 32, 8, 128, torch.bfloat16, **options)


@pytest.mark.parametrize("window", [None, 1024])
def test_attention_of_draft_trees(window: int | None) -> None:
    wide = [-1, -1, -1, 0, 0, 1, 3, 3, 4, 6, 9] + [10] * 60  # more nodes than a row of few tokens has
    trees = {1: [-1, -1, 0, 0, 1, 3], 3: wide}
    check(batch_of([(0, 90), (3000, 1), (700, 1), (3000, 1)], trees), 32, 8, 128, torch.bfloat16, window=window)


@pytest.mark.parametrize("rows", [1, 64, 256])
def test_attention_of_rows_that_decode(rows: int) -> None:
    check(batch_of([(97 * r % 2000, 1) for r in range(rows)]), 32, 8, 128, torch.bfloat16)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("hidden", [64, 576, 4096, 8192, 20000])
def test_norms(hidden: int, dtype: torch.dtype) -> None:
    x, residual = (draw(300, hidden, seed=seed).to("cuda", dtype) for seed in (0, 1))
    weight = draw(hidden, seed=2).cuda()
    (got, total), (want, expected) = (kernels.get("add_rms_norm")(x, residual, weight, 1e-5) for kernels in BOTH)
    assert torch.equal(total, expected)
    assert apart(got, want) <= CLOSE[dtype] / 2
    got, want = (kernels.get("rms_norm")(x[:1], weight, 1e-5) for kernels in BOTH)
    assert apart(got, want) <= CLOSE[dtype] / 2


@pytest.mark.parametrize(("dim", "half"), [(64, 32), (128, 64), (80, 16), (256, 128), (128, 0)])
@pytest.mark.parametrize("pool", [*CLOSE, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_positions_and_the_write(dim: int, half: int, pool: torch.dtype, dtype: torch.dtype) -> None:
    heads, kv_heads, rows = 32, 8, 700
    qkv, angle = draw(rows, (heads + 2 * kv_heads) * dim).to("cuda", dtype), draw(rows, half, seed=1).cuda()
    cos, sin = (angle.cos(), angle.sin()) if half else (None, None)
    slots = (torch.randperm(60 * SIZE, generator=torch.Generator().manual_seed(0))[:rows] + SIZE).cuda()
    found = []
    for kernels in BOTH:
        keys, values = (torch.zeros(kv_heads, 61, SIZE, dim, dtype=pool, device="cuda") for _ in range(2))
        scales = torch.zeros(kv_heads, 61, SIZE, 2, device="cuda") if pool == torch.int8 else None
        q = kernels.get("rope_and_write")(qkv, heads, keys, values, slots, cos, sin, scales)
        found.append((q, keys, values, *([] if scales is None else [scales])))
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype
        if got.dtype == torch.int8:
            assert int((got.int() - want.int()).abs().max()) <= 1
        else:
            torch.testing.assert_close(got, want, rtol=2 * torch.finfo(got.dtype).eps, atol=1e-6)
