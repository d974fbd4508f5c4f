"""Qwen 2, 2.5 (biases on q, k and v) and 3 (a norm on each head of q and k)."""

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
ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
GGUF_ARCHITECTURES = ("qwen2", "qwen3")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
GGUF = shape.GGUF_NAMES | shape.PRE_NORMS | shape.QK_NORMS
GGUF_PERMUTED: dict[str, str] = {}
SMOOTH = shape.SMOOTH


@dataclass(frozen=True)
class Config(Shape):
    """How Qwen's Shape is read."""

    @classmethod
    def from_hf(cls, fields: Fields) -> Config:
        """With use_sliding_window, layers from `max_window_layers` on have the window, or as layer_types says."""
        third = "Qwen3ForCausalLM" in fields.strings("architectures")
        sizes = shape.sizes_from_hf(fields, position=32768)
        if third and "head_dim" not in fields:
            sizes["head_dim"] = 128
        window = None
        if fields.boolean("use_sliding_window", False):
            window = fields.integer("sliding_window", 4096, low=1)
        first = fields.integer("max_window_layers", 28, low=0)
        named = ("sliding_attention" if window and i >= first else "full_attention" for i in range(sizes["layers"]))
        windows = shape.windows_from_hf(fields, sizes["layers"], window, tuple(named))
        rope = rope_from_hf(fields, sizes["head_dim"], sizes["max_position"])
        return cls(**sizes, rope=rope, windows=windows, qk_norm="head" if third else "")

    @classmethod
    def from_gguf(cls, fields: Fields, checkpoint: Gguf) -> Config:
        architecture = fields.text("general.architecture")
        sizes = shape.sizes_from_gguf(fields, checkpoint, architecture)
        rope = rope_from_gguf(fields, checkpoint, architecture, sizes["head_dim"])
        return cls(**sizes, rope=rope, qk_norm="head" if architecture == "qwen3" else "")

    def to_hf(self, biases: frozenset[str]) -> dict[str, Any]:
        assert self.rope is not None
        third = self.qk_norm == "head"
        named = ("Qwen3ForCausalLM", "qwen3") if third else ("Qwen2ForCausalLM", "qwen2")
        written: dict[str, Any] = {"architectures": [named[0]], "model_type": named[1], "use_sliding_window": False}
        written |= shape.sizes_to_hf(self) | rope_to_hf(self.rope, self.max_position)
        own = frozenset() if third else frozenset({"q_proj", "k_proj", "v_proj"})  # Qwen 2 always has these
        return written | shape.biases_to_hf(biases - own, attention=third)

    def to_gguf(self) -> GgufForm:
        architecture = "qwen3" if self.qk_norm else "qwen2"
        without_windows(self, architecture)
        return form_of(self, architecture)


_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "rope_theta": 500.0,
}
TINY = (
    ("Qwen2ForCausalLM", _SIZES),
    ("Qwen3ForCausalLM", _SIZES | {"head_dim": 24}),
    ("Qwen3ForCausalLM", _SIZES | {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 1}),
)
QUIRKS = {
    "biases": ("q_proj.bias", "k_proj.bias", "v_proj.bias"),
    "QK norm": lambda config: replace(config, qk_norm=""),
    "QK norm weights": ("q_norm.weight", "k_norm.weight"),
    "window edge": lambda config: replace(config, windows=tuple(w and w + 1 for w in config.windows)),
}
