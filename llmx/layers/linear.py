"""A linear layer over one or more segments of stored weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from llmx.schemes.base import KernelTable, Segment, apply


class Linear:
    """x (rows, n_in) -> (rows, n_out) in x.dtype; the outputs of a fused linear lie side by side, in the parts' order.

    Under tensor parallelism these are this rank's inputs and outputs; if inputs are split the result is a partial sum.
    """

    def __init__(self, segments: Sequence[Segment], n_in: int, kernels: KernelTable) -> None:
        self.segments = tuple(segments)
        self.n_in = n_in
        self.n_out = sum(segment.n_out for segment in segments)
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        assert x.shape == (len(x), self.n_in), f"{tuple(x.shape)} into a linear with {self.n_in} inputs"
        return apply(x, self.segments, self._kernels)
