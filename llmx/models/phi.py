"""Phi-3, 3.5 and 4: Llama's shape with q, k and v, and gate and up, stored as one tensor each; longrope."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llmx.errors import UsageError
from llmx.formats.fields import Fields
from llmx.formats.gguf import Gguf
from llmx.layers import shape
from llmx.layers.decoder import Decoder
from llmx.layers.gguf_form import GgufForm, form_of, one_window
from llmx.layers.rope import RopeConfig, rope_from_gguf, rope_from_hf
from llmx.layers.rope_written import rope_to_hf
from llmx.layers.shape import Shape

Model = Decoder
ARCHITECTURES = ("Phi3ForCausalLM",)
GGUF_ARCHITECTURES = ("phi3",)
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
GGUF = (
    shape.GGUF_NAMES
    | shape.PRE_NORMS
    | {
        "model.layers.{i}.self_attn.qkv_proj": "blk.{i}.attn_qkv",
        "model.layers.{i}.mlp.gate_up_proj": "blk.{i}.ffn_up",
    }
)
GGUF_PERMUTED: dict[str, str] = {}
SMOOTH = {
    "input_layernorm": ("qkv_proj",),
    "post_attention_layernorm": ("gate_up_proj",),
}


@dataclass(frozen=True)
class Config(Shape):
    """How Phi-3's Shape is read."""

    @classmethod
    def from_hf(cls, fields: Fields) -> Config:
        sizes = shape.sizes_from_hf(fields, position=4096, eps=1e-5)
        window = fields.integer("sliding_window", None, low=1)
        original = fields.integer("original_max_position_embeddings", 4096, low=1)
        rope = rope_from_hf(fields, sizes["head_dim"], sizes["max_position"], original=original, partial=True)
        return cls(**sizes, rope=rope, windows=(window,), fused=True)

    @classmethod
    def from_gguf(cls, fields: Fields, checkpoint: Gguf) -> Config:
        sizes = shape.sizes_from_gguf(fields, checkpoint, "phi3")
        window = fields.integer("phi3.attention.sliding_window", None, low=0) or None
        return cls(
            **sizes,
            rope=rope_from_gguf(fields, checkpoint, "phi3", sizes["head_dim"]),
            windows=(window,),
            fused="blk.0.attn_qkv.weight" in checkpoint,
        )

    def to_hf(self, biases: frozenset[str]) -> dict[str, Any]:
        assert self.rope is not None
        if not self.fused:
            raise UsageError("Its q, k and v are tensors of their own, which transformers' Phi-3 doesn't have.")
        written: dict[str, Any] = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
        written |= shape.sizes_to_hf(self) | rope_to_hf(self.rope, self.max_position)
        written |= {"original_max_position_embeddings": self.rope.original, "sliding_window": self.windows[0]}
        written["partial_rotary_factor"] = self.rope.rotated / self.head_dim
        return written | shape.biases_to_hf(biases)

    def to_gguf(self) -> GgufForm:
        """The original context is always there; no window is 0."""
        assert self.rope is not None, "every layer turns"
        window, notes = one_window(self)
        more = {"attention.sliding_window": 0, **window}
        more["rope.scaling.original_context_length"] = self.rope.original
        return form_of(self, "phi3", more=more, notes=notes)


def _turning_less(rope: RopeConfig) -> RopeConfig:
    return replace(rope, rotated=rope.rotated - 2, divisors=rope.divisors[:-1], long_divisors=rope.long_divisors[:-1])


_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
TINY = (
    ("Phi3ForCausalLM", _SIZES | {"rope_theta": 500.0, "sliding_window": 33}),
    (
        "Phi3ForCausalLM",
        _SIZES
        | {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
                "original_max_position_embeddings": 128,
            },
        },
    ),
)
QUIRKS = {
    "window edge": lambda config: replace(config, windows=tuple(w and w + 1 for w in config.windows)),
    "partial turns": lambda config: replace(config, rope=_turning_less(config.rope)),
    "longrope's lists": lambda config: replace(config, rope=replace(config.rope, long_divisors=())),
    "longrope's magnitude": lambda config: replace(config, rope=replace(config.rope, magnitude=1.0)),
}
