"""The Llama family: Llama 2 and 3, SmolLM2, and what shares their shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmx.batch import Batch
from llmx.cache.pools import Cache, LayerSpec
from llmx.errors import UsageError
from llmx.formats.fields import Fields
from llmx.formats.gguf import Gguf
from llmx.kernels import Kernels
from llmx.layers.attention import Attention, Forward
from llmx.layers.mlp import GatedMLP
from llmx.layers.norm import RMSNorm
from llmx.layers.rope import Rope, RopeConfig
from llmx.layers.weights import Part, Weights

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
# GGUF's llama stores the rows of q and k with a head's halves interleaved; value: the config field that counts the heads.
GGUF_PERMUTED = {"q_proj": "heads", "k_proj": "kv_heads"}
SMOOTH = {
    "input_layernorm": ("q_proj", "k_proj", "v_proj"),
    "v_proj": ("o_proj",),
    "post_attention_layernorm": ("gate_proj", "up_proj"),
    "up_proj": ("down_proj",),
}


@dataclass(frozen=True)
class Config:
    """`windows` is the pattern of attention windows, repeated over the layers (None: all of the text)."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    max_position: int
    eps: float
    rope: RopeConfig
    tied: bool = False
    windows: tuple[int | None, ...] = (None,)

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UsageError(f"{self.heads} attention heads can't share {self.kv_heads} key-value heads evenly.")
        if self.head_dim % 2:
            raise UsageError(f"The head dimension {self.head_dim} is odd; rotary embedding turns pairs.")

    @classmethod
    def from_hf(cls, fields: Fields) -> Config:
        """From config.json, of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""
        fields.text("hidden_act", "silu", one_of=("silu", "swish"))
        hidden, heads = fields.integer("hidden_size", low=1), fields.integer("num_attention_heads", low=1)
        head_dim = fields.integer("head_dim", hidden // heads, low=2)
        position = fields.integer("max_position_embeddings", 2048, low=1)
        return cls(
            vocab=fields.integer("vocab_size", low=1),
            hidden=hidden,
            layers=fields.integer("num_hidden_layers", low=1),
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", heads, low=1),
            head_dim=head_dim,
            inner=fields.integer("intermediate_size", low=1),
            max_position=position,
            eps=fields.number("rms_norm_eps", 1e-6, low=0),
            rope=_rope_from_hf(fields, head_dim, position),
            tied=fields.boolean("tie_word_embeddings", False),
        )

    @classmethod
    def from_gguf(cls, fields: Fields, checkpoint: Gguf) -> Config:
        """From GGUF metadata; the vocabulary's size is that of the embedding."""
        at = lambda key: f"llama.{key}"  # noqa: E731
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

    def specs(self) -> list[LayerSpec]:
        """The KV of each layer."""
        windows = (self.windows[i % len(self.windows)] for i in range(self.layers))
        return [LayerSpec(self.kv_heads, self.head_dim, window) for window in windows]


def _rope_from_hf(fields: Fields, head_dim: int, position: int) -> RopeConfig:
    scaling = fields.section("rope_parameters", None) or fields.section("rope_scaling", None)
    theta = fields.number("rope_theta", 10000.0, low=1)
    if scaling is None:
        return RopeConfig(theta, head_dim)
    kind = scaling.text("rope_type", None) or scaling.text("type", "default")
    theta = scaling.number("rope_theta", theta, low=1)
    if kind not in ("default", "linear", "llama3"):
        raise UsageError(f"{fields.where}: rope type {kind!r} is not built; there are default, linear and llama3.")
    if kind == "default":
        return RopeConfig(theta, head_dim)
    factor = scaling.number("factor", low=1)
    if kind == "linear":
        return RopeConfig(theta, head_dim, kind, factor)
    low, high = scaling.number("low_freq_factor", 1.0, low=0), scaling.number("high_freq_factor", 4.0, low=0)
    if low >= high:
        raise UsageError(f"{fields.where}: low_freq_factor {low} must lie below high_freq_factor {high}.")
    original = scaling.integer("original_max_position_embeddings", position, low=1)
    return RopeConfig(theta, head_dim, kind, factor, low, high, original)


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


class Block:
    """One decoder layer. The residual stream is handed on beside what the layer adds to it, so that the next norm adds it."""

    def __init__(self, config: Config, index: int, weights: Weights, kernels: Kernels) -> None:
        name, dim = f"model.layers.{index}", config.head_dim
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        heads = {"q_proj": config.heads, "k_proj": config.kv_heads, "v_proj": config.kv_heads}
        qkv = weights.column(
            [Part(f"{attention}.{p}", heads[p] * dim, heads[p]) for p in FUSED["qkv_proj"]], config.hidden
        )
        out = weights.row(f"{attention}.o_proj", config.hidden, config.heads * dim, config.heads)
        gate_up = weights.column([Part(f"{mlp}.{p}", config.inner) for p in FUSED["gate_up_proj"]], config.hidden)
        down = weights.row(f"{mlp}.down_proj", config.hidden, config.inner)
        norm = lambda part: RMSNorm(weights.vector(f"{name}.{part}", config.hidden), config.eps, kernels)  # noqa: E731
        self.before_attention, self.before_mlp = norm("input_layernorm"), norm("post_attention_layernorm")
        self.attention = Attention(qkv, out, config.heads, dim**-0.5, index, kernels)
        self.mlp = GatedMLP(gate_up, down, kernels)

    def __call__(self, x: Tensor, step: Forward, cos: Tensor, sin: Tensor) -> Tensor:
        """(rows, hidden) -> (rows, hidden)"""
        x, residual = self.before_mlp.add(self.attention(self.before_attention(x), step, cos, sin), x)
        return self.mlp(x) + residual


class Model:
    """embed / layers[a:b] / norm / head. `length`: positions that the rotary tables cover."""

    def __init__(self, config: Config, weights: Weights, kernels: Kernels, *, length: int, device: torch.device) -> None:
        self.config, self.kernels = config, kernels
        self.embedding = weights.embedding("model.embed_tokens", config.vocab, config.hidden)
        self.rope = Rope(config.rope, length, device)
        self.layers = [Block(config, i, weights, kernels) for i in range(config.layers)]
        self.final = RMSNorm(weights.vector("model.norm", config.hidden), config.eps, kernels)
        self.output = weights.head("lm_head", config.vocab, config.hidden, tied_to="model.embed_tokens")

    def embed(self, tokens: Tensor) -> Tensor:
        """(rows,) -> (rows, hidden)"""
        return self.embedding(tokens)

    def norm(self, x: Tensor) -> Tensor:
        """(rows, hidden) -> (rows, hidden)"""
        return self.final(x)

    def head(self, x: Tensor) -> Tensor:
        """(rows, hidden) after the norm -> (rows, vocab) logits, f32"""
        return self.output(x).float()

    def forward(
        self, batch: Batch, cache: Cache, *, taps: tuple[int, ...] = (), layers: Iterable[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Hidden after the norm (T, hidden), and taps (T, len(taps) * hidden): i is layer i's input, -1 the hidden."""
        step: Any = Forward(batch, cache)
        cos, sin = self.rope.at(batch.positions)
        x, seen = self.embed(batch.tokens), {}
        for i in range(len(self.layers)) if layers is None else layers:
            seen[i] = x
            x = self.layers[i](x, step, cos, sin)
        x = seen[-1] = self.norm(x)
        return x, torch.cat([seen[i] for i in taps], -1) if taps else x[:, :0]


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
