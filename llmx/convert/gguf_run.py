"""A whole `llmx convert-gguf`: what goes where, the numbers, the files, and what the report says."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmx.convert.arrays import Bytes, Numbers, rounded
from llmx.convert.gguf_check import holds_numbers, read_back
from llmx.convert.gguf_importance import about_importance, read_importance
from llmx.convert.gguf_source import GgufSource, Rows, source_of
from llmx.convert.gguf_types import MIXTURES, PLAIN, TOKENS, Asked, Choice, choose, in_order
from llmx.convert.threads import InOrder
from llmx.device import thread_count
from llmx.errors import LlmxError, UsageError
from llmx.formats.gguf_write import NUMBERS, QUANTIZATION_VERSION, UINT32, Entry, encode, part_paths, plan, write_parts
from llmx.formats.hub import Located
from llmx.kernels import Kernels

COPY = "copy"
Tell = Callable[[int, int], None]
Say = Callable[[str], None]

DEFINITIONS = {
    "bits_per_weight": "of all tensors, scales counted",
    "tensors.instead_of": "the type that a tensor's rows are no whole blocks of",
    "source_bytes": "of all tensors as they are stored now",
    "seconds": "from the first tensor read to the last renamed file",
}
NO_NUMBERS = "{} holds infinities or what is no number; such weights can't be converted."


@dataclass(frozen=True)
class Wanted:
    """most: bytes of tensors in a file. imatrix: a file of importance by the name of a tensor, or None.
    importance: that which was collected instead; collected: from what, as `about_importance` says it. threads: None
    for as many as `thread_count` finds."""

    asked: Asked
    out: Path
    most: int | None = None
    pretokenizer: str | None = None
    imatrix: Path | None = None
    importance: Mapping[str, Numbers] = field(default_factory=dict)
    collected: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None
    force: bool = False
    dry_run: bool = False


def convert(located: Located, wanted: Wanted, tell: Tell, say: Say) -> dict[str, Any]:
    """Writes the files, all or none, and returns the report's results. UsageError before anything is written."""
    source = source_of(located, wanted.pretokenizer)
    importance = wanted.importance
    if wanted.imatrix is not None:
        importance = read_importance(wanted.imatrix)
    entries, choices = _entries(source, wanted.asked)
    importance = _matched(importance, source, choices)
    pairs = dict(source.pairs)
    if wanted.asked.mixture != COPY:
        pairs["general.file_type"] = encode(MIXTURES[wanted.asked.mixture][1], UINT32)
        pairs["general.quantization_version"] = encode(QUANTIZATION_VERSION, UINT32)
    if importance:
        pairs |= _about_importance(wanted, len(importance))
    parts = plan(pairs, entries, wanted.most)
    paths = part_paths(wanted.out, len(parts))
    results = _results(source, entries, choices, paths, sum(part.nbytes for part in parts), len(importance))
    for note in source.notes:
        say(f"note: {note}")
    if wanted.dry_run:
        return results
    _check_free(paths, located, wanted.force)
    _load_torch(source, entries)
    began = time.monotonic()
    with InOrder(wanted.threads or thread_count()) as threads:
        tensors = _Tensors(source, importance, entries, threads, tell)
        write_parts(paths, parts, tensors.data, read_back)
    results["seconds"] = time.monotonic() - began
    return results


def _load_torch(source: GgufSource, entries: Sequence[Entry]) -> None:
    """Where something is unpacked, or rounded to halves: before the work, and not inside of it on one thread while the
    others wait."""
    changed = [(source.kinds[entry.name], entry.kind) for entry in entries if source.kinds[entry.name] != entry.kind]
    if any(old not in PLAIN or new in ("F16", "BF16") for old, new in changed):
        from llmx.schemes import schemes

        schemes()


def check(located: Located, wanted: Wanted) -> None:
    """UsageError for what `convert` would refuse, before importance is collected for it."""
    source = source_of(located, wanted.pretokenizer)
    entries, _ = _entries(source, wanted.asked)
    _check_free(part_paths(wanted.out, len(plan({}, entries, wanted.most))), located, wanted.force)


