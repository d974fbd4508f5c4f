"""Files of data sets by name: one on the disk, or `hf:ORG/NAME/FILE` of the Hugging Face Hub, through its cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from llmx.errors import UsageError
from llmx.formats.hub_names import MAIN

PREFIX = "hf:"
EXAMPLE = "hf:Salesforce/wikitext/wikitext-2-raw-v1/test-00000-of-00001.parquet"
_REPO = r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)"
_NAMES = (  # a revision with a slash in it needs the colon
    re.compile(rf"{_REPO}(?:@(?P<revision>\w[\w./-]*))?:(?P<file>[^:]+)", re.ASCII),
    re.compile(rf"{_REPO}(?:@(?P<revision>\w[\w.-]*))?/(?P<file>[^:]+)", re.ASCII),
)


def is_hub_name(name: str) -> bool:
    """`hf:..`, or ORG/NAME:FILE where nothing on the disk is called so."""
    return name.startswith(PREFIX) or (_NAMES[0].fullmatch(name) is not None and not Path(name).exists())


def locate_data(name: str, say: Callable[[str], None], flag: str = "--dataset") -> Path:
    """The file that `name` means: hf:ORG/NAME[@REVISION]/FILE, ORG/NAME[@REVISION]:FILE, or a path.

    UsageError for a name that means nothing; LlmxError if the hub does not give it. `say` is told of what takes time.
    """
    if not is_hub_name(name):
        return Path(name).expanduser()
    rest = name.removeprefix(PREFIX)
    found = _NAMES[0].fullmatch(rest) or _NAMES[1].fullmatch(rest)
    if found is None or ".." in rest or "//" in rest or rest.endswith("/"):
        raise UsageError(f"{flag} {name} names no file of a data set.", hint=f"Write hf:ORG/NAME/FILE: {EXAMPLE}")
    from llmx.formats.hub_fetch import data_file

    say(f"fetching {name}")
    return data_file(found["repo"], found["file"], found["revision"] or MAIN)
