"""Packing of GGUF's blocks in C++, on all threads. `linear.pack_codes` defines what comes out."""

from __future__ import annotations

import torch
from torch import Tensor

from llmx.kernels.cpu import native
from llmx.kernels.cpu.kinds import KINDS
from llmx.kernels.cpu.linear import LANES

WIDTHS = (4, 5, 6, 8)  # bits of a code that pack.cpp can write


def pack_blocks(packed: Tensor, layout: str, kind: str, rows: Tensor) -> bool:
    """rows (n_out, bytes) uint8, blocks of GGUF's `kind` -> `packed`, new from `new_packed`.

    False, and nothing done, for a kind or a layout that it doesn't know.
    """
    if kind not in KINDS or not layout.startswith("q") or int(layout[1]) not in WIDTHS:
        return False
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    number, size, block_bytes = KINDS[kind]
    rows = rows.contiguous()
    n_out, row_bytes = rows.shape
    n_in = row_bytes // block_bytes * size
    assert row_bytes % block_bytes == 0, f"{row_bytes} bytes are not blocks of {block_bytes}"
    assert len(packed) == -(-n_out // LANES), f"{n_out} rows into {len(packed)} blocks"
    library.pack_blocks(
        packed.data_ptr(),
        packed.shape[1],
        rows.data_ptr(),
        row_bytes,
        n_out,
        n_in,
        number,
        int(layout[1]) + 16 * ("*" in layout) + 32 * ("*f" in layout) + 64 * layout.endswith("m"),
        torch.get_num_threads(),
    )
    return True