def _about_importance(wanted: Wanted, count: int) -> dict[str, bytes]:
    """As llama-quantize says it: where the importance came from, and of how many tensors it is."""
    key, path = "quantize.imatrix.", wanted.imatrix
    said = {f"{key}file": encode(path.name if path is not None else "collected")}
    known = about_importance(path) if path is not None else wanted.collected
    if "dataset" in known:
        said[f"{key}dataset"] = encode(known["dataset"])
    said[f"{key}entries_count"] = encode(count, UINT32)
    if "chunks_count" in known:
        said[f"{key}chunks_count"] = encode(known["chunks_count"], UINT32)
    return said


def _entries(source: GgufSource, asked: Asked) -> tuple[list[Entry], dict[str, Choice]]:
    names = sorted(source.shapes, key=in_order)
    if asked.mixture == COPY:
        names = list(source.stored_order) or names
        return [Entry(name, source.kinds[name], source.shapes[name]) for name in names], {}
    choices = choose(source.shapes, source.sizes, asked)
    kinds = {name: choices[name].kind if name in choices else source.kept(name) for name in names}
    return [Entry(name, kinds[name], source.shapes[name]) for name in names], choices


def _matched(
    importance: Mapping[str, Numbers], source: GgufSource, choices: Mapping[str, Choice]
) -> dict[str, Numbers]:
    """Name -> (matrices, n_in) for the tensors that are quantised by it. UsageError for one of another size."""
    found = {}
    for name, choice in choices.items():
        if name not in importance or choice.kind in PLAIN:
            continue
        shape = source.shapes[name]
        wanted = (prod(shape[:-2]), shape[-1])
        if importance[name].size != prod(wanted):
            if name in TOKENS:
                continue  # what comes in is a token there, not a row of numbers
            raise UsageError(
                f"The importance of {name} has {importance[name].size} numbers, its inputs are {prod(wanted)}.",
                hint="was it collected with another model?",
            )
        found[name] = importance[name].reshape(wanted).astype(np.float32, copy=False)
    if importance and not found and choices:
        raise UsageError("The importance matrix names none of this model's tensors.", hint="is it another model's?")
    return found


class _Tensors:
    """The bytes of each tensor, made shortly before they are written: some rows on each thread, in order. While the
    last rows of a tensor are made, the first of the next are begun: most tensors are few rows."""

    def __init__(
        self,
        source: GgufSource,
        importance: Mapping[str, Numbers],
        entries: Sequence[Entry],
        threads: InOrder,
        tell: Tell,
    ) -> None:
        self._source, self._importance, self._tell = source, importance, tell
        self._total, self._done = sum(entry.nbytes for entry in entries), 0
        self._quantize = Kernels("cpu").get("quantize_blocks")
        self._made = threads.map(chain.from_iterable(map(self._calls, entries)))

    def data(self, entry: Entry) -> Iterator[memoryview]:
        """Of the next one of the entries."""
        end = self._done + entry.nbytes
        while self._done < end:
            for part in next(self._made):
                yield part.reshape(-1).data
                self._done += part.nbytes
                self._tell(self._done, self._total)
        self._source.release(entry.name)

    def _calls(self, entry: Entry) -> Iterator[Callable[[], list[Bytes]]]:
        same = self._source.as_stored(entry.name, entry.kind)
        return self._makes(entry) if same is None else self._copies(entry, same)

    def _copies(self, entry: Entry, stored: Iterator[Bytes]) -> Iterator[Callable[[], list[Bytes]]]:
        for rows in stored:
            yield partial(self._copy, entry, rows)

    def _copy(self, entry: Entry, rows: Bytes) -> list[Bytes]:
        if not holds_numbers(entry.kind, rows):
            raise LlmxError(NO_NUMBERS.format(entry.name))
        return [rows]

    def _makes(self, entry: Entry) -> Iterator[Callable[[], list[Bytes]]]:
        row = 0
        for rows in self._source.numbers(entry.name):
            yield partial(self._make, entry, rows, row)
            row += rows.count

    def _make(self, entry: Entry, rows: Rows, first: int) -> list[Bytes]:
        """Rows from `first` on as they are stored."""
        numbers = rows.make()
        if not holds_numbers("F32", numbers.view(np.uint8)):
            raise LlmxError(NO_NUMBERS.format(entry.name))
        plain = entry.kind in PLAIN
        made = [rounded(numbers, entry.kind)] if plain else self._blocks(entry, numbers, first)
        if entry.kind != "BF16" and not all(holds_numbers(entry.kind, part) for part in made):
            of = "f16" if plain else f"{entry.kind.lower()}, whose scales are float16"
            raise LlmxError(f"{entry.name} has numbers too large for {of}.", hint="--type bf16 holds them")
        return made

    def _blocks(self, entry: Entry, rows: Numbers, first: int) -> list[Bytes]:
        """Each matrix of experts with its own importance."""
        importance = self._importance.get(entry.name)
        if importance is None:
            return [self._quantize(rows, entry.kind)]
        made, each, at = [], entry.shape[-2], 0
        while at < len(rows):
            matrix, inside = divmod(first + at, each)
            count = min(len(rows) - at, each - inside)
            made.append(self._quantize(rows[at : at + count], entry.kind, importance[matrix]))
            at += count
        return made


