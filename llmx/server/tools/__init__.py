"""Ways to write tool calls, a file each. The folder is the registry: `NAME`, `detect` (does this chat template ask for
them?) and `build` (the format, by the template) in a file are all there is to add.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import ModuleType

from llmx.errors import UsageError
from llmx.server.calls import Format


@cache
def formats() -> dict[str, ModuleType]:
    """Every file of this folder, by its NAME."""
    files = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {file.NAME: file for file in files}


def find(name: str, template: str) -> Format | None:
    """The format `name`; with "auto" the one that the template's source shows, None for none. UsageError."""
    if name == "auto":
        found = next((file for file in formats().values() if file.detect(template)), None)
    elif (found := formats().get(name)) is None:
        known = ", ".join(["auto", "off", *sorted(formats())])
        raise UsageError(f"--tool-call-parser {name[:80]!r} does not exist; there are {known}.")
    if found is None:
        return None
    built: Format = found.build(template)
    return built
