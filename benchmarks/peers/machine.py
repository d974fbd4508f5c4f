"""What state the machine is in: shared and virtual ones change speed within seconds, so each round says it.

The read bandwidth is memchr's, of a byte that isn't there, over memory in 2 MB pages that no cache holds: a C library's
memchr reads whole vectors and does next to nothing with them, and a foreign call lets other threads run.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from llmx.device import thread_count

SIZE = 512 << 20
TRIES = 5
TRIPS = 20_000
ABSENT = 7
SPIN = """
import mmap, os, sys, time
core, mine, trips, fd = (int(arg) for arg in sys.argv[1:])
os.sched_setaffinity(0, {core})
flag = memoryview(mmap.mmap(fd, 4096))
late, best = time.perf_counter() + 20, float("inf")
began = time.perf_counter()
for turn in range(mine, trips, 2):
    expected = turn & 127
    while flag[0] != expected:
        if flag[64] or time.perf_counter() > late:
            flag[64] = 1
            sys.exit(1)
    flag[0] = (turn + 1) & 127
    if turn % 400 == mine:
        now = time.perf_counter()
        best, began = min(best, now - began) if turn > mine else best, now
print(best / 200)
"""


class Machine:
    """Probes with memory of their own, taken once."""

    def __init__(self) -> None:
        self.threads = thread_count()
        self.memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof((ctypes.c_char * SIZE).from_buffer(self.memory))
        ctypes.memset(self.address, 1, SIZE)
        self.memchr = ctypes.CDLL(None).memchr
        self.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        self.times = _times()

    def read_bandwidth(self) -> float:
        """Bytes per second with all threads: the best of some tries."""
        part = SIZE // self.threads

        def once() -> float:
            arguments = [(self.address + i * part, ABSENT, part) for i in range(self.threads)]
            readers = [threading.Thread(target=self.memchr, args=one) for one in arguments]
            began = time.perf_counter()
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            return part * self.threads / (time.perf_counter() - began)

        return max(once() for _ in range(TRIES))

    def probe(self) -> dict[str, Any]:
        """Now, in some seconds. `stolen`, `busy`: shares of all processors' time since the last probe."""
        before, self.times = self.times, _times()
        spent = [now - then for now, then in zip(self.times, before, strict=True)]
        whole = sum(spent) or 1
        return {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "load": os.getloadavg()[0],
            "stolen": round(spent[7] / whole, 4),
            "busy": round(1 - (spent[3] + spent[4]) / whole, 4),
            "read_bandwidth": self.read_bandwidth(),
            "round_trip_ns": round_trip(),
        }

    def about(self) -> dict[str, Any]:
        from llmx.report import environment

        huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
        return environment() | {
            "usable_processors": self.threads,
            "transparent_huge_pages": huge.read_text().strip() if huge.exists() else None,
        }


def _times() -> list[int]:
    """user, nice, system, idle, iowait, irq, softirq, steal: of all processors since the start, in ticks."""
    return [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]


def round_trip() -> float | None:
    """Nanoseconds for a cache line to another processor and back, with Python's loops around it (some hundred ns):
    the best 200 trips. It tells near processors from far ones. None with one processor, or where it took too long."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        return None
    shared = os.memfd_create("round-trip")
    os.ftruncate(shared, 4096)
    try:
        both = [
            subprocess.Popen(
                [sys.executable, "-S", "-c", SPIN, str(core), str(i), str(TRIPS), str(shared)],
                stdout=subprocess.PIPE, text=True, pass_fds=(shared,),
            )
            for i, core in enumerate(cores)
        ]  # fmt: skip
        said = [one.communicate()[0] for one in both]
    finally:
        os.close(shared)
    if any(one.returncode for one in both):
        return None
    return round(1e9 * statistics.fmean(float(one) for one in said), 1)
