"""What the processes of an engine are up to, as Linux tells it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

LISTENING = "0A"  # in /proc/net/tcp


def children(parent: int) -> list[int]:
    """Living descendants of a process, the nearest first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        status = _stat(int(folder.name))
        if status is not None and status[0] != "Z" and int(status[1]) == parent:
            found.append(int(folder.name))
    return found + [one for child in found for one in children(child)]


def living(processes: Iterable[int]) -> list[int]:
    """Those that run still; whom nobody has waited for has ended all the same."""
    return [one for one in processes if (status := _stat(one)) is not None and status[0] != "Z"]


def seconds_until_gone(processes: Sequence[int], patience: float = 60.0) -> float:
    began = time.monotonic()
    while living(processes) and time.monotonic() - began < patience:
        time.sleep(0.02)
    return time.monotonic() - began


def listeners(process: int) -> set[tuple[str, int]]:
    """(address as the kernel writes it, port) of every TCP socket on which a process listens."""
    inodes = set()
    for fd in Path(f"/proc/{process}/fd").iterdir():
        try:
            inodes.add(fd.readlink().name)
        except OSError:  # closed since
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = fields = line.split()
            if state == LISTENING and f"socket:[{fields[9]}]" in inodes:
                address, port = local.split(":")
                found.add((address, int(port, 16)))
    return found


def _stat(process: int) -> list[str] | None:
    """State, parent, ...; the name before them may hold anything."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
