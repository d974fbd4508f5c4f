"""What the model's own constructor asks a checkpoint for, without reading it: what is missing, misshapen or left over,
and for which numbers of tensor-parallel ranks every stored tensor can be cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from llmx.errors import UsageError
from llmx.formats.checkpoint import Stored, by
from llmx.inspect.contents import Contents
from llmx.inspect.findings import Finding
from llmx.kernels import Kernels
from llmx.layers.weights import Part
from llmx.loading import CheckpointWeights, Shard
from llmx.models import Opened, open_model
from llmx.parallel.group import Alone
from llmx.schemes import find
from llmx.schemes.base import Kind, Scheme, Span, as_vocabulary, ranges

CPU = torch.device("cpu")
SIZES = (1, 2, 4, 8)
# Tensors that no constructor asks for and that are no fault: buffers of old models, and what a config reader uses.
KNOWN = ("rotary_emb.inv_freq", "attn.bias", "masked_bias", "rope_freqs.weight", "rope_factors_long.weight",
         "rope_factors_short.weight")  # fmt: skip


@dataclass(frozen=True)
class Unit:
    """A linear that was asked for. cut: "column" by outputs, "row" by inputs, "head" by the vocabulary. heads: units of
    outputs that ranks take whole. fused: all that are computed together, by name."""

    name: str
    n_out: int
    n_in: int
    cut: str
    heads: int | None = None
    fused: tuple[str, ...] = ()


class Survey(CheckpointWeights):
    """One rank's weights, asked for and never read. units: by name. missing, misfits: stored names, and why.

    `known` keeps what is found out about a linear, for the next rank.
    """

    def __init__(self, opened: Opened, shard: Shard, broken: set[str], known: dict[str, Any]) -> None:
        super().__init__(opened.checkpoint, opened.names, shard, torch.float32, CPU, Kernels("cpu", "reference"))
        self.units: dict[str, Unit] = {}
        self.missing: list[str] = []
        self.misfits: dict[str, UsageError] = {}
        self._broken, self._known = broken, known

    def column(self, parts: Sequence[Part], n_in: int) -> Any:
        for part in parts:
            total = part.total or part.n_out
            self.units[part.name] = Unit(part.name, total, n_in, "column", part.heads, tuple(p.name for p in parts))
            try:
                share = self._share(part.name, part.n_out, part.heads, replicate=True)
            except UsageError as error:
                self.misfits[part.name] = error
                continue
            span = Span(part.first + share.low, part.first + share.high, total)
            self._look(part.name, {Kind.OUT: span, Kind.IN: Span(0, n_in, n_in)})

    def row(self, name: str, n_out: int, n_in: int, heads: int | None = None) -> Any:
        self.units[name] = Unit(name, n_out, n_in, "row", heads)
        try:
            span = self._share(name, n_in, heads, replicate=False)
        except UsageError as error:
            self.misfits[name] = error
            return
        self._look(name, {Kind.OUT: Span(0, n_out, n_out), Kind.IN: span})

    def embedding(self, name: str, vocab: int, hidden: int) -> Any:
        self._look(name, {Kind.VOCAB: self._vocabulary_span(vocab), Kind.IN: Span(0, hidden, hidden)})
        return torch.zeros(0)  # the model looks at its dtype

    def head(self, name: str, vocab: int, hidden: int, tied_to: str | None) -> Any:
        if tied_to is None or self._has(name):
            self.units[name] = Unit(name, vocab, hidden, "head")
            self._look(name, {Kind.VOCAB: self._vocabulary_span(vocab), Kind.IN: Span(0, hidden, hidden)})

    def vector(self, name: str, n: int) -> Tensor:
        stored_name = self._names.stored(name, "weight")
        if stored_name not in self._checkpoint:
            self.missing.append(stored_name)
            return torch.zeros(n)
        stored = self._checkpoint.stored(stored_name)
        self._asked_for(stored)
        if stored.shape != (n,):
            self.misfits[stored_name] = _misshapen(stored_name, stored.shape, (n,))
        return torch.zeros(n)

    def _look(self, name: str, spans: Mapping[Kind, Span]) -> None:
        """Whether linear `name` is there, in its shape, and can be cut to `spans`."""
        group = self._group(name)
        stored_name = self._names.stored(name, "weight")
        module = stored_name.rpartition(".")[0]
        if not set(group) - {"bias"}:
            self.missing.append(stored_name)
            return
        for stored in group.values():
            self._asked_for(stored)
        if module in self._broken:
            return
        out = Kind.VOCAB if Kind.VOCAB in spans else Kind.OUT
        try:
            scheme, tensors, shape = self._scheme(name, group)
            wanted = (spans[out].total, spans[Kind.IN].total)
            if shape != wanted:
                raise _misshapen(module, shape, wanted)
            if (bias := group.get("bias")) is not None and bias.shape != wanted[:1]:
                raise _misshapen(bias.name, bias.shape, wanted[:1])
            layout = scheme.axes(tensors)
            for dims in (layout if out is Kind.OUT else as_vocabulary(layout)).values():
                ranges(name, dims, spans, cover=True)
        except UsageError as error:
            self.misfits[module] = error

    def _scheme(self, name: str, group: Mapping[str, Stored]) -> tuple[Scheme, dict[str, Stored], tuple[int, ...]]:
        if name not in self._known:
            tensors = {part: stored for part, stored in group.items() if part != "bias"}
            scheme = find(name, tensors, self._checkpoint.quantization)
            tensors = {part: stored for part, stored in tensors.items() if part not in scheme.unread}
            self._known[name] = scheme, tensors, scheme.shape(tensors)
        found: tuple[Scheme, dict[str, Stored], tuple[int, ...]] = self._known[name]
        return found


def _misshapen(name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> UsageError:
    return UsageError(f"{name} is stored as {by(stored)}, but the config makes it {by(wanted)}.")


class _Rank(Alone):
    """One of several that are not there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@dataclass
