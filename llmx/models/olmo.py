"""OLMo-2: norms only after each half, and over the whole of q and k."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llmx.formats.fields import Fields
from llmx.formats.gguf import Gguf
from llmx.layers import shape
from llmx.layers.decoder import Decoder
from llmx.layers.gguf_form import GgufForm, form_of, without_windows
from llmx.layers.rope import rope_from_gguf, rope_from_hf
from llmx.layers.rope_written import rope_to_hf
from llmx.layers.shape import Shape

Model = Decoder
ARCHITECTURES = ("Olmo2ForCausalLM",)
GGUF_ARCHITECTURES = ("olmo2",)
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
GGUF = (
    shape.GGUF_NAMES
    | shape.QK_NORMS
    | {
        "model.layers.{i}.post_attention_layernorm": "blk.{i}.post_attention_norm",
        "model.layers.{i}.post_feedforward_layernorm": "blk.{i}.post_ffw_norm",
    }
)
GGUF_PERMUTED: dict[str, str] = {}
SMOOTH = {"v_proj": ("o_proj",), "up_proj": ("down_proj",)}  # no norm stands before q, k, v, gate and up


@dataclass(frozen=True)
class Config(Shape):
    """How OLMo-2's Shape is read."""

    @classmethod
    def from_hf(cls, fields: Fields) -> Config:
        sizes = shape.sizes_from_hf(fields, eps=1e-5)
        rope = rope_from_hf(fields, sizes["head_dim"], sizes["max_position"])
        return cls(**sizes, rope=rope, placement="post", qk_norm="full")

    @classmethod
    def from_gguf(cls, fields: Fields, checkpoint: Gguf) -> Config:
        sizes = shape.sizes_from_gguf(fields, checkpoint, "olmo2")
        rope = rope_from_gguf(fields, checkpoint, "olmo2", sizes["head_dim"])
        return cls(**sizes, rope=rope, placement="post", qk_norm="full")

    def to_hf(self, biases: frozenset[str]) -> dict[str, Any]:
        assert self.rope is not None
        written: dict[str, Any] = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
        written |= shape.sizes_to_hf(self) | rope_to_hf(self.rope, self.max_position)
        return written | shape.biases_to_hf(biases, attention=True)

    def to_gguf(self) -> GgufForm:
        without_windows(self, "olmo2")
        return form_of(self, "olmo2")


TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "rope_theta": 500.0,
    "eos_token_id": 2,
}
QUIRKS = {
    "QK norm over all heads": lambda config: replace(config, qk_norm=""),
    "QK norm weights": ("q_norm.weight", "k_norm.weight"),
    "norm epsilon": lambda config: replace(config, eps=0.1),
    "norms after each half": ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight"),
}
