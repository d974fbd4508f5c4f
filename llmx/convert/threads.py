"""Work on threads whose results come in the order of the calls, with no more of it begun than is soon needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class InOrder:
    """As many threads as torch has. Inside one of them torch computes alone: what it would share out is too small to be
    worth waiting for one another."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()

    def __enter__(self) -> InOrder:
        self._pool = ThreadPoolExecutor(self._threads, initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads)

    def map(self, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
        """What each call returns. One more than there are threads is begun before the first result is taken."""
        begun: deque[Future[T]] = deque()
        for call in calls:
            begun.append(self._pool.submit(call))
            if len(begun) > self._threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
