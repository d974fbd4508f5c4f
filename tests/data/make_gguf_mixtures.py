"""Writes gguf_mixtures.json: the type that llama-quantize gives each tensor of a few models, by mixture.

A letter for each, in the order of their names.

Run by hand with llama.cpp's tool: python tests/data/make_gguf_mixtures.py .../llama-quantize
Weights are zeros: the types follow from names, shapes and sizes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

MIXTURES = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s"),
    *("q5_k_m", "q6_k", "iq4_nl", "iq4_xs", "f16", "bf16"),
)


@dataclass(frozen=True)
class Model:
    """hidden, inner: inputs of most linears, and of ffn_down."""

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    inner: int
    tied: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> (n_out, n_in)."""
        head = self.hidden // self.heads
        found: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (8, self.hidden),
            "output_norm.weight": (self.hidden,),
        }
        if not self.tied:
            found["output.weight"] = (8, self.hidden)
        for i in range(self.layers):
            layer = {
                "attn_norm": (self.hidden,),
                "ffn_norm": (self.hidden,),
                "attn_output": (self.hidden, self.hidden),
                "ffn_down": (self.hidden, self.inner),
                "ffn_up": (self.inner, self.hidden),
            }
            if self.architecture == "phi3":
                layer["attn_qkv"] = (self.hidden + 2 * self.kv_heads * head, self.hidden)
            else:
                layer |= {f"attn_{part}": (self.kv_heads * head, self.hidden) for part in "kv"}
                layer |= {"attn_q": (self.hidden, self.hidden), "ffn_gate": (self.inner, self.hidden)}
            found |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
        return found


MODELS: Mapping[str, Model] = {
    "plain": Model("llama", 17, 4, 1, 256, 256, False),
    "small": Model("llama", 30, 3, 3, 96, 256, True),
    "fused": Model("phi3", 9, 2, 2, 256, 512, False),
    "large": Model("llama", 80, 2, 1, 256, 256, False),
    "odd": Model("qwen2", 6, 2, 2, 48, 80, True),
}


def write(model: Model, path: Path) -> None:
    writer = gguf.GGUFWriter(path, model.architecture)
    writer.add_block_count(model.layers)
    writer.add_context_length(64)
    writer.add_embedding_length(model.hidden)
    writer.add_feed_forward_length(model.inner)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, shape in model.shapes().items():
        writer.add_tensor(name, np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    found: dict[str, dict[str, str]] = {}
    letters: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in MODELS.items():
            source, made = Path(folder) / "in.gguf", Path(folder) / "out.gguf"
            write(model, source)
            for mixture in MIXTURES:
                run = [sys.argv[1], str(source), str(made), mixture.upper(), "1"]
                subprocess.run(run, check=True, capture_output=True)
                types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(made).tensors}
                kinds = [types[tensor] for tensor in sorted(model.shapes())]
                for kind in kinds:
                    letters.setdefault(kind, chr(ord("a") + len(letters)))
                found.setdefault(name, {})[mixture] = "".join(letters[kind] for kind in kinds)
    text = json.dumps({"letters": letters, "types": found}, indent=0)
    Path(__file__).with_name("gguf_mixtures.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
