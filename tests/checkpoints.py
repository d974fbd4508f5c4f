"""Checkpoints written with the formats' own packages and read with our readers."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from llmx.formats.checkpoint import PLAIN, Checkpoint
from llmx.formats.gguf import open_gguf
from llmx.formats.safetensors import open_safetensors


def is_block(kind: str) -> bool:
    """Whether `kind` is one of GGUF's block types."""
    return kind not in PLAIN and kind in gguf.GGMLQuantizationType.__members__


def dequantized(raw: Tensor, kind: str) -> Tensor:
    """Blocks (..., bytes), uint8 -> their weights as the gguf package computes them, float32."""
    with np.errstate(all="ignore"):  # infinity times zero, for one
        return torch.from_numpy(gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]).copy())


@functools.cache
def pool(kind: str) -> Tensor:
    """512 blocks of random bytes whose weights are of ordinary size, uint8: random scales seldom are."""
    generator = torch.Generator().manual_seed(1)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    found = torch.empty(0, size, dtype=torch.uint8)
    while len(found) < 512:
        raw = torch.randint(0, 256, (4096, size), dtype=torch.uint8, generator=generator)
        largest = dequantized(raw, kind).abs().amax(-1)
        found = torch.cat([found, raw[(largest > 0.1) & (largest < 10)]])  # never true of NaN
    return found[:512]


def random_blocks(kind: str, *shape: int, seed: int = 0) -> Tensor:
    """Weights of `shape` in GGUF type `kind`, of ordinary size: uint8 (..., bytes of a row)."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
    assert shape[-1] % size == 0
    index = torch.randint(0, 512, (*shape[:-1], shape[-1] // size), generator=torch.Generator().manual_seed(seed))
    return pool(kind)[index].flatten(-2)


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    kinds: Mapping[str, str] | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """A safetensors folder; if `kinds` (by tensor name) has GGUF's block types, a GGUF file, whose blocks are uint8.

    `quantization`: the config's quantization_config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if quantization is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    kinds = kinds or {}
    if not any(is_block(kind) for kind in kinds.values()):
        safetensors.torch.save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
        return open_safetensors(folder)
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType[kinds[name]] if name in kinds else None
        writer.add_tensor(name, tensor.contiguous().numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return open_gguf(path)


@dataclass(frozen=True)
class AsStored:
    """Names are those stored; `permuted`: names of linears with interleaved rows -> heads."""

    permuted: Mapping[str, int] = field(default_factory=dict)

    def stored(self, name: str, suffix: str) -> str:
        return f"{name}.{suffix}"

    def permute(self, name: str) -> int | None:
        return self.permuted.get(name)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
