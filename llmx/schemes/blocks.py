"""What GGUF's block types share: each run of 32 inputs of an output is a few bytes, scale first."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmx.errors import UsageError
from llmx.schemes.base import Axis, Case, Kind, Layout, Scheme, Tensors

if TYPE_CHECKING:
    from llmx.formats.checkpoint import Stored

SIZE = 32  # weights in a block


class BlockScheme(Scheme):
    """`weight` (n_out, bytes) or (experts, n_out, bytes), uint8: rows of blocks of `block_bytes`."""

    kind: str  # GGUF's name of the type
    block_bytes: int
    cases: tuple[Case, ...]

    @abstractmethod
    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        """Blocks (n, block_bytes), uint8 -> their weights (n, 32), float32, as ggml computes them."""

    @abstractmethod
    def pack_blocks(self, weights: Tensor) -> Tensor:
        """Weights (n, 32), float32 -> blocks (n, block_bytes), uint8, as ggml rounds them."""

    def matches(self, stored: Mapping[str, Stored]) -> bool:
        weight = stored.get("weight")
        return len(stored) == 1 and weight is not None and weight.kind == self.kind and len(weight.shape) in (2, 3)

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, ...]:
        return stored["weight"].shape

    def axes(self, stored: Mapping[str, Stored]) -> Layout:
        row = Axis(Kind.IN, self.block_bytes, SIZE)
        return {"weight": (Axis(Kind.EXPERT), Axis(Kind.OUT), row)[-len(stored["weight"].shape) :]}

    def unpack(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        weight = tensors["weight"]
        values = self.unpack_blocks(weight.reshape(-1, self.block_bytes))
        return values.reshape(*weight.shape[:-1], weight.shape[-1] // self.block_bytes * SIZE).to(dtype)

    def pack(self, weight: Tensor, kind: str) -> dict[str, Tensor]:
        if weight.shape[-1] % SIZE:
            raise UsageError(f"{self.kind} stores {SIZE} inputs together, so {weight.shape[-1]} do not fit.")
        blocks = self.pack_blocks(weight.float().reshape(-1, SIZE))
        return {"weight": blocks.reshape(*weight.shape[:-1], weight.shape[-1] // SIZE * self.block_bytes)}


def halves(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at byte `offset` of each block, (n, 1), as float32."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).float()


def half_bytes(values: Tensor) -> Tensor:
    """float32 (n, 1) -> its float16 as bytes (n, 2)."""
    return values.half().view(torch.uint8)


def nibbles(packed: Tensor) -> Tensor:
    """16 bytes a block -> 32 numbers 0..15, float32: the low halves of all bytes, then the high ones."""
    values = torch.empty(packed.shape[0], SIZE, dtype=torch.float32, device=packed.device)
    values[:, : SIZE // 2] = packed & 15
    values[:, SIZE // 2 :] = packed >> 4
    return values


def pack_nibbles(values: Tensor) -> Tensor:
    """32 numbers 0..15 a block, uint8 -> 16 bytes."""
    return values[:, : SIZE // 2] | values[:, SIZE // 2 :] << 4


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, correctly rounded; 0 where scale is 0. (`1 / tensor` may round differently: it multiplies.)"""
    return torch.where(scale == 0, 0.0, torch.div(torch.ones_like(scale), scale))
