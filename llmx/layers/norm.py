"""RMS norm with its weight."""

from __future__ import annotations

from torch import Tensor

from llmx.kernels import Kernels


class RMSNorm:
    """weight (hidden,) f32."""

    def __init__(self, weight: Tensor, eps: float, kernels: Kernels) -> None:
        self.weight, self.eps = weight, eps
        self._norm, self._add_norm = kernels.get("rms_norm"), kernels.get("add_rms_norm")

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, hidden) -> (rows, hidden)"""
        normed: Tensor = self._norm(x, self.weight, self.eps)
        return normed

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum."""
        normed, total = self._add_norm(x, residual, self.weight, self.eps)
        return normed, total
