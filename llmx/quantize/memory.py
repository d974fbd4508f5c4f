"""Memory that is freed goes back to the system, at once or when it is asked for."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # glibc's names, of malloc.h
LARGE, SPARE = 2**20, 2**23  # bytes: of a piece that is the system's own, and that may lie free on top of the heap
USUAL = 2**25, 2**26  # what glibc's own rule comes to when large pieces have been freed


@cache
def _glibc(name: str) -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found


def give_back() -> None:
    """What was freed and glibc kept."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


@contextmanager
def given_back() -> Iterator[None]:
    """Inside, each piece of LARGE bytes and more goes back as soon as it is freed.

    By itself glibc keeps pieces of up to 32 MB on a heap, where small ones that stay come to lie between them: of
    matrices that are worked on some rows at a time, two or three times their size.
    """
    option = _glibc("mallopt")
    if option is None:
        yield
        return
    option(MMAP_THRESHOLD, LARGE)
    option(TRIM_THRESHOLD, SPARE)
    try:
        yield
    finally:
        option(MMAP_THRESHOLD, USUAL[0])
        option(TRIM_THRESHOLD, USUAL[1])
        give_back()
