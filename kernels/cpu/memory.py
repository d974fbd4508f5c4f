"""Memory for weights: in pages of 2 MiB where the system has them, which a pass over all weights reads faster."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch import Tensor

PAGE = 2 << 20
CHUNK = 32 * PAGE  # many weights are smaller than a page, so they share chunks
LINE = 64

_chunk: Any = None
_used = 0


def take(size: int) -> Tensor:
    """(size,) uint8, zeros, aligned to a cache line. It is given back with the last tensor in its chunk."""
    global _chunk, _used
    if _chunk is None or _used + size > len(_chunk):
        # Private: the system has no large pages for memory that processes could share.
        whole = -(-max(size, CHUNK) // PAGE) * PAGE
        _chunk, _used = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), 0
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _chunk.madvise(mmap.MADV_HUGEPAGE)
    taken = torch.frombuffer(_chunk, dtype=torch.uint8, count=size, offset=_used) if size else torch.empty(0)
    _used += -(-size // LINE) * LINE
    return taken.to(torch.uint8)
