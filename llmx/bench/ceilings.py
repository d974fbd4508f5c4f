"""What the machine allows: read bandwidth and matmul rate, measured here and now, against a model's bytes and flops."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TRIES = 5


@dataclass(frozen=True)
class Ceilings:
    """`read`: bytes per second. `matmul`: floating-point operations per second, in `dtype`."""

    read: float
    matmul: float
    dtype: str


@dataclass(frozen=True)
class Bound:
    """The least seconds a unit of work can take: `reads` for its bytes, `computes` for its operations."""

    reads: float
    computes: float

    @property
    def seconds(self) -> float:
        return max(self.reads, self.computes)

    @property
    def by(self) -> str:
        return "memory reads" if self.reads >= self.computes else "arithmetic"


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Least seconds of TRIES runs after one that isn't timed; waits for the device."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    best = float("inf")
    for i in range(TRIES + 1):
        wait()
        start = time.perf_counter()
        work()
        wait()
        if i:
            best = min(best, time.perf_counter() - start)
    return best


def measure(device_name: str, dtype_name: str) -> Ceilings:
    """Both rates on `device_name`, with the threads this process has set.

    A CPU is measured in float32 whatever the model's dtype, as the reference kernels compute there."""
    import torch

    device = torch.device(device_name)
    cuda = device.type == "cuda"
    dtype = getattr(torch, dtype_name) if cuda else torch.float32
    stream = torch.ones((1 << 28) if cuda else (1 << 26), device=device)  # float32: 1 GiB, 256 MiB: beyond any cache
    read = stream.nbytes / _best(stream.sum, device)
    n = 8192 if cuda else 1024
    a = torch.ones(n, n, dtype=dtype, device=device)
    matmul = 2 * n**3 / _best(lambda: a @ a, device)
    return Ceilings(read, matmul, str(dtype).removeprefix("torch."))


def bound(ceilings: Ceilings, weight_bytes: float, parameters: float, tokens: int) -> Bound:
    """For one pass over all weights that multiplies each of them by `tokens` tokens."""
    return Bound(weight_bytes / ceilings.read, 2.0 * parameters * tokens / ceilings.matmul)
