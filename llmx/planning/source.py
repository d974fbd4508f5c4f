"""From a model's name to its anatomy: config.json or a GGUF header is all that is read, and all that is fetched."""

from __future__ import annotations

from pathlib import Path

from llmx.formats.fields import load_json
from llmx.formats.gguf import open_gguf
from llmx.formats.hub import locate
from llmx.formats.hub_names import parse
from llmx.planning.anatomy import Anatomy
from llmx.planning.configs import from_config
from llmx.planning.gguf_header import from_gguf

CONFIG_LIMIT = 4 * 2**20


def read(name: str) -> Anatomy:
    """A folder with config.json or that file, a .gguf file, `demo`, or a hub name, of which config.json is fetched.

    UsageError for anything else, and for a model whose family can't be planned.
    """
    path = Path(name).expanduser()
    if path.name == "config.json" and path.is_file():
        return from_config(load_json(path, CONFIG_LIMIT), name)
    remote = None if path.exists() else parse(name)
    if remote is not None and not remote.what:
        from llmx.formats.hub_fetch import config_of

        return from_config(load_json(config_of(remote), CONFIG_LIMIT), name)
    located = locate(name)
    if located.kind == "gguf":
        return from_gguf(open_gguf(located.path), name)
    return from_config(load_json(located.path / "config.json", CONFIG_LIMIT), name)