class Asked:
    """opened: None where no family runs the architecture: then `why` says so. units: those of the whole model.
    ranks: of llmx: number of ranks -> why it can't be, None where it can."""

    opened: Opened | None
    units: Mapping[str, Unit]
    findings: list[Finding]
    ranks: dict[int, str | None]
    why: str = ""


def ask(contents: Contents) -> Asked:
    """Builds the model over a checkpoint once for each rank, reading no weights."""
    try:
        opened = open_model(contents.located, contents.checkpoint)
    except (UsageError, KeyError) as error:
        why = error.message if isinstance(error, UsageError) else f"{error} is missing"
        return Asked(None, {}, [], {}, why)
    known: dict[str, Any] = {}
    try:
        whole = _survey(opened, Shard(), contents.broken, known)
    except UsageError as error:
        finding = Finding("error", "tensors", "model", "config.json", error.message, error.hint or "")
        return Asked(opened, {}, [finding], {}, error.message)
    findings = list(_faults(contents, opened, whole))
    broken = contents.broken | set(whole.misfits)
    ranks = {size: _why_not(opened, size, broken, known) for size in SIZES}
    return Asked(opened, whole.units, findings, ranks)


def _survey(opened: Opened, shard: Shard, broken: set[str], known: dict[str, Any]) -> Survey:
    weights = Survey(opened, shard, broken, known)
    group = _Rank(shard.rank, shard.size)
    opened.family.Model(opened.config, weights, weights.kernels, length=2, device=CPU, group=group)
    return weights


def units_of(opened: Opened) -> Mapping[str, Unit]:
    """The linears that a model asks for, by name. UsageError where its sizes can't be."""
    return _survey(opened, Shard(), set(), {}).units


def _why_not(opened: Opened, size: int, broken: set[str], known: dict[str, Any]) -> str | None:
    """Why llmx can't run it on so many ranks; None if it can."""
    try:
        opened.config.check_ranks(size)
        for rank in range(size):
            survey = _survey(opened, Shard(rank, size), broken, known)
            for error in survey.misfits.values():
                return error.message
    except UsageError as error:
        return error.message
    return None


def _faults(contents: Contents, opened: Opened, found: Survey) -> Iterator[Finding]:
    for name in dict.fromkeys(found.missing):
        if name.startswith(("lm_head.", "output.")):
            yield Finding("error", "tied", "no head", name, f"{name} is missing, and the config does not say that the "
                          "head is tied to the embedding (tie_word_embeddings).",
                          "Set tie_word_embeddings to true, if the model was made so.")  # fmt: skip
            continue
        hint = "The file may be incomplete, or made for another model."
        if not contents.readable:
            hint = "It may be in a file that can't be read."
        yield Finding("error", "tensors", "missing", name, f"{name} is missing, which the model asks for.", hint)
    for name, error in found.misfits.items():
        yield Finding("error", "tensors", "misfit", name, error.message, error.hint or "")
    yield from _extra(opened, found.unused())
    yield from _tied(contents, opened)


def _extra(opened: Opened, unused: Sequence[str]) -> Iterator[Finding]:
    for name in unused:
        if not name.endswith(KNOWN):
            size = opened.checkpoint.stored(name)
            yield Finding("warning", "tensors", "extra", name, f"{name} ({size.kind} {by(size.shape)}, "
                          f"{size.nbytes / 1e6:,.1f} MB) is stored, and the model asks for no such tensor.",
                          "It costs memory in loaders that read all, and may be part of another model.")  # fmt: skip


def _tied(contents: Contents, opened: Opened) -> Iterator[Finding]:
    """A head beside the embedding that it is said to be tied to."""
    checkpoint = contents.checkpoint
    parts = [name for name in checkpoint.names() if name.startswith("lm_head.") and not name.endswith(".bias")]
    if contents.located.kind == "gguf" or not opened.config.tied or not parts:
        return
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    says = "the config says that the head is tied to the embedding (tie_word_embeddings)"
    if parts != [head]:
        yield Finding("error", "tied", "packed head", "lm_head", f"{parts[0]} is stored quantised, but {says}.",
                      "Set tie_word_embeddings to false, or leave the head out.")  # fmt: skip
    elif embedding in checkpoint and _equal(contents, head, embedding):
        size = checkpoint.stored(head)
        yield Finding("warning", "tied", "stored twice", head, f"{head} repeats {embedding}, to which the config ties "
                      f"it: {size.nbytes / 1e6:,.1f} MB more, which some loaders refuse.", "Leave it out.")  # fmt: skip
    else:
        yield Finding("error", "tied", "differs", head, f"{head} differs from {embedding}, but {says}: engines that "
                      "believe it compute something else than those that read the head.",
                      "Set tie_word_embeddings to false, if the head is right.")  # fmt: skip


def _equal(contents: Contents, a: str, b: str) -> bool:
    """Whether two stored tensors are the same, some rows at a time."""
    one, two = (contents.checkpoint.stored(name) for name in (a, b))
    if (one.kind, one.shape) != (two.kind, two.shape):
        return False
    step = max(1, (1 << 24) // max(1, prod(one.shape[1:])))
    for low in range(0, one.shape[0], step):
        part = {0: (low, min(low + step, one.shape[0]))}
        if not torch.equal(contents.checkpoint.read(a, part), contents.checkpoint.read(b, part)):
            return False
    return True
