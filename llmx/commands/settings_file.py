"""A file of settings as text: keys, values as they were written, and their lines. YAML is imported here alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmx.errors import UsageError

NULL = "tag:yaml.org,2002:null"


@dataclass(frozen=True)
class Entry:
    """One key, with dashes. value: text, a list of texts, None for null, or the entries of a nested mapping."""

    key: str
    value: str | list[str] | tuple[Entry, ...] | None
    origin: str  # "file.yaml:3"


def read(path: Path) -> tuple[Entry, ...]:
    """The file's entries in order. UsageError with the line for what is no mapping of plain values, or twice there."""
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UsageError(f"--config {path} can't be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--config {path} is not UTF-8 text: byte {error.start} can't be read.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UsageError(f"{where} is not YAML: {getattr(error, 'problem', None) or error}.") from error
    except RecursionError as error:
        raise UsageError(f"{path} is nested too deeply.") from error
    if root is None:
        return ()
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path} holds no `key: value` lines.")
    return _entries(root, path, nested=False)


def _entries(mapping: Any, path: Path, nested: bool) -> tuple[Entry, ...]:
    found: dict[str, Entry] = {}
    for key, value in mapping.value:
        origin = f"{path}:{key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise UsageError(f"{origin}: a key must be a plain word.")
        name = str(key.value).replace("_", "-")
        if name in found:
            raise UsageError(f"{origin}: {name} is there twice; first at {found[name].origin}.")
        found[name] = Entry(name, _value(value, path, origin, name, nested), origin)
    return tuple(found.values())


def _value(node: Any, path: Path, origin: str, name: str, nested: bool) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return None if node.tag == NULL else str(node.value)
    if isinstance(node, yaml.SequenceNode):
        if not all(isinstance(one, yaml.ScalarNode) for one in node.value):
            raise UsageError(f"{origin}: {name} must be a list of plain values.")
        return [str(one.value) for one in node.value]
    if nested:
        raise UsageError(f"{origin}: {name} must be a plain value or a list of them.")
    return _entries(node, path, nested=True)
