"""What Hugging Face's quantised linears share: whole numbers, scales of runs of inputs, words of 32 bits.

Activations are not rounded as "W8A8" and FP8 checkpoints ask for: weights are run as they are stored, nearer to the
model that was quantised, and `input_scale` is left unread. Rounding to 8 bits in runs of 32 inputs is the engine's
own choice (`EngineConfig.activations`), as for GGUF's types.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from llmx.errors import UsageError
from llmx.schemes.base import CHUNK, Axis, Dims, KernelTable, Kind, Layout, Scheme, Span, Tensors, in_steps, narrow
from llmx.schemes.grid import Grid, even

UNREAD = frozenset({"input_scale", "input_zero_point", "output_scale", "weight_shape"})
RUN = 32  # inputs that share a scale in a kernel's layouts
LAYOUTS = (("q4", 8), ("q5", 16), ("q8", 128))  # each holds numbers from -limit to limit - 1


@dataclass(frozen=True)
class Wholes:
    """A weight is number * scale.

    numbers: int16 or int8 (n_out, n_in). scales: floats (n_out, groups). index: the group of each input, int64 (n_in,);
    None: as many in each group, one after the other.
    """

    numbers: Tensor
    scales: Tensor
    index: Tensor | None


def less(codes: Tensor, zeros: Tensor, index: Tensor | None, bits: int) -> Tensor:
    """Codes (n_out, n_in) less the zeros (n_out, groups) of their groups, bytes -> int8, or int16 for 8 bits."""
    kind = torch.int16 if bits == 8 else torch.int8
    if index is not None:
        return codes.to(kind) - zeros.to(kind)[:, index]
    n_in, groups = codes.shape[1], zeros.shape[1]
    of_groups = codes.to(kind).reshape(len(codes), groups, n_in // groups)
    return (of_groups - zeros.to(kind)[..., None]).flatten(1)


def order(n_in: int, groups: int, size: int, stored: Tensor | None, device: torch.device) -> Tensor | None:
    """Wholes.index, from that which is `stored`, or from groups of `size`."""
    index = runs(n_in, groups, size, device) if stored is None else stored.long()
    even = n_in % groups == 0 and torch.equal(index, torch.arange(n_in, device=device) // (n_in // groups))
    return None if even else index


def runs(n_in: int, groups: int, size: int, device: torch.device) -> Tensor:
    """The group of each input, int64 (n_in,): `size` in each and fewer in the last, where that makes so many groups.

    Else as many in each: the loader has taken groups apart (`base.repeat`).
    """
    return torch.arange(n_in, device=device) // run_size(n_in, groups, size)


def run_size(n: int, groups: int, size: int) -> int:
    """Features of a group, see `runs`."""
    return size if size and groups == -(-n // size) else max(1, n // max(1, groups))


def word_axis(kind: Kind, bits: int, n: int, words: int) -> Axis:
    """Of `n` numbers in words: cut between words, but never where they lie otherwise than `grid.to_words` puts them."""
    count, each = even(bits)
    if words == dense_words(n, bits) and (count == 1 or n % each == 0):
        return Axis(kind, count, each, ceil=count == 1)
    return Axis(kind, words, n)


def dense_words(n: int, bits: int) -> int:
    """Words that `n` numbers fill."""
    return -(-n * bits // 32)


def apart_words(n: int, bits: int) -> int:
    """Words that they need if none may lie across two."""
    return -(-n // (32 // bits))


def scale_axes(shape: tuple[int, ...], n_out: int, n_in: int, block: tuple[int, int]) -> Dims:
    """Of scales for all, for each output, each run of inputs or each block (outputs, inputs)."""
    if len(shape) < 2:
        return (Axis(Kind.OUT) if shape == (n_out,) else 1,)[: len(shape)]
    kinds = zip((Kind.OUT, Kind.IN), (n_out, n_in), shape, block, strict=True)
    return tuple(
        Axis(kind, 1, run_size(n, count, size), ceil=size > 1, same=True) if count > 1 or size > 1 else 1
        for kind, n, count, size in kinds
    )


class WholeScheme(Scheme):
    """Weights in whole numbers."""

    whole_numbers = True

    @abstractmethod
    def wholes(self, tensors: Tensors) -> Wholes:
        """The numbers and scales in the stored tensors."""

    @abstractmethod
    def limits(self, tensors: Tensors) -> tuple[int, int]:
        """Bounds of the numbers, as the zero points allow them, without unpacking."""

    def unpack(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        found = self.wholes(tensors)
        numbers, scales = found.numbers.float(), found.scales.float()
        if found.index is not None:
            return numbers.mul_(scales[:, found.index]).to(dtype)
        n_out, groups = scales.shape
        runs_of = numbers.reshape(n_out, groups, numbers.shape[1] // groups)
        return runs_of.mul_(scales[..., None]).flatten(1).to(dtype)

    def pack_for_kernel(self, tensors: Tensors, layout: Layout, kernels: KernelTable) -> dict[str, Tensor]:
        """In the smallest layout that holds the numbers, if it loses nothing; else as plain float32."""
        steps = in_steps(layout, tensors)
        assert steps is not None, "stacked experts have no packed layout"
        kind, n_out, grain = steps
        low, high = self.limits(tensors)
        name = next((name for name, limit in LAYOUTS if -limit <= low and high < limit), None)
        few = self.wholes(narrow(tensors, layout, {kind: Span(0, min(grain, n_out), n_out)}))
        n_in = few.numbers.shape[1]
        index = _of_runs(few, n_in)
        if name is None or index is None:
            return super().pack_for_kernel(tensors, layout, kernels)
        packed: Tensor = kernels.get("new_packed")(name, n_out, n_in)
        grain = max(grain, -(-16 // grain) * grain)  # the kernel keeps 16 outputs together
        step = max(1, CHUNK // (n_in * grain)) * grain
        for start in range(0, n_out, step):
            stop = min(start + step, n_out)
            part = self.wholes(narrow(tensors, layout, {kind: Span(start, stop, n_out)}))
            d = part.scales.half()
            if not torch.equal(d.float(), part.scales.float()):
                return super().pack_for_kernel(tensors, layout, kernels)
            at = packed[start // 16 : -(-stop // 16)]
            kernels.get("pack_codes")(at, name, part.numbers.to(torch.int8), d[:, index])
        return {name: packed}


def _of_runs(found: Wholes, n_in: int) -> Tensor | None:
    """The group of each 32 inputs, int64 (n_in / 32,); None where such 32 are not of one group."""
    if n_in % RUN:
        return None
    groups, index = found.scales.shape[1], found.index
    if index is None:
        size = n_in // groups
        return torch.arange(n_in // RUN, device=found.scales.device) * RUN // size if size % RUN == 0 else None
    each = index.unflatten(0, (-1, RUN))
    return each[:, 0] if torch.equal(each, each[:, :1].expand_as(each)) else None


def spread(scales: Tensor, n: int, axis: int, size: int) -> Tensor:
    """Scales (rows, columns) with as many along `axis` as there are features, `n`; see `runs`. One stays one."""
    count = scales.shape[axis]
    return scales if count in (1, n) else scales.index_select(axis, runs(n, count, size, scales.device))


def symmetric(weight: Tensor, bits: int, group: int, scale_dtype: torch.dtype) -> Grid:
    """The nearest points of a grid around zero whose ends are a group's largest weight: float (n_out, n_in) -> Grid.

    Scales are rounded to `scale_dtype`. The points come out again as they were, if quantised once more.
    """
    n_in = weight.shape[1]
    group = group or n_in
    if n_in % group:
        raise UsageError(f"A scale stands for {group} inputs, so {n_in} do not fit.")
    middle = 1 << bits - 1
    runs_of = weight.float().unflatten(1, (-1, group))
    largest = runs_of.abs().amax(-1)
    scales = torch.div(largest, torch.full_like(largest, middle - 1)).to(scale_dtype).float()
    steps = torch.div(runs_of, torch.where(scales == 0, 1.0, scales)[..., None])
    codes = steps.round().clamp(1 - middle, middle - 1) + middle
    zeros = torch.full(scales.shape, middle, dtype=torch.uint8)
    return Grid(codes.to(torch.uint8).flatten(1), scales, zeros, bits, group)


def around_zero(weight: Tensor, bits: int, group: int, scale_dtype: torch.dtype) -> Grid:
    """As `symmetric`, with zero points: a group's smallest and largest weights are the ends of its grid."""
    n_in = weight.shape[1]
    if n_in % group:
        raise UsageError(f"A scale stands for {group} inputs, so {n_in} do not fit.")
    top = (1 << bits) - 1
    runs_of = weight.float().unflatten(1, (-1, group))
    low, high = runs_of.amin(-1).clamp(max=0), runs_of.amax(-1).clamp(min=0)
    exact = torch.div(high - low, torch.full_like(low, top))
    safe = torch.where(exact == 0, 1.0, exact)
    zeros = torch.div(-low, safe).round().clamp(0, top)
    codes = (torch.div(runs_of, safe[..., None]).round() + zeros[..., None]).clamp(0, top)
    scales = exact.to(scale_dtype).float()
    return Grid(codes.to(torch.uint8).flatten(1), scales, zeros.to(torch.uint8), bits, group)
