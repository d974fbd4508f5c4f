"""Memory that was freed, given back to the system."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


@cache
def _trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    return found


def give_back() -> None:
    """glibc keeps pieces of up to 32 MB when they are freed, and they add up from block to block."""
    trim = _trim()
    if trim is not None:
        trim(0)
