"""The Llama family: Llama 2 and 3, SmolLM2, and what shares their shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llmx.formats.fields import Fields
from llmx.formats.gguf import Gguf
from llmx.layers import shape
from llmx.layers.decoder import Decoder
from llmx.layers.gguf_form import GgufForm, form_of, one_window
from llmx.layers.rope import RopeConfig, rope_from_gguf, rope_from_hf
from llmx.layers.rope_written import rope_to_hf
from llmx.layers.shape import Shape

Model = Decoder
ARCHITECTURES = ("LlamaForCausalLM",)
GGUF_ARCHITECTURES = ("llama",)
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
GGUF = shape.GGUF_NAMES | shape.PRE_NORMS
# GGUF's llama stores rows of q and k with a head's halves interleaved; value: the config field that counts the heads.
GGUF_PERMUTED = {"q_proj": "heads", "k_proj": "kv_heads"}
SMOOTH = shape.SMOOTH


@dataclass(frozen=True)
class Config(Shape):
    """Nothing that Shape doesn't have: how it is read."""

    @classmethod
    def from_hf(cls, fields: Fields) -> Config:
        """From config.json, of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""
        sizes = shape.sizes_from_hf(fields)
        return cls(**sizes, rope=rope_from_hf(fields, sizes["head_dim"], sizes["max_position"]))

    @classmethod
    def from_gguf(cls, fields: Fields, checkpoint: Gguf) -> Config:
        """Mistral's GGUFs are of this architecture too, with the window among the metadata."""
        sizes = shape.sizes_from_gguf(fields, checkpoint, "llama")
        window = fields.integer("llama.attention.sliding_window", None, low=1)
        return cls(**sizes, rope=rope_from_gguf(fields, checkpoint, "llama", sizes["head_dim"]), windows=(window,))

    def to_hf(self, biases: frozenset[str]) -> dict[str, Any]:
        """config.json of what `from_gguf` read; with a window that is Mistral's. biases: linears that have one."""
        assert self.rope is not None
        written = shape.sizes_to_hf(self) | rope_to_hf(self.rope, self.max_position)
        if (window := self.windows[0]) is not None:
            kind = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
            return kind | written | shape.biases_to_hf(biases)
        kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        return kind | written | shape.biases_to_hf(biases, attention=True, mlp=True)

    def to_gguf(self) -> GgufForm:
        """A llama file."""
        window, notes = one_window(self)
        return form_of(self, "llama", more=window, notes=notes)


# What the conformance test builds with transformers, what makes the family differ from a plainer one (as a change that
# must show in the logits), and the shapes that benchmarks fill with random weights.
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "rope_theta": 500.0,
}
QUIRKS = {
    "rope base": lambda config: replace(config, rope=replace(config.rope, theta=2 * config.rope.theta)),
    "norm epsilon": lambda config: replace(config, eps=0.1),
    "activation": lambda config: replace(config, activation="gelu"),
}
SHAPES = {
    "tiny": Config(
        vocab=256, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, inner=96, max_position=1024, eps=1e-5,
        rope=RopeConfig(10000.0, 16),
    ),
    "llama-8b": Config(
        vocab=128256, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, inner=14336, max_position=8192,
        eps=1e-5, rope=RopeConfig(500000.0, 128),
    ),
}  # fmt: skip
