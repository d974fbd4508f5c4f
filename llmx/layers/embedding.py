"""Token embeddings, read from the stored bytes row by row."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llmx.schemes.base import KernelTable, Scheme, Tensors


class Embedding:
    """ids (tokens,) -> (tokens, hidden) in `dtype`.

    `tensors` are the stored bytes of rows [first, first + rows) of the vocabulary; `axes` says along which axis of each
    they lie. Where that is a part of the vocabulary (not `whole`), ids outside give zeros: the ranks' results add up.
    """

    def __init__(
        self,
        scheme: Scheme,
        tensors: Tensors,
        axes: Mapping[str, int],
        dtype: torch.dtype,
        *,
        first: int,
        rows: int,
        whole: bool,
        hidden: int,
        kernels: KernelTable,
    ) -> None:
        self.scheme, self.tensors, self.axes, self.dtype = scheme, tensors, axes, dtype
        self.first, self.rows, self.whole, self.hidden = first, rows, whole, hidden
        self._kind = scheme.row_kind(tensors)
        self._read = None
        solid = all(tensor.is_contiguous() for tensor in tensors.values())
        if self._kind is not None and solid and kernels.has("look_up") and kernels.get("can_look_up")(self._kind):
            self._read = kernels.get("look_up")

    def __call__(self, ids: Tensor) -> Tensor:
        if self.whole:
            return self._look_up(ids)
        local = ids - self.first
        inside = (local >= 0) & (local < self.rows)
        return self._look_up(local.where(inside, 0)).where(inside[:, None], 0.0)

    def _look_up(self, ids: Tensor) -> Tensor:
        if self._read is not None:
            found: Tensor = self._read(self.tensors["weight"], self._kind, ids, self.hidden, self.dtype)
            return found
        return self.scheme.unpack({k: t.index_select(self.axes[k], ids) for k, t in self.tensors.items()}, self.dtype)
