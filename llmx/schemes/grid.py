"""Weights on a grid: whole numbers of a few bits, and a scale and a zero point for each run of inputs.

What AWQ, GPTQ and compressed-tensors store, each in words of its own making, and how numbers lie in 32-bit words.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

PACKED = 2**20  # numbers that are packed at a time


@dataclass(frozen=True)
class Grid:
    """A weight is (code - zero) * scale.

    codes: uint8 (n_out, n_in), 0 ... 2^bits - 1. scales: float32 (n_out, groups). zeros: uint8 (n_out, groups), in the
    range of the codes. group: inputs that share a scale; n_in is groups * group.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    group: int

    def weight(self) -> Tensor:
        """(n_out, n_in), float32."""
        n_out, groups = self.scales.shape
        runs = self.codes.reshape(n_out, groups, self.group).float()
        return runs.sub_(self.zeros.float()[..., None]).mul_(self.scales.float()[..., None]).flatten(1)


def even(bits: int) -> tuple[int, int]:
    """The fewest words of 32 bits that whole numbers of `bits` fill, and how many: 8 bits 1 and 4, 3 bits 3 and 32."""
    common = gcd(bits, 32)
    return bits // common, 32 // common


def to_words(numbers: Tensor, bits: int) -> Tensor:
    """uint8 (..., n), each below 2^bits -> int32 (..., ceil(n * bits / 32)): one after the other, lowest bits first.

    With 3, 5, 6 and 7 bits some lie across two words. The last word is filled up with zeros.
    """
    if len(numbers) > 1 and numbers.numel() > PACKED:  # 64-bit numbers are made of them below
        return torch.cat(
            [to_words(part, bits) for part in numbers.split(max(1, PACKED * len(numbers) // numbers.numel()))]
        )
    words, each = even(bits)
    n = numbers.shape[-1]
    filled = torch.nn.functional.pad(numbers, (0, -n % each)).unflatten(-1, (-1, each)).long()
    packed = torch.zeros(*filled.shape[:-1], words, dtype=torch.int64, device=numbers.device)
    for index in range(each):
        word, bit = divmod(index * bits, 32)
        packed[..., word] |= filled[..., index] << bit & 0xFFFFFFFF
        if bit + bits > 32:
            packed[..., word + 1] |= filled[..., index] >> 32 - bit
    return as_signed(packed.flatten(-2)[..., : -(-n * bits // 32)])


def from_words(packed: Tensor, bits: int, n: int) -> Tensor:
    """The inverse of `to_words`: int32 (..., words) -> the first `n` numbers in them, uint8 (..., n)."""
    if 8 % bits == 0:
        return _from_bytes(bytes_of(packed), bits)[..., :n]
    words, each = even(bits)
    missing = -packed.shape[-1] % words
    whole = torch.nn.functional.pad(packed, (0, missing)).unflatten(-1, (-1, words))
    numbers = torch.empty(*whole.shape[:-1], each, dtype=torch.uint8, device=packed.device)
    for index in range(each):
        word, bit = divmod(index * bits, 32)
        number = whole[..., word] >> bit  # copies of the sign come in from above; the mask takes them off
        if bit + bits > 32:
            number = number & (1 << 32 - bit) - 1 | whole[..., word + 1] << 32 - bit
        numbers[..., index] = number & (1 << bits) - 1
    return numbers.flatten(-2)[..., :n]


def bytes_of(words: Tensor) -> Tensor:
    """int32 (..., n) -> their bytes, lowest first, uint8 (..., 4 n)."""
    return words.contiguous().flatten().view(torch.uint8).reshape(*words.shape[:-1], 4 * words.shape[-1])


def _from_bytes(packed: Tensor, bits: int) -> Tensor:
    """uint8 (..., bytes) -> the numbers of 1, 2, 4 or 8 bits in them, in order."""
    each = 8 // bits
    numbers = torch.empty(*packed.shape, each, dtype=torch.uint8, device=packed.device)
    for index in range(each):
        torch.bitwise_and(packed >> index * bits, (1 << bits) - 1, out=numbers[..., index])
    return numbers.flatten(-2)


def as_signed(words: Tensor) -> Tensor:
    """int64 0 ... 2^32 - 1 -> the int32 of the same bits."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()
