"""That the reference attention gives a query the same bits in any chunk and any batch."""

from __future__ import annotations

import pytest
import torch
from op_cases import attend, batch_of, draw, pools

from llmx.kernels import Kernels


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (3, 3, 96), (8, 1, 128), (2, 2, 128), (4, 1, 256), (1, 1, 256)]
)
def test_a_text_has_the_same_bits_in_pieces(heads: int, kv_heads: int, dim: int, threads: int) -> None:
    kernels, batch, before = Kernels("cpu", forced="reference"), batch_of([(0, 300)]), torch.get_num_threads()
    seen, q = pools(batch, kv_heads, dim), draw(300, heads, dim, seed=3)
    try:
        torch.set_num_threads(threads)
        whole = attend(kernels, batch, q, seen)
        for start, count in ((299, 1), (200, 2), (100, 3), (10, 4), (250, 7), (37, 33)):
            part = batch_of([(start, count)])
            part.tables[0] = batch.tables[0]
            assert torch.equal(attend(kernels, part, q[start : start + count], seen), whole[start : start + count])
        many = batch_of([(start, 1) for start in range(280, 300)])
        many.tables[0] = batch.tables[0].expand(20, -1)
        assert torch.equal(attend(kernels, many, q[280:300], seen), whole[280:300])
    finally:
        torch.set_num_threads(before)
