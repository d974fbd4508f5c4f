"""Ways to write tool calls, a file each. The folder is the registry: a file's name is the format's, and `detect` (does
this chat template ask for it?) and `build` (the format, by the template) are all there is to write.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from llmx.errors import UsageError

if TYPE_CHECKING:
    from llmx.server.calls import Format

AUTO, OFF = "auto", "off"


def check_name(name: str) -> None:
    """UsageError if it is neither a format nor "auto" nor "off"."""
    known = [AUTO, OFF, *sorted(m.name for m in pkgutil.iter_modules(__path__))]
    if name not in known:
        raise UsageError(f"--tool-call-parser {name[:80]!r} does not exist; there are {', '.join(known)}.")


@cache
def formats() -> dict[str, ModuleType]:
    """Every file of this folder, by name."""
    return {m.name: importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)}


def find(name: str, template: str) -> Format | None:
    """The format `name`, None for "off"; with "auto" the one that the template's source shows, None for none."""
    check_name(name)
    found = formats().get(name)
    if name == AUTO:
        found = next((file for file in formats().values() if file.detect(template)), None)
    if found is None:
        return None
    built: Format = found.build(template)
    return built
