"""What the machine allows: read bandwidth and matmul rate, measured here and now, against a model's bytes and flops."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmx.config import EngineInfo

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
class Limit:
    """What the ceilings allow for one pass over the weights, beside what was measured.

    `reads`, `computes`: least seconds for its bytes and for its operations. `reached`: tokens per second.
    """

    tokens: int
    weight_bytes: int
    flops: float
    reads: float
    computes: float
    reached: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.reads, self.computes)

    @property
    def by(self) -> str:
        return "memory reads" if self.reads >= self.computes else "arithmetic"

    def figures(self) -> dict[str, object]:
        """As the report shows it."""
        most = self.tokens_per_second
        return {"bound_by": self.by, "tokens_per_second": most, "share_reached": self.reached / most}


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


def measure_ceilings(device_name: str, dtype_name: str) -> Ceilings:
    """Both rates on `device_name`, with the threads this process has set.

    A CPU is measured in float32 whatever the model's dtype, as the reference kernels compute there."""
    import torch

    device = torch.device(device_name)
    cuda = device.type == "cuda"
    dtype = getattr(torch, dtype_name) if cuda else torch.float32
    stream = torch.ones(1 << 26, device=device)  # float32, 256 MiB: beyond the caches, and room is left for it
    read = stream.nbytes / _best(stream.sum, device)
    n = 4096 if cuda else 1024
    a = torch.ones(n, n, dtype=dtype, device=device)
    matmul = 2 * n**3 / _best(lambda: a @ a, device)
    return Ceilings(read, matmul, str(dtype).removeprefix("torch."))


def weights_as_computed(info: EngineInfo) -> tuple[int, int]:
    """(bytes that a pass over the weights reads, as they are held, parameters)."""
    return info.pass_bytes, info.parameters


def limit(ceilings: Ceilings, weight_bytes: int, parameters: int, tokens: int, reached: float) -> Limit:
    """For one pass over all weights that multiplies each of them by `tokens` tokens."""
    flops = 2.0 * parameters * tokens
    return Limit(tokens, weight_bytes, flops, weight_bytes / ceilings.read, flops / ceilings.matmul, reached)


def serving_limit(
    ceilings: Ceilings, weight_bytes: int, parameters: int, steps: float, computed: float, tokens: float, reached: float
) -> Limit:
    """For `steps` passes that computed `computed` tokens (prompts among them) and gave `tokens` output tokens."""
    read, flops = int(weight_bytes * steps), 2.0 * parameters * computed
    return Limit(round(tokens), read, flops, read / ceilings.read, flops / ceilings.matmul, reached)
