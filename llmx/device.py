"""What this machine offers: device, threads, memory. No torch until a device is asked for."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmx.errors import UsageError

if TYPE_CHECKING:
    import torch

CGROUP = Path("/sys/fs/cgroup")
PROCESS_GROUPS = Path("/proc/self/cgroup")
SPINS = "5000"  # some microseconds: longer than the gap between two operations, far shorter than a time slice


def resolve_device(name: str) -> torch.device:
    """ "auto" is the first CUDA device if there is one, else the CPU. UsageError for a CUDA device that isn't there."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise UsageError(
                f"--device {name}: torch {torch.__version__} sees no CUDA device.",
                hint="use --device cpu, or install a CUDA build of torch and check nvidia-smi",
            )
        index = name.partition(":")[2] or "0"
        if not index.isdigit() or int(index) >= torch.cuda.device_count():
            raise UsageError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices, counted from 0.")
        return torch.device("cuda", int(index))
    return torch.device(name)


def thread_count(ranks: int = 1) -> int:
    """Threads for each of `ranks` processes that share this machine: its affinity's processors, within the quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return max(1, math.ceil(min([cores, *_quotas()])) // ranks)


def use_threads(wanted: int | None = None, ranks: int = 1) -> int:
    """Have torch and our kernels use `wanted` threads, or as many as `thread_count` finds; returns how many.

    UsageError for fewer than one.
    """
    import torch

    torch.set_num_threads(chosen_threads(wanted, ranks))
    return torch.get_num_threads()


def chosen_threads(wanted: int | None, ranks: int = 1) -> int:
    """`wanted`, or as many as `thread_count` finds. UsageError for fewer than one."""
    if wanted is not None and wanted < 1:
        raise UsageError(f"--threads must be at least 1, not {wanted}.")
    return wanted or thread_count(ranks)


def _quotas() -> Iterator[float]:
    """Processors that each control group around this process may use at a time, of those that limit it."""
    for folder in _groups("cpu"):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if (found := folder / "cpu.max").exists():
                quota, period = found.read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{what}_us").read_text().strip() for what in ("quota", "period"))
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)


def _groups(controller: str) -> Iterator[Path]:
    """Folders of the control groups that this process is in, inner before outer: version 1's of `controller`, and 2's.

    A container may see paths that begin outside of it; then the folder it has been given is at the root.
    """
    try:
        lines = PROCESS_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, names, path = line.split(":", 2)
        if number == "0":
            roots = [CGROUP, CGROUP / "unified"]
        elif controller in names.split(","):
            roots = [CGROUP / names, CGROUP / controller]
        else:
            continue
        for root in roots:
            inner = root / path.lstrip("/")
            for folder in (inner, *inner.parents):
                if folder.is_dir():
                    yield folder
                if folder == root:
                    break


def yield_while_waiting() -> None:
    """Let torch's CPU threads sleep soon when they wait for each other; it must be said before torch is imported.

    libgomp's threads spin for milliseconds by default. With another busy process on a core, the one that spins holds up
    the one that is waited for at every operation: a step takes several times as long.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def available_memory(device: torch.device) -> int:
    """Bytes that can be taken now: free on a CUDA device; on the CPU what the kernel says, within the cgroup."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    found = _meminfo("MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            found = min(found, max(0, int(limit) - int((CGROUP / "memory.current").read_text())))
    except (OSError, ValueError):
        pass
    return found


def total_memory(device: torch.device) -> int:
    """Bytes of the device, or of the machine."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[1])
    return _meminfo("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meminfo(key: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0
