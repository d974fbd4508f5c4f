"""One report: what was run, where, and what came out; as a table for people and as versioned JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmx.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA_VERSION = 1  # raised when a field changes its meaning or goes away; new fields alone don't raise it
ISA_FLAGS = (  # those that decide which kernels can run, x86-64 and Arm, as /proc/cpuinfo spells them
    *("avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx_vnni"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve"),
)


@dataclass(frozen=True)
class Report:
    """What one command found.

    results: nested mappings whose leaves are numbers, texts or lists; {"mean": .., "sd": ..} is one measured value.
    definitions: what the names in `results` mean, by their dotted path. kernels: op -> implementation. seeds: by use.
    model: what was run (name, path, architecture, ...), None for a command without a model.
    """

    command: str
    results: Mapping[str, Any]
    model: Mapping[str, Any] | None = None
    model_defaulted: bool = False
    definitions: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    argv: tuple[str, ...] = field(default_factory=lambda: tuple(sys.argv))
    environment: Mapping[str, Any] = field(default_factory=lambda: environment())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; a number that is not finite becomes null."""
        return {
            "schema_version": SCHEMA_VERSION,
            "tool": "llmx",
            "tool_version": _version(),
            "command": self.command,
            "argv": list(self.argv),
            "started": self.started.astimezone(UTC).isoformat(timespec="seconds"),
            "environment": _plain(self.environment),
            "model": _plain(self.model),
            "model_defaulted": self.model_defaulted,
            "definitions": _plain(self.definitions),
            "kernels": _plain(self.kernels),
            "seeds": _plain(self.seeds),
            "results": _plain(self.results),
        }

    def table(self) -> Table:
        """`results` as one table, a section for each of its entries."""
        title = f"llmx {self.command}" + (f": {self.model['name']}" if self.model and "name" in self.model else "")
        return _table(title, self.results)

    def environment_table(self) -> Table:
        return _table("environment", self.environment)

    def write_json(self, path: Path) -> None:
        """Write the report whole or not at all. UsageError where the path can't be written."""
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        try:
            write_whole(path, text)
        except OSError as error:
            raise UsageError(f"The report can't be written to {path}: {error.strerror}.") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all. OSError where that fails."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _version() -> str:
    from llmx import __version__

    return __version__


def _table(title: str, values: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in values.items():
        for path, text in _rows(value, name):
            table.add_row(path, text)
        table.add_section()
    return table


def _rows(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        if "mean" in value:
            spread = f" ± {_number(value['sd'])}" if value.get("sd") is not None else ""
            yield path, _number(value["mean"]) + spread
            return
        for key, inner in value.items():
            yield from _rows(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        shown = ", ".join(_number(item) for item in value) if len(value) <= 8 else f"{len(value)} values"
        yield path, shown or "none"
    else:
        yield path, f"{value / 2**30:.1f} GiB" if path.endswith("memory_bytes") and value else _number(value)


def _number(value: Any) -> str:
    """Four digits that matter, whole numbers as they are."""
    if not isinstance(value, float):
        return "–" if value is None else f"{value:,}" if type(value) is int else str(value)
    if not math.isfinite(value):
        return str(value)
    decimals = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 1
    return f"{value:,.{min(decimals, 6)}f}"


def _plain(value: Any) -> Any:
    """Only what JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def environment() -> dict[str, Any]:
    """Where this runs: processor, memory, versions. Torch is asked only when it is loaded already."""
    name, flags = _processor()
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": {
            "model": name,
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "isa": [flag for flag in ISA_FLAGS if flag in flags],
        },
        "memory_bytes": _memory(),
        "torch": _installed("torch"),
        "packages": {package: _installed(package) for package in ("numpy", "tokenizers", "triton")},
        "gpus": _gpus(),
    }


def _processor() -> tuple[str, frozenset[str]]:
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip().lower(), value.strip())
    except OSError:
        pass  # not Linux
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, frozenset((fields.get("flags") or fields.get("features") or "").split())


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, Any]] | None:
    """The CUDA devices, None while torch isn't loaded: loading it is not this function's to decide."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    found = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    properties = [torch.cuda.get_device_properties(index) for index in found]
    return [{"name": p.name, "memory_bytes": p.total_memory, "capability": f"{p.major}.{p.minor}"} for p in properties]
