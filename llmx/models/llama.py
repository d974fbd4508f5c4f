"""The Llama family: Llama 2 and 3, SmolLM2, and what shares their shape."""

from __future__ import annotations

from dataclasses import dataclass

from llmx.errors import UsageError
from llmx.formats.fields import Fields
from llmx.formats.gguf import Gguf
from llmx.layers.decoder import Decoder, Shape
from llmx.layers.rope import RopeConfig, rope_from_hf

Model = Decoder
ARCHITECTURES = ("LlamaForCausalLM",)
GGUF_ARCHITECTURES = ("llama",)
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.{i}.input_layernorm": "blk.{i}.attn_norm",
    "model.layers.{i}.self_attn.q_proj": "blk.{i}.attn_q",
    "model.layers.{i}.self_attn.k_proj": "blk.{i}.attn_k",
    "model.layers.{i}.self_attn.v_proj": "blk.{i}.attn_v",
    "model.layers.{i}.self_attn.o_proj": "blk.{i}.attn_output",
    "model.layers.{i}.post_attention_layernorm": "blk.{i}.ffn_norm",
    "model.layers.{i}.mlp.gate_proj": "blk.{i}.ffn_gate",
    "model.layers.{i}.mlp.up_proj": "blk.{i}.ffn_up",
    "model.layers.{i}.mlp.down_proj": "blk.{i}.ffn_down",
}
# GGUF's llama stores rows of q and k with a head's halves interleaved; value: the config field that counts the heads.
GGUF_PERMUTED = {"q_proj": "heads", "k_proj": "kv_heads"}
SMOOTH = {
    "input_layernorm": ("q_proj", "k_proj", "v_proj"),
    "v_proj": ("o_proj",),
    "post_attention_layernorm": ("gate_proj", "up_proj"),
    "up_proj": ("down_proj",),
}


@dataclass(frozen=True)
class Config(Shape):
    """Nothing that Shape doesn't have: how it is read."""

    @classmethod
    def from_hf(cls, fields: Fields) -> Config:
        """From config.json, of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""
        fields.text("hidden_act", "silu", one_of=("silu", "swish"))
        hidden, heads = fields.integer("hidden_size", low=1), fields.integer("num_attention_heads", low=1)
        head_dim = fields.integer("head_dim", hidden // heads, low=2)
        return cls(
            vocab=fields.integer("vocab_size", low=1),
            hidden=hidden,
            layers=fields.integer("num_hidden_layers", low=1),
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", heads, low=1),
            head_dim=head_dim,
            inner=fields.integer("intermediate_size", low=1),
            max_position=fields.integer("max_position_embeddings", 2048, low=1),
            eps=fields.number("rms_norm_eps", 1e-6, low=0),
            rope=rope_from_hf(fields, head_dim),
            tied=fields.boolean("tie_word_embeddings", False),
        )

    @classmethod
    def from_gguf(cls, fields: Fields, checkpoint: Gguf) -> Config:
        """From GGUF metadata; the vocabulary's size is that of the embedding."""

        def at(key: str) -> str:
            return f"llama.{key}"

        if "token_embd.weight" not in checkpoint:
            raise UsageError(f"{fields.where}: the tensor token_embd.weight is missing.")
        hidden, heads = fields.integer(at("embedding_length"), low=1), fields.integer(at("attention.head_count"), low=1)
        head_dim = fields.integer(at("attention.key_length"), hidden // heads, low=2)
        if experts := fields.integer(at("expert_count"), 0):
            raise UsageError(f"{fields.where}: {experts} experts; mixtures of experts are not built in this version.")
        return cls(
            vocab=checkpoint.stored("token_embd.weight").shape[0],
            hidden=hidden,
            layers=fields.integer(at("block_count"), low=1),
            heads=heads,
            kv_heads=fields.integer(at("attention.head_count_kv"), heads, low=1),
            head_dim=head_dim,
            inner=fields.integer(at("feed_forward_length"), low=1),
            max_position=fields.integer(at("context_length"), low=1),
            eps=fields.number(at("attention.layer_norm_rms_epsilon"), low=0),
            rope=_rope_from_gguf(fields, checkpoint, head_dim),
            tied="output.weight" not in checkpoint,
        )


def _rope_from_gguf(fields: Fields, checkpoint: Gguf, head_dim: int) -> RopeConfig:
    theta = fields.number("llama.rope.freq_base", 10000.0, low=1)
    rotated = fields.integer("llama.rope.dimension_count", head_dim, low=2, high=head_dim)
    if "rope_freqs.weight" in checkpoint:  # llama3's scaling, stored as one divisor per frequency
        divisors = checkpoint.read("rope_freqs.weight").float()
        if divisors.shape != (rotated // 2,) or not bool((divisors > 0).all()):
            raise UsageError(f"{fields.where}: rope_freqs.weight must hold {rotated // 2} positive numbers.")
        return RopeConfig(theta, rotated, divisors=tuple(divisors.tolist()))
    kind = fields.text("llama.rope.scaling.type", "none", one_of=("none", "linear"))
    if kind == "linear":
        return RopeConfig(theta, rotated, "linear", fields.number("llama.rope.scaling.factor", low=1))
    return RopeConfig(theta, rotated)


# What the conformance test builds with transformers, and the shapes that benchmarks fill with random weights.
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
