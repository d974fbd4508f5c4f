"""Where the calibration text's hidden states are kept, and whether the disk has room for what a run writes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx.errors import UsageError

PLACES = ("auto", "ram", "disk")
SHARE = 4  # auto: in memory as long as they take at most one in so many of the bytes that are free
STATE_BYTES = 4  # float32


@dataclass(frozen=True)
class States:
    """place: ram or disk; None where no text is calibrated on."""

    place: str | None
    bytes: int

    @property
    def on_disk(self) -> int:
        """Bytes of the disk."""
        return self.bytes if self.place == "disk" else 0

    @property
    def in_memory(self) -> int:
        return self.bytes if self.place == "ram" else 0

    def facts(self) -> dict[str, Any]:
        return {"place": self.place, "bytes": self.bytes}

    def __str__(self) -> str:
        where = "in memory" if self.place == "ram" else "in a file beside the result"
        return f"hidden states: {_size(self.bytes)} {where}"


def check_place(asked: str) -> None:
    """UsageError for what `--states` does not know."""
    if asked not in PLACES:
        raise UsageError(f"--states must be {', '.join(PLACES[:-1])} or {PLACES[-1]}, not {asked!r}.")


def place(asked: str, tokens: int, hidden: int) -> States:
    """Of `tokens` tokens in a model of width `hidden`. asked: of PLACES."""
    import torch

    from llmx.device import available_memory

    size = tokens * hidden * STATE_BYTES
    if not size:
        return States(None, 0)
    if asked == "auto":
        asked = "disk" if size * SHARE > available_memory(torch.device("cpu")) else "ram"
    return States(asked, size)


def check_disk(path: Path, result: int, states: States) -> None:
    """UsageError if the disk of `path` can't hold `result` bytes beside the states; what an earlier run left unfinished
    is gone on with or replaced."""
    place = path.absolute().parent
    while not place.is_dir() and place != place.parent:
        place = place.parent
    partial = path.with_name(path.name + ".partial")
    left = sum(file.stat().st_size for file in partial.glob("*.safetensors"))
    free = shutil.disk_usage(place).free + left
    if result + states.on_disk <= free:
        return
    parts = f"{path.name} needs {_size(result)}"
    if states.on_disk:
        parts += f" and its hidden states {_size(states.on_disk)} until it is done"
    hint = "name a folder on a larger disk with -o"
    if result <= free:
        hint += ", keep the states in memory with --states ram, or lower --samples"
    raise UsageError(f"{parts}; {place} has {_size(free)} free.", hint=hint)


def _size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
