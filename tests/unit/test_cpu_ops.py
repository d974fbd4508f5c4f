"""The C++ ops against the reference, for every instruction set that runs here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from llmx.kernels import Kernels, cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason=f"cpu kernels: {cpu.describe()}")
NATIVE, REFERENCE = Kernels("cpu", forced="cpu"), Kernels("cpu", forced="reference")
SIZE = 16


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch_of(rows: list[tuple[int, int]], trees: dict[int, list[int]] | None = None, seed: int = 0) -> Any:
    """rows: (start, known tokens). trees: per row the parents of its draft nodes. Blocks lie in any order."""
    trees = trees or {}
    lengths = [count + len(trees.get(r, ())) for r, (_, count) in enumerate(rows)]
    high = [start + length for (start, _), length in zip(rows, lengths, strict=True)]
    width = max(-(-h // SIZE) for h in high)
    order = torch.randperm(len(rows) * width, generator=torch.Generator().manual_seed(seed)) + 1
    prefix: list[int] = []
    paths: list[list[int]] = []
    deepest = max([len(parents) for parents in trees.values()], default=0)
    for r, (start, count) in enumerate(rows):
        prefix += range(start + 1, start + count + 1)
        paths += [[-1] * deepest for _ in range(count)]
        for node, _ in enumerate(trees.get(r, ())):
            above = [node]
            while (parent := trees[r][above[0]]) >= 0:
                above.insert(0, parent)
            prefix.append(start + count + len(above))
            paths.append(above + [-1] * (deepest - len(above)))
    return SimpleNamespace(
        tokens=torch.zeros(len(prefix), dtype=torch.long),
        lengths=tuple(lengths),
        counts=tuple(count for _, count in rows),
        low=tuple(start for start, _ in rows),
        high=tuple(high),
        prefix=torch.tensor(prefix),
        tables=[order.reshape(len(rows), width)],
        base=torch.tensor([start + count for start, count in rows]),
        paths=torch.tensor(paths) if trees else None,
        size=SIZE,
        blocks=len(rows) * width + 1,
    )


def attend(kernels: Kernels, batch: Any, q: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    plan = kernels.get("plan_attention")(batch, 0, options.get("window"))
    result: Tensor = kernels.get("attention")(q, keys, values, plan, q.shape[-1] ** -0.5, **options)
    return result


def pools(batch: Any, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    shape = (kv_heads, batch.blocks, SIZE, dim)
    return draw(*shape, seed=1).to(dtype), draw(*shape, seed=2).to(dtype)


ROWS = [(0, 1), (0, 70), (63, 1), (64, 1), (200, 3), (5, 130), (129, 20)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 64), (8, 2, 16), (4, 4, 80), (7, 1, 256), (4, 2, 20)])
@pytest.mark.parametrize("options", [{}, {"window": 50}, {"window": 1}, {"cap": 5.0}, {"first": 1, "window": 100}])
def test_attention(isa: str, heads: int, kv_heads: int, dim: int, options: dict[str, Any]) -> None:
    batch = batch_of(ROWS)
    keys, values = pools(batch, kv_heads, dim)
    q = draw(len(batch.tokens), heads, dim, seed=3) * 3
    want, got = (attend(k, batch, q, keys, values, **options) for k in (REFERENCE, NATIVE))
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_over_a_cache_of_half_precision(isa: str, dtype: torch.dtype) -> None:
    batch = batch_of(ROWS)
    keys, values = pools(batch, 2, 64, dtype)
    q = draw(len(batch.tokens), 6, 64, seed=3)
    want, got = (attend(k, batch, q, keys, values) for k in (REFERENCE, NATIVE))
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    rounded = attend(NATIVE, batch, q.to(dtype), keys, values)
    assert rounded.dtype == dtype
    torch.testing.assert_close(rounded, attend(REFERENCE, batch, q.to(dtype), keys, values), rtol=1e-2, atol=1e-3)


TREES = {1: [-1, -1, 0, 0, 1, 3], 2: [-1, 0, 1], 4: [-1]}


@pytest.mark.parametrize("window", [None, 40])
def test_attention_of_draft_trees(isa: str, window: int | None) -> None:
    batch = batch_of([(0, 5), (60, 2), (130, 1), (7, 1), (62, 1)], TREES)
    keys, values = pools(batch, 2, 32)
    q = draw(len(batch.tokens), 6, 32, seed=3)
    want, got = (attend(k, batch, q, keys, values, window=window) for k in (REFERENCE, NATIVE))
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_a_branch_of_a_tree_has_the_bits_of_the_same_text_without_one(isa: str) -> None:
    """Nodes 0, 2, 5 of a tree at slots 62 … as a plain text whose keys lie there in order."""
    tree = batch_of([(60, 2)], {0: [-1, -1, 0, 1, 0, 2]})
    keys, values = pools(tree, 2, 32)
    q = draw(8, 6, 32, seed=3)
    branch = attend(NATIVE, tree, q, keys, values)[[2, 4, 7]]
    plain = batch_of([(62, 3)])
    slot = [int(tree.tables[0][0, p // SIZE]) * SIZE + p % SIZE for p in [*range(62), 62, 64, 67]]
    for pool in (keys, values):
        flat = pool.view(2, -1, 32)
        moved = flat[:, slot].clone()
        pool.view(2, -1, 32)[:, [int(plain.tables[0][0, p // SIZE]) * SIZE + p % SIZE for p in range(65)]] = moved
    assert torch.equal(attend(NATIVE, plain, q[[2, 4, 7]], keys, values), branch)


@pytest.mark.parametrize("window", [None, 50])
def test_a_query_does_not_see_its_neighbours(isa: str, window: int | None) -> None:
    """Its bits are those it has alone, in any chunk, with any threads; what nobody sees may hold anything."""
    batch = batch_of([(0, 150)])
    keys, values = pools(batch, 2, 48)
    q, threads = draw(150, 6, 48, seed=3), torch.get_num_threads()
    whole = attend(NATIVE, batch, q, keys, values, window=window)
    table = batch.tables[0]
    try:
        for start, count in ((0, 64), (64, 86), (17, 1), (149, 1), (100, 33), (140, 10)):
            torch.set_num_threads(1 + start % 3)
            part = batch_of([(start, count)])
            part.tables[0] = table
            dirty_keys, dirty_values = keys.clone(), values.clone()
            unseen = [p for p in range(160) if p >= start + count or (window and p <= start - window)]
            for pool in (dirty_keys, dirty_values):
                for p in unseen:
                    pool[:, int(table[0, p // SIZE]), p % SIZE] = torch.nan
            got = attend(NATIVE, part, q[start : start + count], dirty_keys, dirty_values, window=window)
            assert torch.equal(got, whole[start : start + count])
    finally:
        torch.set_num_threads(threads)


def test_a_query_that_sees_nothing_gives_zeros(isa: str) -> None:
    batch = batch_of([(0, 2)])
    batch.prefix = torch.tensor([0, 2])
    keys, values = pools(batch, 1, 16)
    got = attend(NATIVE, batch, draw(2, 1, 16), keys, values)
    assert got[0].tolist() == [[0.0] * 16]
    assert bool((got[1] != 0).any())


def test_numbers_that_are_none_stay_so(isa: str) -> None:
    batch = batch_of([(0, 3)])
    keys, values = pools(batch, 1, 16)
    q = draw(3, 1, 16)
    q[1, 0, 3] = torch.nan
    got = attend(NATIVE, batch, q, keys, values)
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
@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_positions_and_the_write(isa: str, dim: int, half: int, pool: torch.dtype, dtype: torch.dtype) -> None:
    heads, kv_heads, rows = 6, 2, 9
    qkv = draw(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    angle = draw(rows, half, seed=1)
    cos, sin = (angle.cos(), angle.sin()) if half else (None, None)
    slots = torch.randperm(5 * SIZE, generator=torch.Generator().manual_seed(0))[:rows]
    found = []
    for kernels in (NATIVE, REFERENCE):
        keys, values = (torch.zeros(kv_heads, 5, SIZE, dim, dtype=pool) for _ in range(2))
        q = kernels.get("rope_and_write")(qkv, heads, keys, values, slots, cos, sin)
        found.append((q, keys, values))
    for got, want in zip(*found, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


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
