"""The gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor

from llmx.kernels import Kernels
from llmx.layers.linear import Linear
from llmx.parallel.group import Group


class GatedMLP:
    """down(activation(gate(x)) * up(x)), gate and up fused. activation: "silu", "gelu" or "gelu_tanh"."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str, kernels: Kernels, group: Group) -> None:
        self.gate_up, self.down, self.group = gate_up, down, group
        self._activate = kernels.get(f"{activation}_mul")

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, hidden) -> (rows, hidden)"""
        return self.group.sum(self.down(self._activate(self.gate_up(x))))
