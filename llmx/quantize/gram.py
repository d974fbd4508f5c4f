"""The sum of x x^T over a linear's inputs, its Hessian: symmetric, so that half of it is kept."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

PANEL = 512  # columns; a multiple of every usual group


class Gram:
    """A symmetric matrix (n, n), f32: of each PANEL of columns the rows from the panel's first one on."""

    def __init__(self, n: int, device: torch.device | None = None) -> None:
        self.n = n
        counts = [(n - low) * (high - low) for low, high in self._bounds()]
        self._numbers = torch.zeros(sum(counts), device=device)
        parts = self._numbers.split(counts)
        self._panels = [(low, high, part.view(n - low, high - low))
                        for (low, high), part in zip(self._bounds(), parts, strict=True)]  # fmt: skip

    def _bounds(self) -> Iterator[tuple[int, int]]:
        return ((low, min(low + PANEL, self.n)) for low in range(0, self.n, PANEL))

    @classmethod
    def of(cls, matrix: Tensor) -> Gram:
        """matrix: (n, n), symmetric."""
        made = cls(len(matrix), matrix.device)
        for low, high, panel in made._panels:
            panel.copy_(matrix[low:, low:high])
        return made

    def add(self, x: Tensor) -> None:
        """x: (tokens, n) f32"""
        for low, high, panel in self._panels:
            panel.addmm_(x[:, low:].T, x[:, low:high])

    def diagonal(self) -> Tensor:
        """(n,), a copy with a stride, as that of a whole matrix has one: torch adds such numbers in another order."""
        made = self._numbers.new_empty(self.n, 2)[:, 0]
        for low, high, panel in self._panels:
            made[low:high] = panel.diagonal()
        return made

    def is_finite(self) -> bool:
        """Of numbers whose sum is: without a copy of them, which torch's own would make."""
        return bool(self._numbers.sum().isfinite())

    def losses(self, errors: Tensor) -> Tensor:
        """(rows,): e H e^T of each row of errors (rows, n) f32."""
        found = torch.zeros(len(errors), device=errors.device)
        for low, high, panel in self._panels:
            here, width = errors[:, low:high], high - low
            product = here @ panel[:width]
            product.addmm_(errors[:, high:], panel[width:], alpha=2)
            found += product.mul_(here).sum(1)
        return found

    def square(self, low: int, high: int) -> Tensor:
        """Its rows and columns [low, high)."""
        made = self._numbers.new_empty(high - low, high - low)
        for first, last, panel in self._panels:
            left, right = max(first, low), min(last, high)
            if left < right:
                part = panel[left - first : high - first, left - first : right - first]
                made[left - low :, left - low : right - low] = part
                made[left - low : right - low, right - low :] = part[right - left :].T
        return made

    def blocks(self, group: int) -> Tensor:
        """Its diagonal blocks, (n / group, group, group)."""
        return torch.stack([self.square(low, low + group) for low in range(0, self.n, group)])

    def arranged(self, order: Tensor) -> Tensor:
        """All of it, (n, n), rows and columns in `order`, a permutation."""
        made = self.square(0, self.n)
        for part in made.split(PANEL):
            part.copy_(part[:, order])
        for part in made.split(PANEL, 1):
            part.copy_(part[order])
        return made
