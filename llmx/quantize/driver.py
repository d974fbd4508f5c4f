"""Streams a model's blocks through a quantizer: one block's weights in memory, each finished block in its own shard.

A block sees what the quantized blocks before it make of the calibration texts. What comes next is computed from the
shard as it lies on the disk, so a run that was cut off goes on with the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmx import __version__
from llmx.convert.folder import short_name
from llmx.convert.hf import as_hf
from llmx.convert.plain import Plain, bytes_of, dense_dtype, packing
from llmx.errors import LlmxError, UsageError
from llmx.formats import quantization
from llmx.formats.checkpoint import PLAIN, MappedCheckpoint
from llmx.formats.fields import Fields
from llmx.formats.gguf import open_gguf
from llmx.formats.hub import Located
from llmx.models import Opened, open_model
from llmx.quantize import forms
from llmx.quantize import head as heads
from llmx.quantize.block import Done, Quantizer, Result, Seen
from llmx.quantize.memory import give_back
from llmx.quantize.options import HEAD, Options
from llmx.quantize.output import Output
from llmx.quantize.source import Lazy, SourceWeights, Unit, build, linears
from llmx.quantize.states import SAMPLE, States, Stats

SOME = 2**20  # numbers that are looked at at a time
PROBE_PASSES = 1  # passes of calibration states that the final check runs through source and result
MOST_OFF = 0.7  # of what a block adds to its input, the largest relative error that passes the check

Say = Callable[[str], None]
Texts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Source:
    """A model's checked files, and its blocks' linears.

    opened: tensors by transformers' names, all plain numbers. units: by block. packed: how the files have what is
    unpacked here, if they do. bytes: of the tensors as the files have them. texts: what stands beside the weights of a
    model that is no folder, by name. head: None where it is tied to the embedding.
    """

    located: Located
    opened: Opened
    units: tuple[tuple[Unit, ...], ...]
    dtype: torch.dtype
    packed: str | None
    bytes: int
    texts: Mapping[str, str] | None = None
    head: Unit | None = None

    @property
    def every(self) -> list[Unit]:
        return [unit for block in self.units for unit in block]

    def mine(self, options: Options) -> list[Unit]:
        """The linears to be quantized. UsageError for a head that can't be."""
        chosen = [unit for unit in self.every if not options.ignores(unit.name)]
        if not options.head:
            return chosen
        if self.head is None:
            raise UsageError(
                f"The head of {self.located.name} is tied to its embedding, so it can't be quantized by itself.",
                hint="leave --quantize-lm-head out",
            )
        return [*chosen, self.head]


def open_source(located: Located) -> Source:
    """Any model that llmx reads. UsageError for a GGUF file that has something which transformers' model hasn't."""
    stored = opened = open_model(located)
    texts, packed = None, packing(stored)
    if located.kind == "gguf":
        files = as_hf(located, None)
        opened, texts = files.opened, files.texts
    elif packed is not None:
        opened = replace(stored, checkpoint=Plain(stored, dense_dtype(stored)))
    model, weights = build(opened, 1)
    units = tuple(tuple(unit for lazy in linears(block) for unit in lazy.units) for block in model.layers)
    dtype = getattr(torch, PLAIN[weights.kind_of(units[0][0])][1])
    (head,) = model.output.units
    own = None if opened.config.tied or weights.is_tied(head) else head
    return Source(located, opened, units, dtype, packed, bytes_of(stored), texts, own)


def quantization_config(source: Source, options: Options) -> dict[str, Any]:
    ignored = [unit.name for unit in source.every if options.ignores(unit.name)]
    return forms.config(options, ignored, __version__)


def prefix_of(index: int) -> str:
    return f"model.layers.{index}."


