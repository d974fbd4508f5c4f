"""Checkpoints written with the formats' own packages and read with our readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import safetensors.torch
import torch
from torch import Tensor

from llmx.formats.checkpoint import PLAIN, Checkpoint
from llmx.formats.gguf import open_gguf
from llmx.formats.safetensors import open_safetensors


def is_block(kind: str) -> bool:
    """Whether `kind` is one of GGUF's block types."""
    return kind not in PLAIN and kind in gguf.GGMLQuantizationType.__members__


def write(folder: Path, tensors: Mapping[str, Tensor], kinds: Mapping[str, str] | None = None) -> Checkpoint:
    """A safetensors folder; if `kinds` (by tensor name) has GGUF's block types, a GGUF file, whose blocks are uint8."""
    folder.mkdir(parents=True, exist_ok=True)
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
