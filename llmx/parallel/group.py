"""Tensor-parallel groups: sums in rank order, gathers, and agreement on what was decided."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch
from torch import Tensor


class Group(Protocol):
    """The ranks of a tensor-parallel group, as one of them sees it."""

    rank: int
    size: int

    def sum(self, part: Tensor) -> Tensor:
        """Every rank's partial result added up, of the same shape; on the CPU in rank order: bits don't vary."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """(rows, n) of every rank side by side: (rows, size * n)."""
        ...

    def agree(self, mine: Tensor) -> Tensor:
        """Rank 0's tensor, on every rank."""
        ...


class Alone:
    """No other ranks."""

    rank, size = 0, 1

    def sum(self, part: Tensor) -> Tensor:
        return part

    def gather(self, part: Tensor) -> Tensor:
        return part

    def agree(self, mine: Tensor) -> Tensor:
        return mine


class Ranks:
    """Ranks in processes of their own, joined by torch.distributed: gloo on CPUs, NCCL on CUDA devices.

    Rank 0 gives no `port` and has one chosen, which the others are told; only the loopback interface is used. A rank
    that dies makes the others' collectives raise RuntimeError.
    """

    def __init__(self, rank: int, size: int, device: torch.device, port: int = 0) -> None:
        import torch.distributed as dist

        self.rank, self.size, self._dist = rank, size, dist
        self._cpu = device.type == "cpu"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, size, is_master=rank == 0, wait_for_workers=False
        )
        self.port = int(self._store.port)
        self._backend, self._device = ("gloo" if self._cpu else "nccl"), device

    def join(self) -> None:
        """Wait for all ranks. Rank 0 tells the others its port first."""
        options: dict[str, Any] = {} if self._cpu else {"device_id": self._device}
        self._dist.init_process_group(self._backend, store=self._store, rank=self.rank, world_size=self.size, **options)

    def sum(self, part: Tensor) -> Tensor:
        if not self._cpu:
            self._dist.all_reduce(part)
            return part
        total, *others = self._all(part)
        for other in others:
            total = total + other
        return total

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._all(part), -1)

    def agree(self, mine: Tensor) -> Tensor:
        mine = mine.contiguous().clone()  # what comes from inference mode can't be written elsewhere
        self._dist.broadcast(mine, 0)
        return mine

    def _all(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._dist.all_gather(parts, part.contiguous())
        return parts
