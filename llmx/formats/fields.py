"""Typed reads of a JSON object or of GGUF metadata: a wrong value is one sentence that names the file and the key."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, overload

from llmx.errors import UsageError

T = TypeVar("T")
V = TypeVar("V")
WIDEST = 2**63 - 1  # whole numbers beyond int64 are refused whatever a caller allows
JSON_LIMIT = 64 * 2**20


class _Required:
    """The type of REQUIRED: no default, an absent key is an error."""


REQUIRED: Final = _Required()


def shown(value: Any) -> str:
    """`value` as error messages show it: one line of at most 60 characters, whatever a file holds."""
    if isinstance(value, (str, bytes)):
        text = repr(value[:60])
        return text if len(value) <= 60 else text + "..."
    if isinstance(value, (list, tuple, dict)):
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value)}"
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """A mapping with typed reads. `where` ("config.json", "model.gguf") begins every error message.

    `null` counts as absent. Without a default an absent key is a UsageError, and so is a value of another type or
    outside [low, high]: a bool or 1.0 is no whole number, and a number is finite.
    """

    def __init__(self, data: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.data = data
        self.where = where
        self.prefix = prefix

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.data.get(key) is not None

    def keys(self) -> Iterable[str]:
        """The keys whose value is not null."""
        return [key for key in self.data if key in self]

    @overload
    def integer(self, key: str, *, low: int | None = None, high: int | None = None) -> int: ...
    @overload
    def integer(self, key: str, default: T, *, low: int | None = None, high: int | None = None) -> int | T: ...
    def integer(self, key: str, default: Any = REQUIRED, *, low: int | None = None, high: int | None = None) -> Any:
        """A whole number in [low, high]."""
        return self._read(key, default, lambda value: _integer(value, low, high), "a whole number" + _range(low, high))

    @overload
    def number(self, key: str, *, low: float | None = None, high: float | None = None) -> float: ...
    @overload
    def number(self, key: str, default: T, *, low: float | None = None, high: float | None = None) -> float | T: ...
    def number(self, key: str, default: Any = REQUIRED, *, low: float | None = None, high: float | None = None) -> Any:
        """A finite number in [low, high], as a float."""
        return self._read(key, default, lambda value: _number(value, low, high), "a number" + _range(low, high))

    @overload
    def boolean(self, key: str) -> bool: ...
    @overload
    def boolean(self, key: str, default: T) -> bool | T: ...
    def boolean(self, key: str, default: Any = REQUIRED) -> Any:
        """true or false."""
        return self._read(key, default, lambda value: value if isinstance(value, bool) else None, "true or false")

    @overload
    def text(self, key: str, *, one_of: Iterable[str] | None = None) -> str: ...
    @overload
    def text(self, key: str, default: T, *, one_of: Iterable[str] | None = None) -> str | T: ...
    def text(self, key: str, default: Any = REQUIRED, *, one_of: Iterable[str] | None = None) -> Any:
        """A string, one of `one_of` where that is given."""
        allowed = None if one_of is None else tuple(one_of)
        wanted = "a string" if allowed is None else "one of " + ", ".join(allowed)
        return self._read(key, default, lambda value: _text(value, allowed), wanted)

    @overload
    def integers(self, key: str, *, low: int | None = None, high: int | None = None) -> tuple[int, ...]: ...
    @overload
    def integers(
        self, key: str, default: T, *, low: int | None = None, high: int | None = None
    ) -> tuple[int, ...] | T: ...
    def integers(self, key: str, default: Any = REQUIRED, *, low: int | None = None, high: int | None = None) -> Any:
        """A list of whole numbers; one number stands for a list of one."""
        each = "a whole number" + _range(low, high)
        return self._read(
            key,
            default,
            lambda value: _each(value, lambda item: _integer(item, low, high)),
            f"{each}, or a list of such",
        )

    @overload
    def numbers(self, key: str) -> tuple[float, ...]: ...
    @overload
    def numbers(self, key: str, default: T) -> tuple[float, ...] | T: ...
    def numbers(self, key: str, default: Any = REQUIRED) -> Any:
        """A list of finite numbers; one number stands for a list of one."""
        return self._read(
            key, default, lambda value: _each(value, lambda item: _number(item, None, None)), "a list of numbers"
        )

    @overload
    def strings(self, key: str) -> tuple[str, ...]: ...
    @overload
    def strings(self, key: str, default: T) -> tuple[str, ...] | T: ...
    def strings(self, key: str, default: Any = REQUIRED) -> Any:
        """A list of strings; one string stands for a list of one."""
        return self._read(key, default, _strings, "a list of strings")

    @overload
    def section(self, key: str) -> Fields: ...
    @overload
    def section(self, key: str, default: T) -> Fields | T: ...
    def section(self, key: str, default: Any = REQUIRED) -> Any:
        """A nested table, as Fields whose errors name the whole path ("rope_scaling.factor")."""
        prefix = f"{self.prefix}{key}."
        return self._read(
            key,
            default,
            lambda value: Fields(value, self.where, prefix) if isinstance(value, dict) else None,
            "a table",
        )

    def _read(self, key: str, default: Any, convert: Callable[[Any], V | None], wanted: str) -> V | Any:
        value = self.data.get(key)
        if value is None:
            if default is REQUIRED:
                raise UsageError(f"{self._path(key)} is missing; it must be {wanted}.")
            return default
        converted = convert(value)
        if converted is None:
            raise UsageError(f"{self._path(key)} must be {wanted}, not {shown(value)}.")
        return converted

    def _path(self, key: str) -> str:
        path = self.prefix + key  # parts of it may be the file's own words: no control characters, no endless line
        return f"{self.where}: {path if path.isprintable() and len(path) <= 160 else shown(path)}"


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" between {low} and {high}"
    if low is not None:
        return f" of at least {low}"
    return "" if high is None else f" of at most {high}"


def _integer(value: Any, low: int | None, high: int | None) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > WIDEST:
        return None
    return value if (low is None or value >= low) and (high is None or value <= high) else None


def _number(value: Any, low: float | None, high: float | None) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    inside = math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high)
    return value if inside else None


def _text(value: Any, allowed: tuple[str, ...] | None) -> str | None:
    return value if isinstance(value, str) and (allowed is None or value in allowed) else None


def _each(value: Any, convert: Callable[[Any], V | None]) -> tuple[V, ...] | None:
    items = [convert(item) for item in (value if isinstance(value, (list, tuple)) else [value])]
    return None if any(item is None for item in items) else tuple(item for item in items if item is not None)


def _strings(value: Any) -> tuple[str, ...] | None:
    """Vocabularies have hundreds of thousands."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return tuple(items) if set(map(type, items)) <= {str} else None


def parse_json(text: bytes, where: str, *, unique: bool = False) -> Fields:
    """The JSON object in `text` (UTF-8). `unique`: a key that appears twice in one table is an error too."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(items)
        if len(table) < len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise UsageError(f"{where} names {shown(twice)} twice.")
        return table

    try:
        data = json.loads(text.decode("utf-8"), object_pairs_hook=pairs if unique else None)
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 text (byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not valid JSON: {error.msg} at line {error.lineno}.") from error
    except RecursionError as error:
        raise UsageError(f"{where} is JSON that is nested too deep.") from error
    except ValueError as error:
        raise UsageError(f"{where} holds a number with too many digits.") from error
    if not isinstance(data, dict):
        raise UsageError(f"{where} must hold a JSON object, not {shown(data)}.")
    return Fields(data, where)


def load_json(path: Path, limit: int = JSON_LIMIT) -> Fields:
    """The JSON object in the file `path`; a missing, broken or over-long one (above `limit` bytes) is a UsageError."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise UsageError(f"{path} has {size:,} bytes; at most {limit:,} are read.")
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}.") from error
    return parse_json(text, path.name)
