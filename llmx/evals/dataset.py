"""Text from one file of a data set, on the disk or on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Callable

from llmx.errors import UsageError
from llmx.evals.text import Written, decode
from llmx.formats.hub_data import locate_data
from llmx.formats.rows import Row, read_rows

COLUMN = "text"
OF_ROWS = (".parquet", ".jsonl", ".ndjson", ".json")


def fetch(name: str, say: Callable[[str], None], flag: str = "--dataset") -> Written:
    """`hf:ORG/NAME/FILE`, ORG/NAME:FILE or a path as one text. A .parquet, .jsonl or .json file gives its column
    `text`, its rows joined by an empty line, as the GPTQ and AWQ papers read WikiText-2; any other is text itself.

    flag: that named it. UsageError for a name or a file that can't be; LlmxError where the hub doesn't give it.
    """
    path = locate_data(name, say, flag)
    if path.suffix in OF_ROWS:
        text = "\n\n".join(map(_text, read_rows(path, f"{flag} {name}", (COLUMN,))))
        if not text.strip():
            raise UsageError(f"{flag} {name} holds no text.")
        return Written("dataset", name, text)
    try:
        return Written("dataset", name, decode(path.read_bytes(), name))
    except OSError as error:
        raise UsageError(f"{flag} {name} can't be read: {error.strerror}.") from error


def _text(row: Row) -> str:
    found = None if row.data is None else row.data.get(COLUMN)
    if not isinstance(found, str):
        raise UsageError(f"{row.where}: no object with the text {COLUMN!r}.")
    return found
