"""Text from one file of a data set repository of the Hugging Face Hub, through huggingface_hub and its cache."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from llmx.errors import LlmxError, UsageError
from llmx.evals.text import Written, decode

COLUMN = "text"
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?:(?P<file>[^:]+)", re.ASCII)


def fetch(name: str, say: Callable[[str], None]) -> Written:
    """`ORG/NAME[@REVISION]:FILE` as one text. A .parquet or .jsonl file gives its column `text`, its rows joined by an
    empty line, as the GPTQ and AWQ papers read WikiText-2; any other is text itself.

    UsageError for a name or a file that can't be; LlmxError where the hub doesn't give it.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise UsageError(
            f"--dataset {name} names no file of a data set.",
            hint="write ORG/NAME:FILE, such as Salesforce/wikitext:wikitext-2-raw-v1/test-00000-of-00001.parquet",
        )
    say(f"fetching {name}")
    path = _download(name, found["repo"], found["file"], found["revision"])
    if path.suffix == ".parquet":
        return Written("dataset", name, "\n\n".join(_parquet(path, name)))
    if path.suffix in (".jsonl", ".ndjson"):
        return Written("dataset", name, "\n\n".join(_lines(decode(path.read_bytes(), name), name)))
    return Written("dataset", name, decode(path.read_bytes(), name))


def _download(name: str, repo: str, file: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(repo, file, repo_type="dataset", revision=revision))
    except HFValidationError as error:
        raise UsageError(f"--dataset {name}: {error}") from error
    except LocalEntryNotFoundError as error:
        raise LlmxError(
            f"--dataset {name} is not in the hub's cache, and the hub can't be reached.",
            hint="download the file elsewhere and give it with --text",
        ) from error
    except HfHubHTTPError as error:
        why = str(error).strip().splitlines()
        raise LlmxError(f"The hub does not give {name}: {why[-1] if why else type(error).__name__}") from error
    except OSError as error:
        raise LlmxError(f"{name} can't be fetched: {error}") from error


def _parquet(path: Path, name: str) -> list[str]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"{name} is a parquet file, which needs pyarrow.", hint="Run: pip install pyarrow") from None
    try:
        table = pyarrow.parquet.read_table(path, columns=[COLUMN])
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"{name} can't be read: {error}") from error
    if COLUMN not in table.column_names:
        raise UsageError(f"{name} has no column {COLUMN!r}.")
    rows: list[str] = table[COLUMN].to_pylist()
    return rows


def _lines(text: str, name: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)[COLUMN]
            except (ValueError, KeyError, TypeError):
                row = None
            if not isinstance(row, str):
                raise UsageError(f"{name}, line {number}: no object with the text {COLUMN!r}.")
            yield row
