"""Weights as plain floating-point numbers: float32, float16 or bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llmx.schemes.base import Axis, Case, KernelTable, Kind, Layout, Scheme, Tensors

if TYPE_CHECKING:
    from llmx.formats.checkpoint import Stored

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Dense(Scheme):
    """`weight` (n_out, n_in), or (experts, n_out, n_in)."""

    name = "dense"
    cases = (Case("F32", error=0.0), Case("F16", error=3e-4), Case("BF16", error=3e-3))

    def matches(self, stored: Mapping[str, Stored]) -> bool:
        return set(stored) == {"weight"} and stored["weight"].kind in DTYPES and len(stored["weight"].shape) in (2, 3)

    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, ...]:
        return stored["weight"].shape

    def axes(self, stored: Mapping[str, Stored]) -> Layout:
        return {"weight": (Axis(Kind.EXPERT), Axis(Kind.OUT), Axis(Kind.IN))[-len(stored["weight"].shape) :]}

    def row_kind(self, tensors: Tensors) -> str | None:
        return next(kind for kind, dtype in DTYPES.items() if dtype == tensors["weight"].dtype)

    def unpack(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        return tensors["weight"].to(dtype)

    def pack(self, weight: Tensor, kind: str) -> dict[str, Tensor]:
        return {"weight": weight.to(DTYPES[kind])}

    def pack_for_kernel(self, tensors: Tensors, layout: Layout, kernels: KernelTable) -> dict[str, Tensor]:
        weight = tensors["weight"]
        kind = next(kind for kind, dtype in DTYPES.items() if dtype == weight.dtype)
        packed: Tensor = kernels.get("new_packed")(kind, *weight.shape)
        kernels.get("pack_numbers")(packed, weight)
        return {kind: packed}


SCHEME = Dense()