class Run:
    """One run: `quantize` makes all blocks, `finish` the rest, the check and the renaming.

    on_disk: the texts' hidden states lie in a file of the output's folder.
    """

    def __init__(
        self, source: Source, options: Options, texts: Texts, output: Output, say: Say, *, on_disk: bool = False
    ) -> None:
        self.source, self.options, self.output, self._say = source, options, output, say
        self._quantizer = Quantizer(options, source.opened.config, source.opened.family.SMOOTH, source.dtype)
        self._texts = [list(text) for text in texts]
        self._on_disk = on_disk
        self._length = max(map(len, self._texts), default=1)
        self._widest = max(unit.n_out for unit in source.every)
        self.resumed = 0
        self.notes: list[dict[str, Any]] = []

    @torch.inference_mode()
    def quantize(self) -> None:
        model, weights = build(self.source.opened, self._length)
        states = self._states(model) if self.options.calibrates else None
        for index in range(len(model.layers)):
            began = time.monotonic()
            done_before = self.output.is_done(index)
            if not done_before:
                self._make(model, weights, states, index)
            note = self.output.note(index)
            self.resumed += done_before
            self.notes.append(note)
            if states is not None and (index + 1 < len(model.layers) or self._wants_head):
                self._advance(states, index)
            for lazy in linears(model.layers[index]):
                lazy.drop()
            give_back()
            how = "already done" if done_before else _summary(note)
            self._say(f"block {index + 1} of {len(model.layers)}: {how}, {time.monotonic() - began:.1f} s")
        if not self.output.is_done(self.output.blocks):
            self._make_rest(model, weights, states)
        self.notes.append(self.output.note(self.output.blocks))
        if self.options.head:
            self._say(f"head: {_summary(self.notes[-1])}")

    def _states(self, model: Any) -> States:
        return States(model, self._texts, self._widest, self.output.scratch if self._on_disk else None)

    @property
    def _wants_head(self) -> bool:
        return self.options.head and not self.output.is_done(self.output.blocks)

    def _make_rest(self, model: Any, weights: SourceWeights, states: States | None) -> None:
        """What is in no block; the head, if it is to be quantized."""
        checkpoint = self.source.opened.checkpoint
        inside = tuple(prefix_of(index) for index in range(self.output.blocks))
        rest = {n: checkpoint.read(n) for n in checkpoint.names() if not n.startswith(inside)}
        if _is_copy(rest, self.source.opened.config.tied):
            del rest[f"{HEAD}.weight"]
        layers = []
        if self.options.head:
            unit = self.source.head
            assert unit is not None, "`mine` has refused it"
            stats = Stats(unit.n_in, hessian=False)
            if states is not None:
                stats = states.watch_norm(model, hessian=self.options.grids)
            quantizer = Quantizer(self.options, self.source.opened.config, heads.SMOOTH, self.source.dtype)
            made = heads.make(
                quantizer, unit, lambda low, high: weights.rows(unit, low, high), stats, self._raw(heads.NORM)
            )
            self._check_results([made.result])
            del rest[f"{HEAD}.weight"]
            rest |= self._finite(unit.name, made.tensors)
            if made.norm is not None:
                rest[f"{heads.NORM}.weight"] = made.norm
            layers.append(_facts(made.result))
        self.output.write(self.output.blocks, rest, {"layers": layers})

    def _make(self, model: Any, weights: SourceWeights, states: States | None, index: int) -> None:
        vectors = {name: self._raw(name) for name in weights.vectors if name.startswith(prefix_of(index))}
        done = self._quantizer(self._seen(model, weights, states, index, vectors))
        if self._quantizer.folds and any(result.worse for result in done.results):
            del done  # a norm's rounding may cost more than its scales gain
            done = self._quantizer(self._seen(model, weights, states, index, vectors), fold=False)
        self._check_results(done.results)
        tensors = self._tensors(done, vectors, index)
        self.output.write(index, tensors, {"layers": [_facts(result) for result in done.results]})

    def _seen(
        self, model: Any, weights: SourceWeights, states: States | None, index: int, vectors: Mapping[str, Tensor]
    ) -> Seen:
        """A block's weights, and what its linears see."""
        lazies = linears(model.layers[index])
        for lazy in lazies:
            lazy.load(weights.read)
        if states is None:
            stats = [Stats(lazy.n_in, hessian=False) for lazy in lazies]
        else:
            stats = states.watch(model, index, lazies, hessian=self.options.grids)
        give_back()
        return Seen(lazies, stats, vectors)

    def _check_results(self, results: Sequence[Result]) -> None:
        for result in results:
            if result.fell_back:
                what = f"{result.unit.name} could not be solved and is rounded to nearest"
                if self.options.strict:
                    raise LlmxError(f"{what}; --strict makes that an error.")
                self._say(f"warning: {what}")
            if result.worse:
                self._say(f"warning: {result.unit.name} is worse than round-to-nearest")

    def _tensors(self, done: Done, vectors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
        """All that the block's shard holds, by its stored name."""
        checkpoint = self.source.opened.checkpoint
        tensors = dict[str, Tensor]()
        for result in done.results:
            tensors |= self._finite(result.unit.name, result.made)
        packed = {result.unit.name for result in done.results}
        for name in checkpoint.names():
            owner = name.rpartition(".")[0]
            if not name.startswith(prefix_of(index)) or (owner in packed and not name.endswith(".bias")):
                continue
            tensor = done.vectors.get(owner, vectors.get(owner, checkpoint.read(name)))
            if name.endswith(".bias") and owner in done.rows:
                tensor = (tensor.float() / done.rows[owner]).to(tensor.dtype)
            tensors[name] = tensor
        return tensors

    def _finite(self, module: str, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A linear's tensors by their stored names. LlmxError where the format's dtypes can't hold them."""
        for suffix, tensor in made.items():
            if not _is_finite(tensor):
                raise LlmxError(
                    f"{module}.{suffix} has numbers too large for {tensor.dtype}.",
                    hint="a wider dtype or another --format may hold them",
                )
        return {f"{module}.{suffix}": tensor for suffix, tensor in made.items()}

    def _raw(self, name: str) -> Tensor:
        return self.source.opened.checkpoint.read(f"{name}.weight")

    def _advance(self, states: States, index: int) -> None:
        model, lazies = self._finished(index)
        states.run(model, index, keep=True)
        for lazy in lazies:
            lazy.drop()

    def _shard(self, index: int) -> MappedCheckpoint:
        """A shard as readers of the whole folder see it, with what its config says."""
        shard = self.output.open(index)
        known = quantization.read(Fields(quantization_config(self.source, self.options), "config.json"))
        return MappedCheckpoint(shard.kind, {name: shard.region(name) for name in shard.names()}, known)

    def _finished(self, index: int) -> tuple[Any, list[Lazy]]:
        """The model with block `index` as its shard has it, loaded."""
        shard = self._shard(index)
        vectors = {
            name.removesuffix(".weight"): shard.read(name).float()
            for name in shard.names()
            if len(shard.stored(name).shape) == 1 and name.endswith(".weight")
        }
        model, _ = build(self.source.opened, self._length, vectors)
        stored = SourceWeights(replace(self.source.opened, checkpoint=shard))
        lazies = linears(model.layers[index])
        for lazy in lazies:
            lazy.load(stored.read)
        return model, lazies

    @torch.inference_mode()
    def finish(self) -> dict[str, Any]:
        """Config and tokenizer files, the check. Returns what the report says of the files."""
        config = quantization_config(self.source, self.options)
        with self.output.writing():
            total = self.output.write_index()
            self.output.write_config(self.source.texts or self.source.located.path, config)
        checked, head = self._check()
        self.output.finish()
        return {"bytes": total, "source_bytes": self.source.bytes, "block_errors": checked, "head_error": head}

    def _check(self) -> tuple[list[float], float | None]:
        """Reopen all shards: shapes, dtypes, finiteness; each block's outputs against the source's, from its inputs.

        Returns the blocks' relative errors, and the head's. What it finds wrong is our own fault or the disk's:
        LlmxError.
        """
        self._say("checking what was written")
        texts = self._texts or [[0] * 32]
        model, weights = build(self.source.opened, self._length if self._texts else 32)
        states = States(model, texts[:4], self._widest)
        errors = []
        for index in range(len(model.layers)):
            shard = self.output.open(index)
            _check_finite(shard)
            before = states.hidden[0]
            for lazy in linears(model.layers[index]):
                lazy.load(weights.read)
            theirs = states.run(model, index, keep=False, limit=PROBE_PASSES)[0]
            for lazy in linears(model.layers[index]):
                lazy.drop()
            made, lazies = self._finished(index)
            ours = states.run(made, index, keep=False, limit=PROBE_PASSES)[0]
            error = float((ours - theirs).norm() / (theirs - before).norm().clamp(min=1e-30))
            self._check_error(error, f"block {index}", "what it adds to its input")
            errors.append(error)
            states.hidden[0] = theirs
            for lazy in lazies:
                lazy.drop()
            give_back()
        rest = self._shard(self.output.blocks)
        _check_finite(rest)
        head = self._check_head(rest, model, weights, states.hidden[0][:SAMPLE]) if self.options.head else None
        return errors, head

    def _check_head(self, rest: MappedCheckpoint, model: Any, weights: SourceWeights, x: Tensor) -> float:
        """The head's logits against the source's, each behind its own norm, from the same states (tokens, hidden)."""
        unit, opened = self.source.head, self.source.opened
        assert unit is not None
        made, _ = build(opened, self._length, {heads.NORM: rest.read(f"{heads.NORM}.weight").float()})
        ours = SourceWeights(replace(opened, checkpoint=rest))
        off = whole = 0.0
        for low in range(0, unit.n_out, heads.ROWS):
            high = min(low + heads.ROWS, unit.n_out)
            wanted = model.norm(x) @ weights.rows(unit, low, high).T
            off += float((made.norm(x) @ ours.rows(unit, low, high).T - wanted).square().sum())
            whole += float(wanted.square().sum())
        error = math.sqrt(off / max(whole, 1e-30))
        self._check_error(error, "the head", "its logits")
        return error

    def _check_error(self, error: float, what: str, of: str) -> None:
        if not error <= self._bound:
            raise LlmxError(
                f"The check failed: {what} differs from the source's by {error:.3f} of {of}; at most {self._bound} is "
                "expected. Nothing was renamed into place.",
                hint=f"what was written is in {self.output.folder}",
            )

    @property
    def _bound(self) -> float:
        return MOST_OFF if self.options.bits >= 4 else 1.5


def _is_finite(tensor: Tensor) -> bool:
    """Some of it at a time: an embedding may be larger than all else in memory."""
    if not tensor.is_floating_point():
        return True
    return all(bool(part.float().isfinite().all()) for part in tensor.flatten().split(SOME))


def _check_finite(shard: MappedCheckpoint) -> None:
    for name in shard.names():
        tensor = shard.read(name)
        if not _is_finite(tensor):
            raise LlmxError(f"The check found numbers that are not finite in {name}.")


def _is_copy(rest: Mapping[str, Tensor], tied: bool) -> bool:
    """Whether there is a head that only repeats a tied embedding."""
    head, embedding = rest.get(f"{HEAD}.weight"), rest.get("model.embed_tokens.weight")
    return tied and head is not None and embedding is not None and torch.equal(head, embedding)


def _facts(result: Result) -> dict[str, Any]:
    return {
        "name": result.unit.name, "shape": [result.unit.n_out, result.unit.n_in], "error": result.error,
        "nearest": result.nearest, "how": result.how, "fell_back": result.fell_back, "worse": result.worse,
    }  # fmt: skip


def _summary(note: Mapping[str, Any]) -> str:
    layers = note["layers"]
    known = [layer for layer in layers if layer["error"] is not None]
    if not known:
        return f"{len(layers)} linears"
    error, nearest = (sum(layer[key] for layer in known) / len(known) for key in ("error", "nearest"))
    more = "" if error == nearest else f" (round-to-nearest {nearest:.2e})"
    return f"mean relative error {error:.2e}{more}"


def fingerprint(source: Source, options: Options, texts: Texts, seed: int) -> dict[str, Any]:
    """All that the bytes of a run depend on."""
    import hashlib

    path = source.located.path
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else open_gguf(path).files()
    tokens = hashlib.sha256(repr([list(text) for text in texts]).encode()).hexdigest()
    return {
        "version": __version__, "options": asdict(options), "tokens": tokens, "seed": seed,
        "torch": torch.__version__, "threads": torch.get_num_threads(),
        "files": [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files],
    }  # fmt: skip


def default_path(located: Located, options: Options) -> Path:
    """`./NAME-awq-w4g128`"""
    return Path(f"{short_name(located)}-{options.label}")