def _check_free(paths: list[Path], located: Located, force: bool) -> None:
    for path in paths:
        if path.exists() and not force:
            raise UsageError(
                f"{path} is there already.", hint="choose another name with -o, or replace it with --force"
            )
        if path.is_dir():
            raise UsageError(f"{path} is a folder.")
        if located.kind == "gguf" and path.exists() and path.samefile(located.path):
            raise UsageError(f"{path} is the file that is converted.", hint="choose another name with -o")
        if not path.parent.is_dir():
            raise UsageError(f"{path.parent} is no folder.", hint="make it first")


def _results(
    source: GgufSource,
    entries: list[Entry],
    choices: Mapping[str, Choice],
    paths: list[Path],
    nbytes: int,
    weighted: int,
) -> dict[str, Any]:
    tensors = [
        {
            "name": entry.name,
            "shape": list(entry.shape),
            "from": source.kinds[entry.name],
            "type": entry.kind,
            "instead_of": choices[entry.name].instead_of if entry.name in choices else None,
            "bytes": entry.nbytes,
        }
        for entry in entries
    ]
    again = [e.name for e in entries if source.kinds[e.name] not in PLAIN and source.kinds[e.name] != e.kind]
    if again and any(source.kinds[name] in NUMBERS for name in again):
        source.notes.append(f"{len(again)} tensors are quantised already, and are rounded once more.")
    weights, stored = sum(prod(entry.shape) for entry in entries), sum(entry.nbytes for entry in entries)
    return {
        "paths": [str(path) for path in paths],
        "architecture": source.sizes.architecture,
        "tokenizer_found_by": source.found_by,
        "types": dict(Counter(entry.kind for entry in entries)),
        "fallbacks": sum(choice.instead_of is not None for choice in choices.values()),
        "with_importance": weighted,
        "weights": weights,
        "bytes": nbytes,
        "source_bytes": source.nbytes,
        "bits_per_weight": 8 * stored / weights,
        "notes": list(source.notes),
        "tensors": tensors,
    }


def lines(results: Mapping[str, Any], every: bool) -> list[str]:
    """What a user reads; `every`: a line for each tensor."""
    said = []
    if every:
        for tensor in results["tensors"]:
            shape = "×".join(map(str, tensor["shape"]))
            instead = f" (rows are no whole blocks of {tensor['instead_of']})" if tensor["instead_of"] else ""
            said.append(f"{tensor['name']:40} {shape:>14} {tensor['from']:>6} -> {tensor['type']}{instead}")
    types = ", ".join(f"{count} {kind}" for kind, count in results["types"].items())
    said.append(f"{len(results['tensors'])} tensors: {types}")
    if results["fallbacks"]:
        said.append(f"{results['fallbacks']} have rows that are no whole blocks of the type they should have.")
    said.append(
        f"{results['bits_per_weight']:.2f} bits per weight, {results['bytes'] / 1e6:,.1f} MB "
        f"(source {results['source_bytes'] / 1e6:,.1f} MB)"
    )
    if found := results.get("eval"):
        said.append(
            f"perplexity {found['perplexity']['mean']:.2f} ({found['reference_perplexity']['mean']:.2f} before), "
            f"KL divergence {found['kld']['mean']:.4f}, same likeliest token {found['same_top']['share']:.1%}"
        )
    if seconds := results.get("seconds"):
        said.append(f"{seconds:.1f} s, {results['source_bytes'] / 1e6 / seconds:,.0f} MB/s of the source")
    return said
