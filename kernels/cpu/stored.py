"""Embeddings straight from the rows that a file stores. `stored.cpp` says what lies where, the schemes what it is."""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.kernels.cpu import native
from llmx.kernels.cpu.convert import narrowed

KINDS = (
    *("F32", "F16", "BF16"),
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)


def can_look_up(kind: str) -> bool:
    """Whether `look_up` reads rows that are stored as `kind`."""
    return kind in KINDS


def look_up(stored: Tensor, kind: str, ids: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    """stored (vocabulary, anything), contiguous; ids (rows,) -> (rows, hidden), bit for bit as `Scheme.unpack` does."""
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    assert stored.is_contiguous(), "rows lie one after another"
    ids = ids.contiguous()
    out = torch.empty(len(ids), hidden)
    library.look_up(
        out.data_ptr(),
        stored.data_ptr(),
        stored.shape[1] * stored.element_size(),
        len(stored),
        ids.data_ptr(),
        len(ids),
        hidden,
        KINDS.index(kind),
        torch.get_num_threads(),
    )
    return narrowed(out, dtype)
