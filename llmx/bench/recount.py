"""Tokens counted again out of the text, by the model's own tokenizer: where a server tells no number, and beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmx.bench.records import Record
from llmx.bench.sse import RETOKENIZED
from llmx.bench.workload import Job
from llmx.errors import LlmxError

if TYPE_CHECKING:
    from llmx.tokenizer import Tokenizer

APART = 0.03  # share from which two counts of the same texts are pointed out


@dataclass(frozen=True)
class Recount:
    """`name`: where the tokenizer is from, as the user or the server wrote it."""

    name: str
    tokenizer: Tokenizer

    def tokens(self, text: str) -> int:
        """Of a text alone, without what a prompt begins with. Text that looks like a special token is one."""
        return len(self.tokenizer.encode(text, add_special=False))

    def prompt(self, job: Job) -> Job:
        """With its prompt's length; of a chat that of its texts, since only the server knows its template."""
        if job.input_len:
            return job
        parts = (
            [job.prompt]
            if isinstance(job.prompt, str)
            else [m["content"] for m in job.prompt if isinstance(m, Mapping)]
        )
        return replace(job, prompt_len=sum(map(self.tokens, parts)))

    def outputs(self, records: Sequence[Record], source: str) -> None:
        """Write the counts into whole answers; where `source` is RETOKENIZED, they are the counts."""
        for record in records:
            if not record.ended or record.error is not None:
                continue
            record.retokenized = self.tokens(record.text)
            if source == RETOKENIZED:
                record.counted = record.retokenized
                record.sized = record.retokenized in (len(record.arrivals), len(record.arrivals) + 1)


def find(named: str | None, served: str) -> Recount | None:
    """By --tokenizer (a model, or a folder with a tokenizer alone), else by the served model's name where that is one
    here: nothing is fetched. LlmxError where --tokenizer leads nowhere."""
    from llmx.formats.hub import locate
    from llmx.tokenizer import load_tokenizer

    if named is None:
        try:
            return Recount(served, load_tokenizer(locate(served)))
        except LlmxError:
            return None
    folder = Path(named).expanduser()
    alone = any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model"))
    return Recount(named, load_tokenizer(folder if alone else locate(named)))
