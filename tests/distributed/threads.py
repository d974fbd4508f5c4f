"""Tensor-parallel ranks as threads of one process: what they do to model and engine, without starting anything."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from llmx.cache.pools import windows_of
from llmx.kernels import Kernels
from llmx.loading import CheckpointWeights, Shard
from llmx.models import Opened

CPU = torch.device("cpu")
PATIENCE = 60.0  # seconds for the other ranks to come to a collective


@dataclass(frozen=True)
class Place:
    """Which rank of how many: all that a model asks of its group while it is built."""

    rank: int
    size: int


class Table:
    """Where the ranks lay down their tensors for each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._parts: list[Tensor] = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=PATIENCE)

    def exchange(self, rank: int, mine: Tensor) -> list[Tensor]:
        self._parts[rank] = mine
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        assert len({(part.shape, part.dtype) for part in parts}) == 1, "the ranks are not at the same place"
        return parts

    def leave(self) -> None:
        self._barrier.abort()


class Member:
    """One rank's view: a `llmx.parallel.group.Group`."""

    def __init__(self, table: Table, rank: int) -> None:
        self.rank, self.size, self._table = rank, table.size, table

    def sum(self, part: Tensor) -> Tensor:
        return reduce(torch.add, self._table.exchange(self.rank, part))

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._table.exchange(self.rank, part), -1)

    def agree(self, mine: Tensor) -> Tensor:
        return self._table.exchange(self.rank, mine)[0].clone()


def on_ranks(size: int, do: Callable[[Member], Any]) -> list[Any]:
    """What `do` gave on each rank. The first error of any is raised, and the others don't wait for it."""
    table, given = Table(size), [None] * size
    errors: list[Exception] = []

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            given[rank] = do(Member(table, rank))
        except Exception as error:
            errors.append(error)
            table.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors, "a rank waited for one that never came"
    return given


def load(opened: Opened, length: int, group: Any) -> tuple[Any, CheckpointWeights]:
    """One rank's model, f32, from checked files, and what it was loaded by."""
    kernels, shard = Kernels("cpu"), Shard(group.rank, group.size)
    weights = CheckpointWeights(opened.checkpoint, opened.names, shard, torch.float32, CPU, kernels)
    with torch.inference_mode():
        model = opened.family.Model(opened.config, weights, kernels, length=length, device=CPU, group=group)
    return model, weights


def kv_groups(model: Any) -> int:
    return len(windows_of(model.specs))
