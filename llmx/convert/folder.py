"""What a new model is called, and a folder that appears whole or not at all: made elsewhere, then renamed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from llmx.errors import UsageError
from llmx.formats.hub import Located


def short_name(located: Located) -> str:
    """What an output is named after: the last part of the model's name, without `.gguf`."""
    return Path(located.name.rstrip("/")).resolve().name.removesuffix(".gguf").replace(":", "-")


def check_taken(path: Path, force: bool) -> None:
    """UsageError if something is there that may not be replaced; with `force` that is what is no model's folder."""
    if not path.exists():
        return
    if not force:
        raise UsageError(f"{path} is there already.", hint="choose another name with -o, or replace it with --force")
    if not path.is_dir() or (any(path.iterdir()) and not (path / "config.json").is_file()):
        raise UsageError(f"{path} is no model's folder; --force does not replace it.")


def put_in_place(folder: Path, path: Path, force: bool) -> None:
    """Rename a finished folder to `path`, in place of what was there."""
    check_taken(path, force)
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    if path.exists():
        path.rename(old)
    folder.rename(path)
    shutil.rmtree(old, ignore_errors=True)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Have a folder's names on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
