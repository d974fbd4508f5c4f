"""Streams a model's blocks through a quantizer: one block's weights in memory, each finished block in its own shard.

A block sees what the quantized blocks before it make of the calibration texts. What comes next is computed from the
shard as it lies on the disk, so a run that was cut off goes on with the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmx import __version__
from llmx.errors import LlmxError, UsageError
from llmx.formats.checkpoint import PLAIN, MappedCheckpoint
from llmx.formats.hub import Located
from llmx.models import Opened, open_model
from llmx.quantize import forms
from llmx.quantize.block import Done, Quantizer, Result, Seen
from llmx.quantize.options import Options
from llmx.quantize.output import Output
from llmx.quantize.source import Lazy, SourceWeights, Unit, build, linears
from llmx.quantize.states import States, Stats

PROBE_PASSES = 1  # passes of calibration states that the final check runs through source and result
MOST_OFF = 0.7  # of what a block adds to its input, the largest relative error that passes the check

Say = Callable[[str], None]
Texts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Source:
    """A model's checked files, and its blocks' linears."""

    located: Located
    opened: Opened
    units: tuple[tuple[Unit, ...], ...]  # by block
    dtype: torch.dtype

    @property
    def every(self) -> list[Unit]:
        return [unit for block in self.units for unit in block]


def open_source(located: Located) -> Source:
    """UsageError for what can't be quantized yet."""
    if located.kind != "hf":
        raise UsageError(
            f"{located.name} is a GGUF file; this version quantizes Hugging Face folders only.",
            hint="quantize the model that the GGUF file was made from",
        )
    opened = open_model(located)
    model, _ = build(opened, 1)
    units = tuple(tuple(unit for lazy in linears(block) for unit in lazy.units) for block in model.layers)
    first = SourceWeights(opened)
    packed = [unit.name for block in units for unit in block if first.stored_as(unit) is None]
    if packed:
        raise UsageError(f"{located.name} is quantized already: {packed[0]} and {len(packed) - 1} more are packed.")
    kind = first.stored_as(units[0][0])
    assert kind is not None
    dtype = getattr(torch, PLAIN[kind][1])
    return Source(located, opened, units, dtype)


def prefix_of(index: int) -> str:
    return f"model.layers.{index}."


