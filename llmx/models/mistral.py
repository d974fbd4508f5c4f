"""Mistral: Llama's shape, with a sliding window over every layer in the first version. Its GGUFs are llama's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llmx.errors import UsageError
from llmx.formats.fields import Fields
from llmx.formats.gguf import Gguf
from llmx.layers import shape
from llmx.layers.decoder import Decoder
from llmx.layers.gguf_form import GgufForm, form_of, one_window
from llmx.layers.rope import rope_from_gguf, rope_from_hf
from llmx.layers.rope_written import rope_to_hf
from llmx.layers.shape import Shape

Model = Decoder
ARCHITECTURES = ("MistralForCausalLM",)
GGUF_ARCHITECTURES = ("mistral3",)
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
GGUF = shape.GGUF_NAMES | shape.PRE_NORMS
GGUF_PERMUTED = {"q_proj": "heads", "k_proj": "kv_heads"}
SMOOTH = shape.SMOOTH


@dataclass(frozen=True)
class Config(Shape):
    """How Mistral's Shape is read."""

    @classmethod
    def from_hf(cls, fields: Fields) -> Config:
        """`sliding_window` is null from version 0.2 on; left out, it is transformers' default of 4096."""
        sizes = shape.sizes_from_hf(fields, position=131072)
        given = "sliding_window" in fields.data
        window = fields.integer("sliding_window", None, low=1) if given else 4096
        return cls(**sizes, rope=rope_from_hf(fields, sizes["head_dim"], sizes["max_position"]), windows=(window,))

    @classmethod
    def from_gguf(cls, fields: Fields, checkpoint: Gguf) -> Config:
        """Ministral 3's files have this architecture too, and scale the queries of late positions."""
        for key in ("mistral3.attention.temperature_scale", "mistral3.rope.scaling.yarn_log_multiplier"):
            if fields.number(key, 0.0):
                raise UsageError(f"{fields.where}: {key} is set, which is not built.")
        sizes = shape.sizes_from_gguf(fields, checkpoint, "mistral3")
        window = fields.integer("mistral3.attention.sliding_window", None, low=1)
        return cls(**sizes, rope=rope_from_gguf(fields, checkpoint, "mistral3", sizes["head_dim"]), windows=(window,))

    def to_hf(self, biases: frozenset[str]) -> dict[str, Any]:
        assert self.rope is not None
        kind = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": self.windows[0]}
        sizes = shape.sizes_to_hf(self) | rope_to_hf(self.rope, self.max_position)
        return kind | sizes | shape.biases_to_hf(biases)

    def to_gguf(self) -> GgufForm:
        """A llama file, as llama.cpp's converter makes of Mistral."""
        window, notes = one_window(self)
        return form_of(self, "llama", more=window, notes=notes)


_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "rope_theta": 500.0,
}
TINY = (
    ("MistralForCausalLM", _SIZES | {"sliding_window": 33}),
    ("MistralForCausalLM", _SIZES | {"sliding_window": None}),
)
QUIRKS = {
    "window": lambda config: replace(config, windows=(None,)),
    "window edge": lambda config: replace(config, windows=tuple(w and w + 1 for w in config.windows)),
    "rope base": lambda config: replace(config, rope=replace(config.rope, theta=2 * config.rope.theta)),
}
