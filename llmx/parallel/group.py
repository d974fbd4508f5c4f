"""Tensor-parallel groups: sums in rank order, gathers, and agreement on what was decided."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Lost(Exception):
    """A rank has gone, or can't be reached: nothing can be computed together any more."""


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

    Rank 0 gives no `port` and has one chosen, which the others are told; only the loopback interface is used. Nothing
    global is set up: a process may hold several groups. When a rank has died, the others' calls raise Lost.
    """

    def __init__(self, rank: int, size: int, device: torch.device, port: int = 0) -> None:
        import torch.distributed as dist

        self.rank, self.size, self._device, self._cpu = rank, size, device, device.type == "cpu"
        self.port, listening = port, None
        if rank == 0:
            end = socket.create_server(("127.0.0.1", 0))  # a store that is left to itself listens on all interfaces
            self.port, listening = end.getsockname()[1], end.detach()
        self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", self.port, size, is_master=rank == 0, wait_for_workers=False, master_listen_fd=listening
        )
        self._group: Any = None
        self._root: Any = dist.BroadcastOptions()
        self._root.rootRank = self._root.rootTensor = 0

    def join(self) -> None:
        """Meet the other ranks, who must be about to call this too."""
        import torch.distributed as dist

        if self._cpu:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname="127.0.0.1")]
            self._group = gloo(self._store, self.rank, self.size, options)
        else:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            torch.cuda.set_device(self._device)
            self._group = dist.ProcessGroupNCCL(self._store, self.rank, self.size, dist.ProcessGroupNCCL.Options())

    def sum(self, part: Tensor) -> Tensor:
        if not self._cpu:
            self._wait(lambda: self._group.allreduce([part]))
            return part
        total, *others = self._all(part)
        for other in others:
            total = total + other
        return total

    def gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._all(part), -1)

    def agree(self, mine: Tensor) -> Tensor:
        mine = mine.contiguous().clone()  # what comes from inference mode can't be written elsewhere
        self._wait(lambda: self._group.broadcast([mine], self._root))
        return mine

    def _all(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([parts], [part.contiguous()]))
        return parts

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise Lost(str(error)) from error
