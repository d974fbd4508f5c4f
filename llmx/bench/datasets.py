"""What is asked: random prompts, prompts that share beginnings, or a file's. Seeded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmx.bench.entries import COLUMNS, Entry, entry
from llmx.bench.workload import Job, Messages, Span, mixed_lengths, random_prompt
from llmx.errors import UsageError
from llmx.formats.hub_data import locate_data
from llmx.formats.rows import read_rows

RANDOM, PREFIXES = "random", "prefix-repetition"
Say = Callable[[str], None]
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city community name president team minute idea "
    "body information back parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education river stone window garden winter music "
    "letter bridge"
)
WORDS = _WORDS.split()


@dataclass(frozen=True)
class Dataset:
    """`kind`: random, prefix-repetition, or a file's name. `exact`: whether outputs go on to the asked length.

    skipped: rows of the file that ask nothing."""

    kind: str
    input_len: Span
    output_len: Span
    exact: bool = True
    prefix_len: int = 256
    suffix_len: int = 256
    prefixes: int = 10
    entries: tuple[Entry, ...] = ()
    skipped: int = 0

    @property
    def of_ids(self) -> bool:
        return not self.entries

    @property
    def is_chat(self) -> bool:
        return any(not isinstance(entry.prompt, str) for entry in self.entries)

    @property
    def longest(self) -> int | None:
        """Most tokens of prompt and output together; None where that takes a tokenizer."""
        if self.entries:
            return None
        prompt = self.prefix_len + self.suffix_len if self.kind == PREFIXES else self.input_len.high
        return prompt + self.output_len.high

    def facts(self) -> dict[str, object]:
        """As the report shows it."""
        found: dict[str, object] = {"dataset": self.kind, "output_len": str(self.output_len), "ignore_eos": self.exact}
        if self.kind == PREFIXES:
            return found | {"prefix_len": self.prefix_len, "suffix_len": self.suffix_len, "prefixes": self.prefixes}
        if self.entries:
            return found | {"entries": len(self.entries), "entries_skipped": self.skipped}
        return found | {"input_len": str(self.input_len)}


def open_dataset(name: str, exact: bool | None, say: Say = lambda line: None, **sizes: Any) -> Dataset:
    """A dataset by --dataset. `exact` None: as fits it: a file's texts end where the model ends them. `say` is told of
    what takes time. UsageError, or LlmxError where the hub does not give a file."""
    if name in (RANDOM, PREFIXES):
        return Dataset(name, exact=exact is not False, **sizes)
    path = locate_data(name, say)
    if not path.is_file():
        raise UsageError(
            f"--dataset {name} can't be read: there is no such file.",
            f"There are {RANDOM}, {PREFIXES}, files of JSON lines, of a JSON list, or Parquet, and hf:ORG/NAME/FILE.",
        )
    found = [entry(row) for row in read_rows(path, f"--dataset {name}", COLUMNS)]
    entries = tuple(one for one in found if one is not None)
    if not entries:
        raise UsageError(f"--dataset {name} holds no prompts.")
    return Dataset(name, exact=exact is True, entries=entries, skipped=len(found) - len(entries), **sizes)


def sized(dataset: Dataset, count: Callable[[str], int]) -> Dataset:
    """With outputs as long as the answers that the file tells. `count`: tokens of a text."""
    entries = tuple(
        one if one.output_len is not None or one.answer is None else replace(one, output_len=max(1, count(one.answer)))
        for one in dataset.entries
    )
    return replace(dataset, entries=entries)


def make_jobs(dataset: Dataset, ids: Sequence[int], count: int, seed: int, nonce: str) -> list[Job]:
    """`count` requests. Lengths and their order follow from `seed`; with another `nonce` no prompt begins as before.

    `ids`: what random prompts are drawn from. A salt of its own for each request keeps the prefix cache cold also
    where a file's prompts begin alike; prompts that are to share a beginning share the salt.
    """
    content = f"{seed}/{nonce}" if nonce else str(seed)
    if dataset.kind == PREFIXES:
        return _sharing(dataset, ids, count, seed, content, nonce)
    if dataset.entries:
        order = random.Random(f"order/{seed}")
        turns = -(-count // len(dataset.entries))
        chosen = [entry for _ in range(turns) for entry in order.sample(dataset.entries, len(dataset.entries))][:count]
        jobs = [Job(entry.prompt, entry.output_len or dataset.output_len.high) for entry in chosen]
    else:
        lengths = mixed_lengths(count, dataset.input_len, dataset.output_len, seed)
        jobs = [Job(random_prompt(ids, n_in, f"{content}/{i}"), n_out) for i, (n_in, n_out) in enumerate(lengths)]
    return [replace(job, exact=dataset.exact, salt=f"{nonce}/{i}" if nonce else "") for i, job in enumerate(jobs)]


def _sharing(dataset: Dataset, ids: Sequence[int], count: int, seed: int, content: str, nonce: str) -> list[Job]:
    """Each prefix equally often, in random order, each time with a new rest."""
    beginnings = [
        random_prompt(ids, dataset.prefix_len, f"prefix/{content}/{i}") for i in range(dataset.prefixes)
    ]  # fmt: skip
    outputs = mixed_lengths(count, dataset.input_len, dataset.output_len, seed)
    which = [i % dataset.prefixes for i in range(count)]
    random.Random(f"order/{seed}").shuffle(which)
    return [
        Job(
            beginnings[prefix] + random_prompt(ids, dataset.suffix_len, f"suffix/{content}/{i}"),
            outputs[i][1],
            dataset.exact,
            nonce,
        )
        for i, prefix in enumerate(which)
    ]


def warm_up_jobs(jobs: Sequence[Job], ids: Sequence[int], count: int, nonce: str) -> list[Job]:
    """`count` requests as long as the first of `jobs`, of short outputs, whose prompts begin as none of theirs."""
    made = []
    for i in range(count):
        like = jobs[i % len(jobs)]
        seed = f"warm-up/{nonce}/{i}"
        prompt: tuple[int, ...] | str | Messages
        if like.input_len and ids:
            prompt = random_prompt(ids, like.input_len, seed)
        else:
            size = sum(len(text.split()) for text in _texts(like.prompt))
            words = " ".join(random.Random(seed).choices(WORDS, k=max(1, size)))
            prompt = words if isinstance(like.prompt, str) else ({"role": "user", "content": words},)
        made.append(Job(prompt, min(like.output_len, 16), like.exact, seed))
    return made


def _texts(prompt: object) -> Iterable[str]:
    if isinstance(prompt, str):
        return [prompt]
    assert isinstance(prompt, tuple), "a chat"
    return [message["content"] for message in prompt if isinstance(message, Mapping)]
