"""What differs between the decoders that `decoder` builds, and how its common part is read from HF configs and GGUF."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmx.cache.pools import LayerSpec
from llmx.errors import UsageError
from llmx.formats.fields import Fields
from llmx.formats.gguf import Gguf
from llmx.layers.rope import RopeConfig
from llmx.layers.rope_written import short

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
HF_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
WRITTEN_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
MLP = frozenset({"gate_proj", "up_proj", "down_proj"})
# GGUF's names for what every family here has; a family adds its own.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.{i}.self_attn.q_proj": "blk.{i}.attn_q",
    "model.layers.{i}.self_attn.k_proj": "blk.{i}.attn_k",
    "model.layers.{i}.self_attn.v_proj": "blk.{i}.attn_v",
    "model.layers.{i}.self_attn.o_proj": "blk.{i}.attn_output",
    "model.layers.{i}.mlp.gate_proj": "blk.{i}.ffn_gate",
    "model.layers.{i}.mlp.up_proj": "blk.{i}.ffn_up",
    "model.layers.{i}.mlp.down_proj": "blk.{i}.ffn_down",
}
PRE_NORMS = {
    "model.layers.{i}.input_layernorm": "blk.{i}.attn_norm",
    "model.layers.{i}.post_attention_layernorm": "blk.{i}.ffn_norm",
}
QK_NORMS = {
    "model.layers.{i}.self_attn.q_norm": "blk.{i}.attn_q_norm",
    "model.layers.{i}.self_attn.k_norm": "blk.{i}.attn_k_norm",
}
# Groups of linears that share an input, behind what scales it: AWQ folds its scales there.
SMOOTH = {
    "input_layernorm": ("q_proj", "k_proj", "v_proj"),
    "v_proj": ("o_proj",),
    "post_attention_layernorm": ("gate_proj", "up_proj"),
    "up_proj": ("down_proj",),
}


@dataclass(frozen=True)
class Shape:
    """Sizes and variations. Patterns (`windows`, `ropes`) are repeated over the layers.

    windows: how far each layer's attention looks back; None: over all of the text. ropes: the rule of each layer;
    None: no positions at all (NoPE). placement: "pre" norms (Llama), "sandwich" (Gemma: before and after each half) or
    "post" (OLMo-2: after each half only). qk_norm: "" none, "head" per head (Qwen3), "full" over the projection
    (OLMo-2). unit_offset: norms multiply by 1 + weight (Gemma). scale: of the attention scores; None: head_dim ** -0.5.
    attention_cap, logit_cap: tanh soft-caps; 0: none. *_scale: factors on the embeddings, on what a layer adds to the
    residual, and on the logits. fused: q, k and v, and gate and up, are stored as one tensor each (Phi-3).
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    max_position: int
    eps: float
    rope: RopeConfig | None = None
    tied: bool = False
    windows: tuple[int | None, ...] = (None,)
    ropes: tuple[RopeConfig | None, ...] = ()
    placement: str = "pre"
    qk_norm: str = ""
    unit_offset: bool = False
    activation: str = "silu"
    scale: float | None = None
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    fused: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise UsageError(f"{self.heads} attention heads can't share {self.kv_heads} key-value heads evenly.")
        if self.activation not in ACTIVATIONS:
            raise UsageError(f"The activation {self.activation!r} is not built; there are {', '.join(ACTIVATIONS)}.")
        assert self.placement in ("pre", "sandwich", "post")
        assert self.qk_norm in ("", "head", "full")

    def rope_of(self, layer: int) -> RopeConfig | None:
        return self.ropes[layer % len(self.ropes)] if self.ropes else self.rope

    def specs(self, ranks: int = 1) -> list[LayerSpec]:
        """The KV of each layer on one of `ranks`: its share of the heads, one at least."""
        windows = (self.windows[i % len(self.windows)] for i in range(self.layers))
        return [LayerSpec(max(1, self.kv_heads // ranks), self.head_dim, window) for window in windows]

    def check_ranks(self, ranks: int) -> None:
        """UsageError if heads can't be split evenly. All else can be cut anywhere."""
        fits = [n for n in range(1, self.heads + 1) if self.heads % n == 0 and self._kv_fits(n)]
        if self.heads % ranks:
            raise UsageError(
                f"{self.heads} attention heads can't be split over {ranks} ranks; {_either(fits)} would do."
            )
        if not self._kv_fits(ranks):
            raise UsageError(
                f"{self.kv_heads} key-value heads can't be split over {ranks} ranks; {_either(fits)} would do."
            )

    def _kv_fits(self, ranks: int) -> bool:
        return self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0


def _either(numbers: list[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def sizes_from_hf(
    fields: Fields, *, position: int = 2048, eps: float = 1e-6, tied: bool = False, activation: str = "hidden_act"
) -> dict[str, Any]:
    """The fields of Shape that every family's config.json names alike. Keywords: the family's defaults."""
    hidden, heads = fields.integer("hidden_size", low=1), fields.integer("num_attention_heads", low=1)
    named = fields.text(activation, "silu")
    if named not in HF_ACTIVATIONS:
        raise UsageError(
            f"{fields.where}: the activation {named[:40]!r} is not built; there are {', '.join(HF_ACTIVATIONS)}."
        )
    return {
        "vocab": fields.integer("vocab_size", low=1),
        "hidden": hidden,
        "layers": fields.integer("num_hidden_layers", low=1),
        "heads": heads,
        "kv_heads": fields.integer("num_key_value_heads", heads, low=1),
        "head_dim": fields.integer("head_dim", hidden // heads, low=2),
        "inner": fields.integer("intermediate_size", low=1),
        "max_position": fields.integer("max_position_embeddings", position, low=1),
        "eps": fields.number("rms_norm_eps", eps, low=0),
        "tied": fields.boolean("tie_word_embeddings", tied),
        "activation": HF_ACTIVATIONS[named],
    }


def sizes_to_hf(shape: Shape, *, activation: str = "hidden_act") -> dict[str, Any]:
    """config.json's keys for what `sizes_from_hf` reads."""
    return {
        "vocab_size": shape.vocab, "hidden_size": shape.hidden, "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "max_position_embeddings": shape.max_position, "rms_norm_eps": short(shape.eps),
        "tie_word_embeddings": shape.tied, activation: WRITTEN_ACTIVATIONS[shape.activation],
    }  # fmt: skip


def biases_to_hf(biases: frozenset[str], *, attention: bool = False, mlp: bool = False) -> dict[str, Any]:
    """attention_bias and mlp_bias, if the family's config has them; each means all linears of that half.

    biases: the last components of the names of linears that have one. UsageError for others than the family has.
    """
    written, left = {}, set(biases)
    for key, has, names in (("attention_bias", attention, ATTENTION), ("mlp_bias", mlp, MLP)):
        if has:
            written[key] = biases >= names
            left -= names if biases >= names else set()
    if left:
        raise UsageError(f"There are biases on {', '.join(sorted(left))} alone, which transformers' model hasn't.")
    return written


def windows_from_hf(
    fields: Fields, layers: int, window: int | None, pattern: tuple[str, ...]
) -> tuple[int | None, ...]:
    """Each layer's window, by config.json's layer_types or, where it has none, by the family's `pattern`."""
    kinds = fields.strings("layer_types", pattern)
    if len(kinds) != layers:
        raise UsageError(f"{fields.where}: layer_types names {len(kinds)} layers, num_hidden_layers is {layers}.")
    if unknown := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        raise UsageError(
            f"{fields.where}: the layer type {unknown[0][:40]!r} is not built; there are full_attention "
            "and sliding_attention."
        )
    if window is None and "sliding_attention" in kinds:
        raise UsageError(f"{fields.where}: layer_types has sliding_attention, but sliding_window is not given.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def sizes_from_gguf(fields: Fields, checkpoint: Gguf, architecture: str) -> dict[str, Any]:
    """The fields of Shape that GGUF names alike for every architecture; the vocabulary's size is the embedding's."""
    if "token_embd.weight" not in checkpoint:
        raise UsageError(f"{fields.where}: the tensor token_embd.weight is missing.")

    def at(key: str) -> str:
        return f"{architecture}.{key}"

    if experts := fields.integer(at("expert_count"), 0):
        raise UsageError(f"{fields.where}: {experts} experts; mixtures of experts are not built in this version.")
    hidden, heads = fields.integer(at("embedding_length"), low=1), fields.integer(at("attention.head_count"), low=1)
    return {
        "vocab": checkpoint.stored("token_embd.weight").shape[0],
        "hidden": hidden,
        "layers": fields.integer(at("block_count"), low=1),
        "heads": heads,
        "kv_heads": fields.integer(at("attention.head_count_kv"), heads, low=1),
        "head_dim": fields.integer(at("attention.key_length"), hidden // heads, low=2),
        "inner": fields.integer(at("feed_forward_length"), low=1),
        "max_position": fields.integer(at("context_length"), low=1),
        "eps": fields.number(at("attention.layer_norm_rms_epsilon"), low=0),
        "tied": "output.weight" not in checkpoint,
    }
