"""Batches, pools and numbers that the tests of every backend's ops share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from llmx.cache.pools import new_pools
from llmx.kernels import Kernels
from llmx.kernels.reference.rope import quantize

Pools = tuple[Tensor, Tensor, Tensor | None]
SIZE = 16  # slots of a block
ROWS = [  # (start, known tokens)
    (0, 1),
    (0, 70),
    (63, 1),
    (64, 1),
    (200, 3),
    (5, 130),
    (129, 20),
    (127, 1),
    (128, 1),
    (700, 2),
]
TREES = {1: [-1, -1, 0, 0, 1, 3], 2: [-1, 0, 1], 4: [-1]}  # by row: the parents of its draft nodes


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batch_of(
    rows: list[tuple[int, int]], trees: dict[int, list[int]] | None = None, seed: int = 0, size: int = SIZE
) -> Any:
    """rows: (start, known tokens). trees: per row the parents of its draft nodes. Blocks lie in any order."""
    trees = trees or {}
    lengths = [count + len(trees.get(r, ())) for r, (_, count) in enumerate(rows)]
    high = [start + length for (start, _), length in zip(rows, lengths, strict=True)]
    width = max(-(-h // size) for h in high)
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
        size=size,
        blocks=len(rows) * width + 1,
    )


def attend(kernels: Kernels, batch: Any, q: Tensor, pools: Pools, **options: Any) -> Tensor:
    keys, values, scales = pools
    plan = kernels.get("plan_attention")(batch, 0, options.get("window"))
    result: Tensor = kernels.get("attention")(q, keys, values, plan, q.shape[-1] ** -0.5, scales=scales, **options)
    return result


def pools(batch: Any, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32) -> Pools:
    """Keys, values and scales with numbers in every slot."""
    made = new_pools(kv_heads, batch.blocks, batch.size, dim, dtype, torch.device("cpu"))
    for i, pool in enumerate(made[:2]):
        numbers = draw(*pool.shape, seed=1 + i)
        codes, scales = quantize(numbers)
        pool.copy_(codes if dtype == torch.int8 else numbers)
        if made[2] is not None:
            made[2][..., i] = scales
    return made


def options_of(options: dict[str, Any], heads: int) -> dict[str, Any]:
    return options | {"sinks": draw(heads) + options["sinks"]} if "sinks" in options else options


def apart(got: Tensor, want: Tensor) -> float:
    """How far vectors (..., n) are from those that they should be, in lengths of these; of all the farthest."""
    distance, length = (got.double() - want.double()).norm(dim=-1), want.double().norm(dim=-1)
    return float((distance / length.clamp(min=1e-9)).max())
