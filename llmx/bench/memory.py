"""Peak memory of the server that listens on a port of this machine, read from /proc."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

LISTENING = "0A"


def peak_of_listener(host: str, port: int) -> dict[str, int | None]:
    """Most bytes ever resident of the process that listens there, with its children: where the engine is. Empty for
    another machine, or where /proc doesn't tell."""
    if not _is_here(host):
        return {}
    try:
        inodes = set(_inodes(port))
        owner = next((pid for pid in _processes() if inodes & set(_sockets(pid))), None)
    except OSError:
        return {}
    if owner is None:
        return {}
    parents = {pid: parent for pid in _processes() if (parent := _number(pid, "PPid")) is not None}
    family = [owner, *(pid for pid in parents if _descends(pid, owner, parents))]
    peaks = [1024 * peak for pid in family if (peak := _number(pid, "VmHWM")) is not None]
    return {"peak_memory_bytes": sum(peaks), "peak_process_memory_bytes": max(peaks)} if peaks else {}


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _inodes(port: int) -> Iterator[str]:
    """Of the sockets that listen on a port: proc(5), /proc/net/tcp."""
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net") / name
        for line in path.read_text(encoding="ascii").splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield f"socket:[{fields[9]}]"


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _sockets(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(folder):
            yield os.readlink(f"{folder}/{name}")
    except OSError:  # somebody else's, or gone
        return


def _number(pid: int, name: str) -> int | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)


def _descends(pid: int, ancestor: int, parents: Mapping[int, int]) -> bool:
    above = parents.get(pid)
    while above:
        if above == ancestor:
            return True
        above = parents.get(above)
    return False
