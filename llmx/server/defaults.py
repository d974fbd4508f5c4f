"""Sampling that a request doesn't say: the request's fields > --override-generation-config > the model's
generation_config.json > the library's defaults."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx.core import SamplingParams
from llmx.errors import RequestError, UsageError
from llmx.formats.fields import load_json

FILE = "generation_config.json"
FLAG = "--override-generation-config"
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
COUNTS = ("top_k", "max_tokens", "min_tokens")
KNOWN = (*NUMBERS, *COUNTS, "max_new_tokens")
SOURCES = ("auto", "none")


@dataclass(frozen=True)
class Defaults:
    """source: auto (the file beside the model's weights, if there is one) or none. override: a JSON object. Both take
    transformers' `max_new_tokens` for `max_tokens`. UsageError where they are wrong.
    """

    source: str = "auto"
    override: str | None = None

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise UsageError(f"--generation-config must be {' or '.join(SOURCES)}, not {self.source!r}.")
        self.overridden()

    def overridden(self) -> dict[str, Any]:
        return {} if self.override is None else parse_override(self.override)

    def of(self, model: Path | None) -> dict[str, Any]:
        """Fields of SamplingParams for the model in this directory or file. UsageError for a broken file."""
        found: dict[str, Any] = {}
        file = model / FILE if model is not None else None
        if self.source == "auto" and file is not None and file.is_file():
            # It also holds what isn't about sampling, and methods that aren't built: only what is known counts.
            data = load_json(file).data
            found = _checked({name: data[name] for name in KNOWN if data.get(name) is not None}, FILE)
        return found | self.overridden()


def parse_override(text: str) -> dict[str, Any]:
    """The flag's JSON as fields of SamplingParams. UsageError."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise UsageError(f"{FLAG} must be a JSON object.", hint="""write it like '{"temperature": 0.7}'""")
    for name in given:
        if name not in KNOWN:
            raise UsageError(f"{FLAG} doesn't know {name!r}; it takes {', '.join(KNOWN)}.")
    return _checked(given, FLAG)


def _checked(given: dict[str, Any], where: str) -> dict[str, Any]:
    renamed = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in given.items()}
    for name, value in renamed.items():
        right = (int, float) if name in NUMBERS else int
        if isinstance(value, bool) or not isinstance(value, right):
            kind = "a number" if name in NUMBERS else "a whole number"
            raise UsageError(f"{where}: {name} must be {kind}, not {json.dumps(value)[:40]}.")
    try:
        SamplingParams(**{"max_tokens": None, **renamed})
    except RequestError as error:
        raise UsageError(f"{where}: {error.message}") from None
    return renamed
