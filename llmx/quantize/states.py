"""The calibration texts' hidden states between two blocks, and what a block's linears see of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmx.batch import Batch, slots_of
from llmx.cache.pools import Cache, LayerSpec, new_pools, windows_of
from llmx.errors import UsageError
from llmx.quantize.gram import Gram
from llmx.quantize.source import CPU, Lazy, Watch

SIZE = 16  # tokens in a block of the scratch cache
AT_ONCE, FEWEST = 2048, 512  # tokens in a pass, unless one text is longer; of wide models fewer,
NUMBERS = 2**22  # so that what its widest linear makes is no more than this
SAMPLE = 512  # inputs that are kept as they are
PAGE = 4096  # bytes


class Stats:
    """What is known of a linear's inputs: hessian, the sum of x x^T, or else the first SAMPLE of them;
    mean |x| and max |x| (n_in,)."""

    def __init__(self, n_in: int, *, hessian: bool) -> None:
        self.hessian = Gram(n_in) if hessian else None
        self._total, self.most, self.count = torch.zeros(n_in), torch.zeros(n_in), 0
        self._samples: list[Tensor] = []

    def see(self, x: Tensor) -> None:
        """x: (tokens, n_in) f32"""
        if self.hessian is not None:
            self.hessian.add(x)
        elif self.count < SAMPLE:
            self._samples.append(x[: SAMPLE - self.count].clone())
        size = x.abs()
        self._total += size.sum(0)
        torch.maximum(self.most, size.amax(0), out=self.most)
        self.count += len(x)

    def drop(self) -> None:
        """Forget what takes memory."""
        self.hessian = None
        self._samples = []

    @property
    def mean(self) -> Tensor:
        return self._total / max(1, self.count)

    @property
    def sample(self) -> Tensor:
        return torch.cat(self._samples)


class States:
    """Texts as they stand before some block: f32, as many texts to a pass as make AT_ONCE tokens.

    widest: outputs of the model's widest linear. folder: where the states lie in a file; None: in memory.
    """

    def __init__(self, model: Any, texts: Sequence[Sequence[int]], widest: int = 1, folder: Path | None = None) -> None:
        self._specs: list[LayerSpec] = model.specs
        groups = len(windows_of(self._specs))
        self._batches = [batch_of(part, groups) for part in _parts(texts, max(FEWEST, min(AT_ONCE, NUMBERS // widest)))]
        blocks = 1 + max(sum(-(-n // SIZE) for n in batch.lengths) for batch in self._batches)
        self._cache = _scratch(self._specs, blocks)
        self._mapped = folder is not None
        self.hidden: list[Tensor] = []
        if folder is not None:
            width = model.embed(self._batches[0].tokens[:1]).shape[1]
            self.hidden = mapped(folder, [(len(batch.tokens), width) for batch in self._batches])
        for at, batch in enumerate(self._batches):
            self._keep(at, model.embed(batch.tokens))
        model.embedding.drop()
        self.tokens = sum(len(batch.tokens) for batch in self._batches)

    def run(self, model: Any, index: int, *, keep: bool, limit: int | None = None) -> list[Tensor]:
        """Through block `index`, the first `limit` passes of them; the outputs become the states if `keep`."""
        outputs = []
        for at, batch in enumerate(self._batches[:limit]):
            out = model.layers[index](self.hidden[at], model.step(batch, self._cache))
            if keep:
                self._keep(at, out)
            else:
                outputs.append(out)
        return outputs

    def _keep(self, at: int, states: Tensor) -> None:
        if self._mapped:
            self.hidden[at].copy_(states)
        elif at == len(self.hidden):
            self.hidden.append(states)
        else:
            self.hidden[at] = states

    def watch(self, model: Any, index: int, lazies: Sequence[Lazy], *, hessian: bool) -> list[Stats]:
        """One pass of all states through a block, whose outputs are dropped: what each linear saw."""
        found = [Stats(lazy.n_in, hessian=hessian) for lazy in lazies]
        last: Lazy | None = None

        def watcher(lazy: Lazy, stats: Stats) -> Watch:
            def see(x: Tensor) -> None:
                nonlocal last
                last = lazy
                stats.see(x)

            return see

        for lazy, stats in zip(lazies, found, strict=True):
            lazy.watch = watcher(lazy, stats)
        for at, batch in enumerate(self._batches):
            model.layers[index](self.hidden[at], model.step(batch, self._cache))
            if last is not None:  # what it makes, no linear of the block sees
                last.idle = True
        for lazy in lazies:
            lazy.watch, lazy.idle = None, False
        return found

    def watch_norm(self, model: Any, *, hessian: bool) -> Stats:
        """What the head would see of the states."""
        stats = Stats(self.hidden[0].shape[1], hessian=hessian)
        for hidden in self.hidden:
            stats.see(model.norm(hidden))
        return stats


def mapped(folder: Path, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """f32 tensors (rows, columns) in one file of `folder`, each on pages of its own. UsageError where there is no room.

    The file has no name any more when this returns: the system removes it with the process, however that ends.
    """
    path = folder / "states.f32"
    sizes = [-(-rows * columns * 4 // PAGE) * PAGE for rows, columns in shapes]
    try:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):  # a page that is not there when it is written would end the process
                os.posix_fallocate(file.fileno(), 0, sum(sizes))
            else:
                file.truncate(sum(sizes))
        whole = torch.from_file(str(path), shared=True, size=sum(sizes) // 4, dtype=torch.float32)
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it can't be mapped"
        raise UsageError(
            f"The hidden states can't be kept in {folder}, {sum(sizes) / 1e6:,.1f} MB: {why}.",
            hint="--states ram keeps them in memory",
        ) from error
    finally:
        path.unlink(missing_ok=True)
    parts = whole.split([size // 4 for size in sizes])
    return [part[: rows * columns].view(rows, columns) for part, (rows, columns) in zip(parts, shapes, strict=True)]


def batch_of(texts: Sequence[Sequence[int]], groups: int) -> Batch:
    """Texts side by side from their first token on, none padded, each with blocks of its own."""
    lengths = tuple(len(text) for text in texts)
    counts = [-(-n // SIZE) for n in lengths]
    table = torch.zeros(len(texts), max(counts), dtype=torch.long)
    first = 1
    for row, count in enumerate(counts):
        table[row, :count] = torch.arange(first, first + count)
        first += count
    tokens = torch.tensor([token for text in texts for token in text], dtype=torch.long)
    positions = torch.cat([torch.arange(n) for n in lengths])
    sequence = torch.repeat_interleave(torch.arange(len(texts)), torch.tensor(lengths))
    slots = slots_of(table, sequence, positions, SIZE)
    zeros = (0,) * len(texts)
    return Batch(
        tokens, positions, sequence, torch.full_like(tokens, -1), positions + 1, [slots] * groups, [table] * groups,
        torch.tensor(lengths), torch.zeros(len(texts), dtype=torch.long), tokens[:0], SIZE, lengths, lengths, zeros,
        lengths,
    )  # fmt: skip


def _parts(texts: Sequence[Sequence[int]], most: int) -> list[list[Sequence[int]]]:
    """Texts, those of like length together, up to `most` tokens or one text."""
    parts: list[list[Sequence[int]]] = [[]]
    for text in sorted(texts, key=len, reverse=True):
        if parts[-1] and sum(map(len, parts[-1])) + len(text) > most:
            parts.append([])
        parts[-1].append(text)
    return parts


def _scratch(specs: Sequence[LayerSpec], blocks: int) -> Cache:
    """A cache whose layers share their memory, for one block runs at a time."""
    small = [1] * len(windows_of(specs))
    cache = Cache(specs, len(specs), small, SIZE, tap_dim=0, dtype=torch.float32, device=CPU)
    pools: dict[tuple[int, int], Any] = {}
    for index, spec in enumerate(specs):
        shape = (spec.kv_heads, spec.head_dim)
        if shape not in pools:
            pools[shape] = new_pools(spec.kv_heads, blocks, SIZE, spec.head_dim, torch.float32, CPU)
        cache.keys[index], cache.values[index], cache.scales[index] = pools[shape]
    return cache
