"""Rows of a data set's file: JSON lines, a JSON list, or Parquet (which needs pyarrow)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx.errors import UsageError

PARQUET = b"PAR1"


@dataclass(frozen=True)
class Row:
    """`where`: the file and the line (or row), for messages. `data`: None where it is no JSON object."""

    where: str
    data: dict[str, Any] | None


def read_rows(path: Path, name: str, columns: Sequence[str] | None = None) -> list[Row]:
    """All rows of `path`, called `name` in messages. A JSON list, as ShareGPT's files are, may be of several lines.

    columns: those to read of Parquet, where it has them; None: all. UsageError where the file can't be read.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(PARQUET)) == PARQUET:
                return _parquet(path, name, columns)
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text: byte {error.start} can't be read.") from None
    except OSError as error:
        raise UsageError(f"{name} can't be read: {error.strerror}.") from None
    if text.lstrip()[:1] == "[" and isinstance(rows := _parsed(text), list):
        return [Row(f"{name}, entry {at}", _object(one)) for at, one in enumerate(rows, 1)]
    # Not splitlines(): JSON may hold U+2028 and the like as they are.
    lines = enumerate(text.split("\n"), 1)
    return [Row(f"{name}, line {at}", _object(_parsed(line))) for at, line in lines if line.strip()]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _object(value: Any) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


def _parquet(path: Path, name: str, columns: Sequence[str] | None) -> list[Row]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"{name} is a Parquet file, which needs pyarrow.", hint="Run: pip install pyarrow") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
        there = file.schema_arrow.names
        table = file.read(columns=None if columns is None else [column for column in columns if column in there])
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{name} can't be read: {error}") from error
    return [Row(f"{name}, row {at}", row) for at, row in enumerate(table.to_pylist(), 1)]
