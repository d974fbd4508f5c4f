"""Runs a function once and keeps the native ops that it called, to call them again with no Python in between.

What a recorded op reads and writes stays where it is. While recording, torch's allocations come from an arena that all
recordings share: memory that is free again serves the ops that follow, of this recording and of the next ones, since
only one of them runs at a time. Any torch op that computes something would be missing in a replay: such a function is
run, and not recorded.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llmx.kernels.cpu import native

T = TypeVar("T")
ALIGNMENT = 64
ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::new_empty"}
CONSTANTS = {"aten::lift_fresh"}  # torch.tensor of host numbers


class Arena:
    """Memory in pieces. A piece is free again when no tensor lies in it any more."""

    def __init__(self) -> None:
        self.bytes = 0
        self._free: dict[int, list[np.ndarray]] = {}  # by size

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor."""
        size = max(ALIGNMENT, -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT)
        fitting = min((n for n, pieces in self._free.items() if pieces and size <= n <= 2 * size), default=None)
        if fitting is None:
            memory = np.empty(size + ALIGNMENT, np.uint8)
            memory = memory[-memory.ctypes.data % ALIGNMENT :][:size]
            self.bytes += size
        else:
            memory = self._free[fitting].pop()
        lent = memory[:]  # torch keeps this view while a tensor lies in it
        weakref.finalize(lent, self._free.setdefault(len(memory), []).append, memory)
        return torch.from_numpy(lent)[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class Recorded:
    """Op calls, and what they read and write besides the tensors of `held`: weights and caches, which others hold.

    most: the rows that it was recorded with; None: it is of just those rows.
    """

    def __init__(self, calls: Any, held: list[Tensor], most: int | None = None) -> None:
        self._calls, self._held, self._most = calls, held, most

    def __len__(self) -> int:
        return len(self._calls)

    def replay(self) -> None:
        """All ops once more, in one native call. Their results lie where they lay before."""
        self._calls.replay()

    def replay_rows(self, rows: int, units: int) -> None:
        """The same for the first `rows` of what was recorded. units: of the attention plans, which are refilled."""
        assert self._most is not None
        self._calls.replay_rows(rows, self._most, units)


class Recorder:
    """Recordings that share an arena. `refused`: the torch op that kept the last function from being recorded."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.refused: str | None = None

    def record(self, run: Callable[[], T], most: int | None = None) -> tuple[T, Recorded | None]:
        """What `run` gives, and its recording; None if it cannot be recorded.

        The caller keeps the tensors that `run` reads and gives back. most: `run` computes with so many rows, and is not
        run yet; its replays are of as many rows or fewer. It must be a prime, so that numbers which have nothing to do
        with rows are recognised: they are no multiples of it.
        """
        library = native()
        assert library is not None, "the table offers this only where the library is built"
        watch = _Watch(self.arena)
        library.begin(most is not None)
        try:
            with watch:
                result = run()
        finally:
            calls = library.end()
        self.refused = watch.refused
        if most is not None and not calls.follows(most):
            self.refused = self.refused or "an op whose rows are not the batch's"
        return result, None if self.refused else Recorded(calls, watch.held, most)


class _Watch(TorchDispatchMode):
    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arena, self.refused = arena, None
        self.held: list[Tensor] = []

    refused: str | None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else torch imports its compiler, which takes seconds, at the first op that is watched."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in ALLOCATIONS and (shape := _plain(name, args, kwargs)) is not None:
            return self.arena.empty(*shape)
        if name in CONSTANTS:
            result = func(*args, **kwargs)
            self.held.append(result)
            return result
        with self:
            result = func.decompose(*args, **kwargs)  # ops made of others reach here whole in inference mode
        if result is not NotImplemented:  # among them what is a view or else a copy: `to`, `reshape`, `contiguous`
            return result
        if not func.is_view:
            self.refused = self.refused or name
        return func(*args, **kwargs)


def _plain(name: str, args: Any, kwargs: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Shape and dtype of an ordinary new tensor on the CPU; None if it is anything else."""
    if kwargs.get("device") not in (None, torch.device("cpu")) or kwargs.get("pin_memory"):
        return None
    if kwargs.get("layout") not in (None, torch.strided):
        return None
    dtype = kwargs.get("dtype")
    if name == "aten::empty":
        return tuple(args[0]), dtype or torch.get_default_dtype()
    like = args[0]
    if like.device.type != "cpu" or (name == "aten::empty_like" and not like.is_contiguous()):
        return None
    return tuple(like.shape if name == "aten::empty_like" else args[1]), dtype or like.dtype
