"""The C++ ops against the reference, for every instruction set that runs here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from op_cases import ROWS, SIZE, TREES, attend, batch_of, draw, options_of, pools
from torch import Tensor

from llmx.cache.pools import new_pools
from llmx.kernels import Kernels, cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"cpu kernels: {cpu.describe()}")
NATIVE, REFERENCE = Kernels("cpu", forced="cpu"), Kernels("cpu", forced="reference")
KV_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]


@pytest.fixture(params=[1, 2, 3, 8])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Work is split for some of them: the bits are the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


HEADS = [(3, 1, 64), (8, 2, 16), (4, 4, 80), (7, 1, 256), (4, 2, 20), (8, 1, 128), (3, 3, 96)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 50},
    {"window": 1},
    {"cap": 5.0},
    {"first": 1, "window": 100},
    {"sinks": 2.0},
    {"sinks": -1.0, "window": 30, "cap": 3.0},
]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attention(isa: str, heads: int, kv_heads: int, dim: int, options: dict[str, Any]) -> None:
    batch, options = batch_of(ROWS), options_of(options, heads)
    q = draw(len(batch.tokens), heads, dim, seed=3) * 3
    want, got = (attend(k, batch, q, pools(batch, kv_heads, dim), **options) for k in (REFERENCE, NATIVE))
    torch.testing.assert_close(got, want, rtol=3e-5, atol=3e-5)


def check_attention(
    isa: str, batch: Any, q: Tensor, seen: Any, rtol: float = 2e-5, atol: float = 2e-5, **options: Any
) -> None:
    """The native op gives the reference's; where it multiplies pairs of bfloat16, as near as weights with 8 significant
    bits are: each is off by 2^-9 of itself at most, and so is their sum. Beside bfloat16 keys queries are bfloat16."""
    off: Tensor | float = 0.0
    given = q
    if isa == "avx512bf16" and seen[0].dtype in (torch.bfloat16, torch.int8):
        if seen[0].dtype == torch.bfloat16:
            scale = q.shape[-1] ** -0.5
            given = (q.float() * scale).bfloat16().float() / scale
        off = attend(REFERENCE, batch, given, (seen[0], seen[1].abs(), seen[2]), **options) / 256
    want = attend(REFERENCE, batch, given, seen, **options).float()
    got = attend(NATIVE, batch, q, seen, **options)
    assert got.dtype == q.dtype
    allowed = atol + rtol * want.abs() + off
    assert ((got.float() - want).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", KV_DTYPES[1:], ids=str)
@pytest.mark.parametrize("size", [8, 16, 32, 128])
def test_attention_over_a_cache_of_less_precision(isa: str, dtype: torch.dtype, size: int) -> None:
    batch = batch_of(ROWS, size=size)
    seen = pools(batch, 2, 64, dtype)
    q = draw(len(batch.tokens), 6, 64, seed=3)
    check_attention(isa, batch, q, seen)
    half = torch.bfloat16 if dtype == torch.int8 else dtype
    check_attention(isa, batch, q.to(half), seen, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_attention_over_a_cache_of_pairs(
    isa: str, heads: int, kv_heads: int, dim: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    batch, options = batch_of(ROWS), options_of(options, heads)
    q = draw(len(batch.tokens), heads, dim, seed=3) * 3
    check_attention(isa, batch, q, pools(batch, kv_heads, dim, dtype), rtol=3e-5, atol=3e-5, **options)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_attention_of_draft_trees(isa: str, window: int | None, dtype: torch.dtype) -> None:
    batch = batch_of([(0, 5), (60, 2), (130, 1), (7, 1), (255, 1)], TREES)
    seen, q = pools(batch, 2, 32, dtype), draw(len(batch.tokens), 6, 32, seed=3)
    check_attention(isa, batch, q, seen, window=window)


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_a_branch_of_a_tree_has_the_bits_of_the_same_text_without_one(isa: str, dtype: torch.dtype) -> None:
    """Nodes 0, 2, 5 of a tree at slots 128 … as a plain text whose keys lie there in order."""
    tree = batch_of([(126, 2)], {0: [-1, -1, 0, 1, 0, 2]})
    seen, q = pools(tree, 2, 32, dtype), draw(8, 6, 32, seed=3)
    branch = attend(NATIVE, tree, q, seen)[[2, 4, 7]]
    plain = batch_of([(128, 3)])

    def places(batch: Any, slots: list[int]) -> tuple[Any, ...]:
        return slice(None), batch.tables[0][0, [p // SIZE for p in slots]], [p % SIZE for p in slots]

    for pool in seen:
        if pool is not None:
            pool[places(plain, [*range(131)])] = pool[places(tree, [*range(128), 128, 130, 133])].clone()
    assert torch.equal(attend(NATIVE, plain, q[[2, 4, 7]], seen), branch)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_a_query_does_not_see_its_neighbours(isa: str, threads: int, window: int | None, dtype: torch.dtype) -> None:
    """Its bits are those it has alone, in any chunk, with any threads; what nobody sees may hold anything."""
    batch = batch_of([(0, 150)])
    seen, q = pools(batch, 2, 48, dtype), draw(150, 6, 48, seed=3)
    whole, table = attend(NATIVE, batch, q, seen, window=window), batch.tables[0]
    for start, count in ((0, 64), (64, 86), (17, 1), (149, 1), (100, 33), (140, 10)):
        part = batch_of([(start, count)])
        part.tables[0] = table
        dirty = tuple(None if pool is None else pool.clone() for pool in pools(batch, 2, 48, dtype))
        fresh = new_pools(2, batch.blocks, SIZE, 48, dtype, torch.device("cpu"))
        for old, new in zip(dirty, fresh, strict=True):
            if old is None or new is None:
                continue
            new.copy_(old)
            for p in range(160):
                if p >= start + count or (window and p <= start - window):
                    new[:, int(table[0, p // SIZE]), p % SIZE] = torch.nan if new.is_floating_point() else 99
        assert torch.equal(attend(NATIVE, part, q[start : start + count], fresh, window=window), whole[start:][:count])


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 256), (7, 1, 20)])
@pytest.mark.parametrize("options", [{}, {"window": 200}, {"sinks": 0.0}], ids=str)
def test_a_long_text_has_the_same_bits_in_pieces_and_by_any_threads(
    isa: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, options: dict[str, Any]
) -> None:
    """Few queries over many keys are split over the threads; a prompt and a batch are not."""
    batch, before = batch_of([(0, 700)]), torch.get_num_threads()
    seen, options = pools(batch, kv_heads, dim, dtype), options_of(options, heads)
    q = draw(700, heads, dim, seed=3)
    try:
        torch.set_num_threads(1)
        whole = attend(NATIVE, batch, q, seen, **options)
        for threads in (1, 2, 5, 8):
            torch.set_num_threads(threads)
            for start, count in ((699, 1), (640, 4), (255, 2), (500, 40)):
                part = batch_of([(start, count)])
                part.tables[0] = batch.tables[0]
                got = attend(NATIVE, part, q[start : start + count], seen, **options)
                assert torch.equal(got, whole[start : start + count])
            many = batch_of([(start, 1) for start in range(600, 640)])
            many.tables[0] = batch.tables[0].expand(40, -1)
            assert torch.equal(attend(NATIVE, many, q[600:640], seen, **options), whole[600:640])
    finally:
        torch.set_num_threads(before)


def test_a_query_that_sees_nothing_gives_zeros(isa: str, threads: int) -> None:
    batch = batch_of([(0, 2), (300, 1)])
    batch.prefix = torch.tensor([0, 2, 0])
    for sinks in (None, torch.ones(1)):
        got = attend(NATIVE, batch, draw(3, 1, 16), pools(batch, 1, 16), sinks=sinks)
        assert got[[0, 2]].tolist() == [[[0.0] * 16]] * 2
        assert bool((got[1] != 0).any())


def test_numbers_that_are_none_stay_so(isa: str) -> None:
    batch = batch_of([(0, 3)])
    q = draw(3, 1, 16)
    q[1, 0, 3] = torch.nan
    got = attend(NATIVE, batch, q, pools(batch, 1, 16))
    assert got.isnan().flatten(1).all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("hidden", [1, 15, 16, 576, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(isa: str, hidden: int, dtype: torch.dtype) -> None:
    x, residual = draw(37, hidden).to(dtype), draw(37, hidden, seed=1).to(dtype)
    weight, close = draw(hidden, seed=2), 2e-6 if dtype == torch.float32 else 1e-2
    got, want = (k.get("rms_norm")(x, weight, 1e-5) for k in (NATIVE, REFERENCE))
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=close, atol=close)
    (got, total), (want, expected) = (k.get("add_rms_norm")(x, residual, weight, 1e-5) for k in (NATIVE, REFERENCE))
    assert torch.equal(total, expected)
    torch.testing.assert_close(got, want, rtol=close, atol=close)
    alone = torch.cat([NATIVE.get("rms_norm")(row[None], weight, 1e-5) for row in x])
    assert torch.equal(NATIVE.get("rms_norm")(x, weight, 1e-5), alone)


@pytest.mark.parametrize(("dim", "half"), [(64, 32), (80, 20), (16, 8), (20, 10), (64, 0)])
@pytest.mark.parametrize("pool", KV_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_positions_and_the_write(isa: str, dim: int, half: int, pool: torch.dtype, dtype: torch.dtype) -> None:
    heads, kv_heads, rows = 6, 2, 9
    qkv = draw(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    qkv[3] = 0
    angle = draw(rows, half, seed=1)
    cos, sin = (angle.cos(), angle.sin()) if half else (None, None)
    slots = torch.randperm(5 * SIZE, generator=torch.Generator().manual_seed(0))[:rows]
    found = []
    for kernels in (NATIVE, REFERENCE):
        keys, values, scales = new_pools(kv_heads, 5, SIZE, dim, pool, torch.device("cpu"))
        q = kernels.get("rope_and_write")(qkv, heads, keys, values, slots, cos, sin, scales)
        found.append((q, keys, values, *([] if scales is None else [scales])))
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def test_int8_keys_and_values_are_near_and_none_where_a_number_is_none(isa: str) -> None:
    heads, dim = 2, 64
    qkv = draw(5, 4 * dim) * 10
    qkv[2, 2 * dim + 7], qkv[4, 3 * dim] = torch.nan, torch.inf
    for kernels in (NATIVE, REFERENCE):
        keys, values, scales = new_pools(1, 1, SIZE, dim, torch.int8, torch.device("cpu"))
        assert scales is not None
        kernels.get("rope_and_write")(qkv, heads, keys, values, torch.arange(5), None, None, scales)
        for i, (pool, new) in enumerate(((keys, qkv[:, 2 * dim : 3 * dim]), (values, qkv[:, 3 * dim :]))):
            held, half_step = pool[0, 0, :5] * scales[0, 0, :5, i, None], scales[0, 0, :5, i, None] / 2
            fine = new.isfinite().all(1)
            assert held.isnan().all(1).tolist() == (~fine).tolist()
            assert ((held - new).abs() <= half_step * 1.0001)[fine].all()


@pytest.mark.parametrize("op", ["silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("inner", [1, 24, 1536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_activations(isa: str, op: str, inner: int, dtype: torch.dtype) -> None:
    x = (draw(11, 2 * inner) * 6).to(dtype)
    x[0, :inner] = torch.tensor([100.0])  # where e^-x is nothing, and where it is more than float32 holds
    x[1, :inner] = torch.tensor([-100.0])
    gate, up = x.double().chunk(2, -1)
    # 1 + tanh(u) is 2 * sigmoid(2u), without the cancellation
    u = gate if op == "silu_mul" else 2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    want, got = (gate * u.sigmoid() * up).to(dtype), NATIVE.get(op)(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=2e-5 if dtype == torch.float32 else 1e-2, atol=1e-30)
    torch.testing.assert_close(REFERENCE.get(op)(x), want, rtol=1e-2, atol=2e-5)
    assert torch.equal(got, torch.cat([NATIVE.get(op)(row[None]) for row in x]))
