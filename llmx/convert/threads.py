"""Work on threads whose results come in the order of the calls, with no more of it begun than is soon needed."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class InOrder:
    """Inside one of its threads torch, where it is imported, computes alone: what it would share out is too small to be
    worth waiting for one another."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __enter__(self) -> InOrder:
        torch = sys.modules.get("torch")
        self._torchs = self._threads if torch is None else torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        _use(self._torchs)

    def map(self, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
        """What each call returns. One more than there are threads is begun before the first result is taken."""
        begun: deque[Future[T]] = deque()
        for call in calls:
            begun.append(self._pool.submit(_alone, call))
            if len(begun) > self._threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()


def _alone(call: Callable[[], T]) -> T:
    _use(1)  # each time: a call may be the one that imports torch
    return call()


def _use(threads: int) -> None:
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(threads)