class Run:
    """One run: `quantize` makes all blocks, `finish` the rest, the check and the renaming."""

    def __init__(self, source: Source, options: Options, texts: Texts, output: Output, say: Say) -> None:
        self.source, self.options, self.output, self._say = source, options, output, say
        self._quantizer = Quantizer(options, source.opened.config, source.opened.family.SMOOTH, source.dtype)
        self._texts = [list(text) for text in texts]
        self._length = max(map(len, self._texts), default=1)
        self.resumed = 0
        self.notes: list[dict[str, Any]] = []

    @torch.inference_mode()
    def quantize(self) -> None:
        model, weights = build(self.source.opened, self._length)
        states = States(model, self._texts) if self.options.calibrates else None
        for index in range(len(model.layers)):
            began = time.monotonic()
            done_before = self.output.is_done(index)
            if not done_before:
                self._make(model, weights, states, index)
            note = self.output.note(index)
            self.resumed += done_before
            self.notes.append(note)
            if states is not None and index + 1 < len(model.layers):
                self._advance(states, index)
            for lazy in linears(model.layers[index]):
                lazy.drop()
            how = "already done" if done_before else _summary(note)
            self._say(f"block {index + 1} of {len(model.layers)}: {how}, {time.monotonic() - began:.1f} s")

    def _make(self, model: Any, weights: SourceWeights, states: States | None, index: int) -> None:
        lazies = linears(model.layers[index])
        for lazy in lazies:
            lazy.load(weights.read)
        if states is None:
            stats = [Stats(lazy.n_in, hessian=False) for lazy in lazies]
        else:
            stats = states.watch(model, index, lazies, hessian=self.options.grids)
        vectors = {name: self._raw(name) for name in weights.vectors if name.startswith(prefix_of(index))}
        done = self._quantizer(Seen(lazies, stats, vectors))
        self._check_results(done.results)
        tensors = self._tensors(done, vectors, index)
        self.output.write(index, tensors, {"layers": [_facts(result) for result in done.results]})

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
            made = forms.store(result.made, self.options, self.source.dtype)
            for suffix, tensor in made.items():
                if tensor.is_floating_point() and not tensor.float().isfinite().all():
                    raise LlmxError(
                        f"{result.unit.name}.{suffix} has numbers too large for {tensor.dtype}.",
                        hint="a wider dtype or another --format may hold them",
                    )
                tensors[f"{result.unit.name}.{suffix}"] = tensor
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

    def _raw(self, name: str) -> Tensor:
        return self.source.opened.checkpoint.read(f"{name}.weight")

    def _advance(self, states: States, index: int) -> None:
        model, lazies = self._finished(index)
        states.run(model, index, keep=True)
        for lazy in lazies:
            lazy.drop()

    def _finished(self, index: int) -> tuple[Any, list[Lazy]]:
        """The model with block `index` as its shard has it, loaded."""
        shard = self.output.open(index)
        vectors = {
            name.removesuffix(".weight"): shard.read(name).float()
            for name in shard.names()
            if len(shard.stored(name).shape) == 1 and name.endswith(".weight")
        }
        model, _ = build(self.source.opened, self._length, vectors)
        lazies = linears(model.layers[index])
        for lazy in lazies:
            lazy.load(lambda unit: self._read(shard, unit))
        return model, lazies

    def _read(self, shard: MappedCheckpoint, unit: Unit) -> tuple[Tensor, Tensor | None]:
        """A linear of a finished block."""
        bias = f"{unit.name}.bias"
        tensors = {
            name.rpartition(".")[2]: shard.read(name)
            for name in shard.names()
            if name.rpartition(".")[0] == unit.name and name != bias
        }
        plain = self.options.ignores(unit.name)
        weight = tensors["weight"].float() if plain else forms.unpack(tensors, self.options)
        if tuple(weight.shape) != (unit.n_out, unit.n_in):
            raise LlmxError(f"{unit.name} was written as {tuple(weight.shape)}, not {(unit.n_out, unit.n_in)}.")
        return weight, shard.read(bias).float() if bias in shard else None

    @torch.inference_mode()
    def finish(self) -> dict[str, Any]:
        """The other tensors, config and tokenizer files, the check. Returns what the report says of the files."""
        checkpoint, blocks = self.source.opened.checkpoint, self.output.blocks
        if not self.output.is_done(blocks):
            inside = tuple(prefix_of(index) for index in range(blocks))
            rest = {n: checkpoint.read(n) for n in checkpoint.names() if not n.startswith(inside)}
            if _is_copy(rest, self.source.opened.config.tied):
                del rest["lm_head.weight"]
            self.output.write(blocks, rest, {})
        total = self.output.write_index()
        ignored = [unit.name for unit in self.source.every if self.options.ignores(unit.name)]
        quantization = forms.config(self.options, [*ignored, "lm_head"], __version__)
        self.output.write_config(self.source.located.path, quantization)
        checked = self._check()
        self.output.finish()
        source = sum(checkpoint.stored(name).nbytes for name in checkpoint.names())
        return {"bytes": total, "source_bytes": source, "block_errors": checked}

    def _check(self) -> list[float]:
        """Reopen all shards: shapes, dtypes, finiteness; each block's outputs against the source's, from its inputs.

        Returns the blocks' relative errors. What it finds wrong is our own fault or the disk's: LlmxError.
        """
        self._say("checking what was written")
        texts = self._texts or [[0] * 32]
        model, weights = build(self.source.opened, self._length if self._texts else 32)
        states = States(model, texts[:4])
        errors = []
        for index in range(len(model.layers)):
            shard = self.output.open(index)
            for name in shard.names():
                tensor = shard.read(name)
                if tensor.is_floating_point() and not tensor.float().isfinite().all():
                    raise LlmxError(f"The check found numbers that are not finite in {name}.")
            made, lazies = self._finished(index)
            for lazy in linears(model.layers[index]):
                lazy.load(weights.read)
            before = states.hidden[0]
            theirs = states.run(model, index, keep=False, limit=PROBE_PASSES)[0]
            ours = states.run(made, index, keep=False, limit=PROBE_PASSES)[0]
            error = float((ours - theirs).norm() / (theirs - before).norm().clamp(min=1e-30))
            if not error <= self._bound:
                raise LlmxError(
                    f"The check failed: block {index} differs from the source's by {error:.3f} of what it adds to its "
                    f"input; at most {self._bound} is expected. Nothing was renamed into place.",
                    hint=f"what was written is in {self.output.folder}",
                )
            errors.append(error)
            states.hidden[0] = theirs
            for lazy in [*lazies, *linears(model.layers[index])]:
                lazy.drop()
        return errors

    @property
    def _bound(self) -> float:
        return MOST_OFF if self.options.bits >= 4 else 1.5


def _is_copy(rest: Mapping[str, Tensor], tied: bool) -> bool:
    """Whether there is a head that only repeats a tied embedding."""
    head, embedding = rest.get("lm_head.weight"), rest.get("model.embed_tokens.weight")
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

    files = sorted(p for p in source.located.path.iterdir() if p.is_file())
    tokens = hashlib.sha256(repr([list(text) for text in texts]).encode()).hexdigest()
    return {
        "version": __version__, "options": asdict(options), "tokens": tokens, "seed": seed,
        "torch": torch.__version__, "threads": torch.get_num_threads(),
        "files": [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files],
    }  # fmt: skip


def default_path(name: str, options: Options) -> Path:
    """`./NAME-awq-w4g128`"""
    return Path(f"{Path(name.rstrip('/')).resolve().name}-{options.label}")
