"""Granite 3: Llama's shape with multipliers on embeddings, residuals, scores and logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llmx.formats.fields import Fields
from llmx.formats.gguf import Gguf
from llmx.layers import shape
from llmx.layers.decoder import Decoder
from llmx.layers.gguf_form import GgufForm, form_of
from llmx.layers.rope import rope_from_gguf, rope_from_hf
from llmx.layers.rope_written import rope_to_hf, short
from llmx.layers.shape import Shape

Model = Decoder
ARCHITECTURES = ("GraniteForCausalLM",)
GGUF_ARCHITECTURES = ("granite",)
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
GGUF = shape.GGUF_NAMES | shape.PRE_NORMS
GGUF_PERMUTED = {"q_proj": "heads", "k_proj": "kv_heads"}
SMOOTH = shape.SMOOTH


@dataclass(frozen=True)
class Config(Shape):
    """How Granite's Shape is read."""

    @classmethod
    def from_hf(cls, fields: Fields) -> Config:
        sizes = shape.sizes_from_hf(fields)
        return cls(
            **sizes,
            rope=rope_from_hf(fields, sizes["head_dim"], sizes["max_position"]),
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            residual_scale=fields.number("residual_multiplier", 1.0),
            scale=fields.number("attention_multiplier", 1.0),
            logit_scale=1 / fields.number("logits_scaling", 1.0, low=1e-6),
        )

    @classmethod
    def from_gguf(cls, fields: Fields, checkpoint: Gguf) -> Config:
        sizes = shape.sizes_from_gguf(fields, checkpoint, "granite")
        return cls(
            **sizes,
            rope=rope_from_gguf(fields, checkpoint, "granite", sizes["head_dim"]),
            embedding_scale=fields.number("granite.embedding_scale", 1.0),
            residual_scale=fields.number("granite.residual_scale", 1.0),
            scale=fields.number("granite.attention.scale", 0.0) or None,
            logit_scale=1 / fields.number("granite.logit_scale", 1.0, low=1e-6),
        )

    def to_hf(self, biases: frozenset[str]) -> dict[str, Any]:
        assert self.rope is not None
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        written: dict[str, Any] = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
        written |= shape.sizes_to_hf(self) | rope_to_hf(self.rope, self.max_position)
        written |= {"embedding_multiplier": short(self.embedding_scale), "attention_multiplier": short(scale)}
        written |= {"residual_multiplier": short(self.residual_scale), "logits_scaling": short(1 / self.logit_scale)}
        return written | shape.biases_to_hf(biases, attention=True, mlp=True)

    def to_gguf(self) -> GgufForm:
        more = {
            "attention.scale": self.head_dim**-0.5 if self.scale is None else self.scale,
            "embedding_scale": self.embedding_scale,
            "residual_scale": self.residual_scale,
            "logit_scale": 1 / self.logit_scale,
        }
        return form_of(self, "granite", more={key: float(value) for key, value in more.items()})


TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "rope_theta": 500.0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.15,
    "logits_scaling": 2.0,
}
QUIRKS = {
    "embedding multiplier": lambda config: replace(config, embedding_scale=1.0),
    "residual multiplier": lambda config: replace(config, residual_scale=1.0),
    "attention multiplier": lambda config: replace(config, scale=None),
    "logits scaling": lambda config: replace(config, logit_scale=1.0),
}
