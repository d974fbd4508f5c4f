"""The Triton ops against the reference: in Triton's interpreter, or on a CUDA device where there is one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from op_cases import SIZE, TREES, Pools, apart, attend, batch_of, draw, options_of, pools
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
ON_CUDA = torch.cuda.is_available()
if not ON_CUDA and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device that torch can use, and no TRITON_INTERPRET=1", allow_module_level=True)

from llmx.cache import pools as pools_module  # noqa: E402
from llmx.core import SamplingParams  # noqa: E402
from llmx.kernels import Kernels, cuda  # noqa: E402
from llmx.kernels.cuda import attention, norm  # noqa: E402
from llmx.llm import LLM  # noqa: E402

if not ON_CUDA:
    import triton_interpreter

    triton_interpreter.patch()

DEVICE = "cuda" if ON_CUDA else "cpu"
TRITON, REFERENCE = Kernels(DEVICE, forced="cuda"), Kernels(DEVICE, forced="reference")
BOTH = (TRITON, REFERENCE)
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # as parts of a result's length
GENERAL = [(0, 1), (0, 70), (64, 1), (63, 3)]  # shorter than ROWS: the interpreter takes 10 ms for a tile


def here(batch: Any) -> Any:
    """The batch on the device."""
    for name in ("tokens", "prefix", "base", "paths"):
        if getattr(batch, name) is not None:
            setattr(batch, name, getattr(batch, name).to(DEVICE))
    batch.tables = [table.to(DEVICE) for table in batch.tables]
    return batch


def problem(
    batch: Any, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Pools]:
    """q and the cache, as it lies on a CUDA device."""
    keys, values, scales = (p if p is None else p.contiguous().to(DEVICE) for p in pools(batch, kv_heads, dim, dtype))
    assert keys is not None
    assert values is not None
    return draw(len(batch.tokens), heads, dim, seed=3).to(DEVICE), (keys, values, scales)


def check(batch: Any, q: Tensor, held: Pools, **options: Any) -> None:
    options = {name: x.to(DEVICE) if name == "sinks" else x for name, x in options_of(options, q.shape[1]).items()}
    got, want = (attend(kernels, batch, q, held, **options) for kernels in BOTH)
    assert (got.dtype, got.shape) == (q.dtype, q.shape)
    assert apart(got, want) <= CLOSE[q.dtype]


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize(("hidden", "widest"), [(1, 16384), (15, 16384), (1000, 16384), (1000, 128)])
@pytest.mark.parametrize("dtype", CLOSE)
def test_norms(monkeypatch: pytest.MonkeyPatch, rows: int, hidden: int, widest: int, dtype: torch.dtype) -> None:
    """Rows that a program holds, and rows it walks over."""
    monkeypatch.setattr(norm, "WIDEST", widest)
    x, residual = (draw(rows, hidden, seed=seed).to(DEVICE, dtype) for seed in (0, 1))
    weight, close = draw(hidden, seed=2).to(DEVICE), 1e-6 if dtype == torch.float32 else CLOSE[dtype] / 2
    got, want = (kernels.get("rms_norm")(x, weight, 1e-5) for kernels in BOTH)
    assert got.dtype == dtype
    assert apart(got, want) <= close
    (got, total), (want, expected) = (kernels.get("add_rms_norm")(x, residual, weight, 1e-5) for kernels in BOTH)
    assert torch.equal(total, expected)
    assert apart(got, want) <= close


def test_a_norm_of_rows_that_lie_apart_and_its_bits_alone() -> None:
    wide = draw(9, 3, 40).to(DEVICE)
    x, weight = wide[:, 1], draw(40, seed=2).to(DEVICE)
    got = TRITON.get("rms_norm")(x, weight, 1e-5)
    torch.testing.assert_close(got, REFERENCE.get("rms_norm")(x, weight, 1e-5), rtol=2e-6, atol=2e-6)
    assert torch.equal(got, torch.cat([TRITON.get("rms_norm")(row[None], weight, 1e-5) for row in x]))
    across = wide[0].T  # whose elements lie apart
    got, want = (kernels.get("add_rms_norm")(across, across, draw(3).to(DEVICE), 1e-5) for kernels in BOTH)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("dim", "half", "heads"), [(64, 32, 6), (80, 20, 6), (20, 10, 1), (128, 64, 20), (64, 0, 6)])
@pytest.mark.parametrize("pool", [*CLOSE, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_positions_and_the_write(dim: int, half: int, heads: int, pool: torch.dtype, dtype: torch.dtype) -> None:
    kv_heads, rows = min(2, heads), 5
    qkv, angle = draw(rows, (heads + 2 * kv_heads) * dim).to(DEVICE, dtype), draw(rows, half, seed=1).to(DEVICE)
    cos, sin = (angle.cos(), angle.sin()) if half else (None, None)
    slots = torch.tensor([17, 3, 3, 64, 30], device=DEVICE)  # two dead tokens share a slot of block 0
    qkv[3, (heads + kv_heads - 1) * dim] = torch.nan  # a key
    qkv[4, -dim:] = 0.0  # a value
    found = []
    for kernels in BOTH:
        keys, values = (torch.full((kv_heads, 5, SIZE, dim), 7, dtype=pool, device=DEVICE) for _ in range(2))
        scales = torch.full((kv_heads, 5, SIZE, 2), 7.0, device=DEVICE) if pool == torch.int8 else None
        q = kernels.get("rope_and_write")(qkv, heads, keys, values, slots, cos, sin, scales)
        found.append((q, *(t[:, 1:] for t in (keys, values, scales) if t is not None)))  # block 0 is nobody's
    for got, want in zip(*found, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


SHAPES = [
    (3, 1, 64, {}),
    (4, 2, 20, {}),
    (4, 4, 80, {"window": 50}),
    (7, 1, 256, {"cap": 5.0}),
    (8, 2, 16, {"window": 1}),
]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "options"), SHAPES)
def test_attention_of_chunks_and_decodes_in_one_batch(
    heads: int, kv_heads: int, dim: int, options: dict[str, Any]
) -> None:
    batch = here(batch_of(GENERAL))
    q, held = problem(batch, heads, kv_heads, dim)
    check(batch, q * 3, held, **options)


@pytest.mark.parametrize(
    "options", [{"first": 1, "window": 100}, {"first": 3, "cap": 2.0}, {"window": 40, "sinks": 1.0}]
)
def test_attention_of_longer_rows(options: dict[str, Any]) -> None:
    batch = here(batch_of([(200, 3), (5, 66), (127, 1), (128, 20)]))
    check(batch, *problem(batch, 4, 1, 32), **options)


@pytest.mark.parametrize(("heads", "kv_heads"), [(71, 1), (140, 1), (5, 5)])
def test_attention_of_any_number_of_heads(heads: int, kv_heads: int) -> None:
    """More query heads to a kv head than a program has rows, too."""
    batch = here(batch_of([(20, 1), (0, 3)]))
    check(batch, *problem(batch, heads, kv_heads, 16))


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_attention_of_rows_that_decode(rows: int) -> None:
    batch = here(batch_of([(7 * r % 40, 1) for r in range(rows)]))
    check(batch, *problem(batch, 4, 1, 32))


@pytest.mark.parametrize("pool", [torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dtype", CLOSE)
def test_attention_over_a_cache_of_less_precision(dtype: torch.dtype, pool: torch.dtype) -> None:
    batch = here(batch_of(GENERAL))
    q, held = problem(batch, 3, 1, 64, pool)
    check(batch, q.to(dtype), held)


@pytest.mark.parametrize("window", [None, 90, 1])
def test_the_keys_of_a_long_row_are_split_and_merged(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(attention, "SLOTS", 64)
    rows = [(300, 1), (0, 1), (64, 3), (255, 2), (127, 1), (130, 12)]
    batch = here(batch_of(rows))
    plan = attention.plan_attention(batch, 0, window)
    assert plan.parts[0].splits == (5 if window is None else 2 + (window > 1))
    check(batch, *problem(batch, 3, 1, 32), window=window, sinks=0.5)
    monkeypatch.setattr(attention, "PIECES", 45)  # fewer and longer ones where the step has many tokens
    longer = attention.plan_attention(batch, 0, window).parts[0]
    assert (longer.split_slots > 64) is (window != 1)
    assert longer.splits == 2
    assert longer.splits * longer.tokens <= 45
    check(batch, *problem(batch, 3, 1, 32, torch.int8), window=window)


@pytest.mark.parametrize(("window", "slots", "few"), [(None, 64, 64), (40, 512, 64), (40, 64, 2), (None, 512, 2)])
def test_attention_of_draft_trees(monkeypatch: pytest.MonkeyPatch, window: int | None, slots: int, few: int) -> None:
    """Also where they are cut as rows of many tokens are."""
    monkeypatch.setattr(attention, "SLOTS", slots)
    monkeypatch.setattr(attention, "FEW", few)
    batch = here(batch_of([(0, 5), (60, 2), (130, 1), (7, 1), (62, 1)], TREES))
    check(batch, *problem(batch, 3, 1, 32), window=window)


def test_what_nobody_sees_may_hold_anything() -> None:
    """Slots past a row and before its window, and those of dead draft nodes between live ones."""
    batch = here(batch_of([(30, 2), (64, 1), (0, 66)], {0: [-1, -1, 0, 1, 0, 2]}))
    q, held = problem(batch, 4, 2, 32)
    batch.prefix[[3, 5]] = 0  # nodes 1 and 3 are dead, which are no one's ancestors but each other's
    batch.paths[[3, 5]] = -1
    want = attend(REFERENCE, batch, q, held, window=20)
    seen = [{*range(11, 38)} - {33, 35}, {*range(45, 65)}, {*range(66)}]
    for row, slots in enumerate(seen):
        for p in {*range(batch.tables[0].shape[1] * SIZE)} - slots:
            for pool in held[:2]:
                pool[:, int(batch.tables[0][row, p // SIZE]), p % SIZE] = torch.nan
    got = attend(TRITON, batch, q, held, window=20)
    assert got[[3, 5]].abs().sum() == 0.0
    assert apart(got, want) <= CLOSE[q.dtype]


@pytest.mark.parametrize("many", [False, True])
def test_a_query_that_sees_nothing_gives_zeros_and_numbers_that_are_none_stay_so(many: bool) -> None:
    batch = here(batch_of([(0, 66 if many else 3)]))
    batch.prefix[0] = 0
    q, held = problem(batch, 2, 1, 16)
    q[1, 0, 3] = torch.nan
    got = attend(TRITON, batch, q, held)
    assert got[0].tolist() == [[0.0] * 16] * 2
    assert bool((got[2:] != 0).any())
    assert got.isnan().all(-1).nonzero().tolist() == [[1, 0]]
    assert int(got.isnan().sum()) == 16


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_model_writes_with_them_what_it_writes_without(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine hands them what they take: a prompt longer than a program's share, a batch, and drafts."""
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    asked = [[*range(5, 72)], [8, 9, 8, 9, 8]]
    made = pools_module.new_pools
    monkeypatch.setattr(  # they lie as on a CUDA device
        pools_module, "new_pools", lambda *asked: tuple(p if p is None else p.contiguous() for p in made(*asked))
    )
    written = []
    for backends in (["reference"], ["cuda", "reference"]):
        monkeypatch.setattr(Kernels, "_backends", lambda self, names=backends: names)
        with LLM("random:tiny", device=DEVICE, dtype="float32", kv_cache_dtype=kv_dtype) as llm:
            written.append([output.outputs[0].token_ids for output in llm.generate(asked, params)])
            assert ("attention", backends[0]) in llm.info.kernels
    assert written[0] == written[1]


@pytest.mark.parametrize("missing", ["triton", "compiler", "header"])
def test_without_what_triton_needs_the_reference_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("CC", "" if missing == "compiler" else "cc")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(cuda.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(cuda.shutil, "which", lambda name: None)
    if missing == "triton":
        monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    if missing == "header":
        (tmp_path / "Python.h").unlink()
    cuda.lacks.cache_clear()
    try:
        assert not cuda.available()
        assert "the torch reference serves" in cuda.describe()
        kernels = Kernels("cuda")
        assert kernels.get("attention").__module__ == "llmx.kernels.reference.attention"
    finally:
        cuda.lacks.cache_clear()
