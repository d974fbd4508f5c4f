"""What GGUF's block types share: each run of 32 (or 256) inputs of an output is a few bytes with a scale of their own.

What the types mean: ggml's ggml-common.h (blocks) and ggml-quants.c (dequantize_row_*).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmx.errors import UsageError
from llmx.schemes.base import CHUNK, Axis, Case, KernelTable, Kind, Layout, Scheme, Tensors

if TYPE_CHECKING:
    from llmx.formats.checkpoint import Stored

LANES = 16  # outputs that a kernel keeps together


@dataclass(frozen=True)
class Parts:
    """Blocks taken apart, rows of n. A weight is (d * scale) * code - e * minimum; without scales d * code + e.

    codes (n, size), int8 or uint8; d, e (n, 1) float16; scales, minima (n, groups), small whole numbers.
    """

    codes: Tensor
    d: Tensor
    e: Tensor | None = None
    scales: Tensor | None = None
    minima: Tensor | None = None


class BlockScheme(Scheme):
    """`weight` (n_out, bytes) or (experts, n_out, bytes), uint8: rows of blocks, each `size` weights in `block_bytes`.

    `kind`: GGUF's name of the type. `error`: see Case; None for types without `pack_blocks`.
    """

    kind: str
    size = 32
    block_bytes: int
    error: float | None = None

    def __init__(self) -> None:
        self.name = self.kind
        self.cases = (Case(self.kind, self.error, hidden=max(self.size, 192), head_dim=self.size, inner=6 * self.size),)

    @abstractmethod
    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        """Blocks (n, block_bytes), uint8 -> their weights (n, size), float32, as ggml computes them."""

    def pack_blocks(self, weights: Tensor) -> Tensor:
        """Weights (n, size), float32 -> blocks (n, block_bytes), uint8, as ggml rounds them."""
        return super().pack(weights, self.kind)["weight"]  # refuses

    def matches(self, stored: Mapping[str, Stored]) -> bool:
        weight = stored.get("weight")
        return len(stored) == 1 and weight is not None and weight.kind == self.kind and len(weight.shape) in (2, 3)

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, ...]:
        return stored["weight"].shape

    def axes(self, stored: Mapping[str, Stored]) -> Layout:
        row = Axis(Kind.IN, self.block_bytes, self.size)
        return {"weight": (Axis(Kind.EXPERT), Axis(Kind.OUT), row)[-len(stored["weight"].shape) :]}

    def row_kind(self, tensors: Tensors) -> str | None:
        return self.kind

    def unpack(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        weight = tensors["weight"]
        values = self.unpack_blocks(weight.reshape(-1, self.block_bytes))
        return values.reshape(*weight.shape[:-1], weight.shape[-1] // self.block_bytes * self.size).to(dtype)

    def pack(self, weight: Tensor, kind: str) -> dict[str, Tensor]:
        if weight.shape[-1] % self.size:
            raise UsageError(f"{self.kind} stores {self.size} inputs together, so {weight.shape[-1]} do not fit.")
        blocks = self.pack_blocks(weight.float().reshape(-1, self.size))
        return {"weight": blocks.reshape(*weight.shape[:-1], weight.shape[-1] // self.size * self.block_bytes)}


class PartedScheme(BlockScheme):
    """Blocks of whole numbers and their scales: what a kernel can multiply from as they are.

    `kernel_layout`: of kernels/cpu/linear.py, which holds them without loss.
    """

    kernel_layout: str
    whole_numbers = True

    @abstractmethod
    def parts(self, blocks: Tensor) -> Parts:
        """Blocks (n, block_bytes), uint8, taken apart."""

    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        parts = self.parts(blocks)
        d, e = parts.d.float(), None if parts.e is None else parts.e.float()
        if parts.scales is None:
            values = parts.codes.float().mul_(d)
            return values if e is None else values.add_(e)
        minima = None if e is None or parts.minima is None else parts.minima.float() * e
        return scaled(parts.codes.float(), parts.scales.float() * d, minima)

    def pack_for_kernel(self, tensors: Tensors, layout: Layout, kernels: KernelTable) -> dict[str, Tensor]:
        weight = tensors["weight"]
        n_out, each = weight.shape[0], weight.shape[1] // self.block_bytes
        packed: Tensor = kernels.get("new_packed")(self.kernel_layout, n_out, each * self.size)
        if kernels.has("pack_blocks") and kernels.get("pack_blocks")(packed, self.kernel_layout, self.kind, weight):
            return {self.kernel_layout: packed}
        step = max(LANES, CHUNK // max(1, each * self.size) // LANES * LANES)
        for low in range(0, n_out, step):
            rows = weight[low : low + step]
            parts = self.parts(rows.reshape(-1, self.block_bytes))
            of_rows = [None if part is None else part.reshape(len(rows), -1) for part in vars(parts).values()]
            at = packed[low // LANES : -(-(low + len(rows)) // LANES)]
            kernels.get("pack_codes")(at, self.kernel_layout, *of_rows)
        return {self.kernel_layout: packed}


def stored_halves(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at byte `offset` of each block, (n, 1)."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16)


def halves(blocks: Tensor, offset: int) -> Tensor:
    """The same as float32."""
    return stored_halves(blocks, offset).float()


def half_bytes(values: Tensor) -> Tensor:
    """float32 (n, 1) -> its float16 as bytes (n, 2)."""
    return values.half().view(torch.uint8)


def numbers(packed: Tensor, width: int, run: int = 1) -> Tensor:
    """Bytes (n, m) -> the numbers of `width` bits in them, uint8 (n, m * 8 / width).

    Each `run` bytes hold one number after the other in their lowest bits, then as many in the next higher ones.
    """
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device).reshape(-1, 1)
    n, m = packed.shape
    parts = packed.reshape(n, m // run, 1, run) >> shifts
    return parts.bitwise_and_((1 << width) - 1).flatten(1)


def pack_numbers(values: Tensor, width: int, run: int = 1) -> Tensor:
    """The inverse of `numbers`: uint8 (n, m * 8 / width), each below 2^width -> bytes (n, m)."""
    each = 8 // width
    parts = values.reshape(values.shape[0], values.shape[1] // (each * run), each, run)
    packed = parts[:, :, 0].clone()
    for index in range(1, each):
        packed |= parts[:, :, index] << index * width
    return packed.flatten(1)


def words(packed: Tensor, size: int) -> Tensor:
    """Bytes (n, m) -> the little-endian numbers of `size` bytes in them, int32 (n, m / size); they wrap at 2^31."""
    parts = packed.reshape(packed.shape[0], packed.shape[1] // size, size).int()
    result = parts[..., 0].clone()
    for index in range(1, size):
        result |= parts[..., index] << 8 * index
    return result


def scaled(values: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
    """values (n, size) * scales (n, groups) - minima (n, groups), equal runs; float32 `values` are overwritten."""
    n, size = values.shape
    groups = values.float().reshape(n, scales.shape[1], size // scales.shape[1]).mul_(scales[..., None])
    if minima is not None:
        groups.sub_(minima[..., None])
    return groups.flatten(1)


def six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes a block -> 8 scales and 8 minima of 6 bits, uint8: Q4_K and Q5_K have them alike.

    The first 4 bytes hold a scale and, in their high two bits, those of scale 4 bytes on; the next 4 minima so; the
    last the low four bits of both.
    """
    scales, minima, low = packed.split(4, 1)
    scales = torch.cat([scales & 63, low & 15 | scales >> 2 & 48], 1)
    minima = torch.cat([minima & 63, low >> 4 | minima >> 2 & 48], 1)
    return scales, minima


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, correctly rounded; 0 where scale is 0. (`1 / tensor` may round differently: it multiplies.)"""
    return torch.where(scale == 0, 0.0, torch.div(torch.ones_like(scale), scale))
