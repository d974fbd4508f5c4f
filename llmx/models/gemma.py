"""Gemma 2 and 3 (text): norms around each half, embeddings scaled by the root of their width, windows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llmx.errors import UsageError
from llmx.formats.fields import Fields
from llmx.formats.gguf import Gguf
from llmx.layers import shape
from llmx.layers.decoder import Decoder
from llmx.layers.gguf_form import GgufForm, form_of, in_pattern
from llmx.layers.rope import RopeConfig, rope_from_gguf, rope_from_hf
from llmx.layers.rope_written import rope_to_hf, short
from llmx.layers.shape import Shape

Model = Decoder
ARCHITECTURES = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
GGUF_ARCHITECTURES = ("gemma2", "gemma3")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
GGUF = (
    shape.GGUF_NAMES
    | shape.QK_NORMS
    | {
        "model.layers.{i}.input_layernorm": "blk.{i}.attn_norm",
        "model.layers.{i}.post_attention_layernorm": "blk.{i}.post_attention_norm",
        "model.layers.{i}.pre_feedforward_layernorm": "blk.{i}.ffn_norm",
        "model.layers.{i}.post_feedforward_layernorm": "blk.{i}.post_ffw_norm",
    }
)
GGUF_PERMUTED: dict[str, str] = {}
SMOOTH = {
    "input_layernorm": ("q_proj", "k_proj", "v_proj"),
    "v_proj": ("o_proj",),
    "pre_feedforward_layernorm": ("gate_proj", "up_proj"),
    "up_proj": ("down_proj",),
}
LOCAL_BASE = 10_000.0  # Gemma 3: of the layers with a window
# GGUF does not store what the scores are divided by: it follows from the number of layers, as llama.cpp has it.
BY_HIDDEN = {"gemma2": 46, "gemma3": 62}  # the 27B models: by the root of hidden / heads, others by that of head_dim


@dataclass(frozen=True)
class Config(Shape):
    """How Gemma's Shape is read."""

    @classmethod
    def from_hf(cls, fields: Fields) -> Config:
        """From Gemma2Config or Gemma3TextConfig."""
        third = "Gemma3ForCausalLM" in fields.strings("architectures")
        if fields.boolean("use_bidirectional_attention", False):
            raise UsageError(
                f"{fields.where}: use_bidirectional_attention is not built; this version runs causal models."
            )
        sizes = shape.sizes_from_hf(
            fields, position=131072 if third else 8192, tied=True, activation="hidden_activation"
        )
        if "hidden_activation" not in fields:
            sizes["activation"] = "gelu_tanh"
        if "head_dim" not in fields:
            sizes["head_dim"] = 256
        window = fields.integer("sliding_window", 4096, low=1)
        every = fields.integer("sliding_window_pattern", 6, low=1) if third else 2
        layers = range(sizes["layers"])
        named = tuple("sliding_attention" if (i + 1) % every else "full_attention" for i in layers)
        windows = shape.windows_from_hf(fields, sizes["layers"], window, named)
        return cls(
            **sizes,
            **_family(sizes["hidden"], third),
            windows=windows,
            ropes=_ropes_from_hf(fields, sizes["head_dim"], sizes["max_position"], windows, third),
            unit_offset=True,
            scale=fields.number("query_pre_attn_scalar", 256.0, low=1) ** -0.5,
            # Gemma 3's config has the key, its attention no cap
            attention_cap=0.0 if third else _cap(fields, "attn_logit_softcapping", 50.0),
            logit_cap=_cap(fields, "final_logit_softcapping", None if third else 30.0),
        )

    @classmethod
    def from_gguf(cls, fields: Fields, checkpoint: Gguf) -> Config:
        """Norm weights are stored with the 1 added."""
        architecture = fields.text("general.architecture")
        third = architecture == "gemma3"
        sizes = shape.sizes_from_gguf(fields, checkpoint, architecture)
        window = fields.integer(f"{architecture}.attention.sliding_window", None if third else 4096, low=1)
        every = fields.integer(f"{architecture}.attention.sliding_window_pattern", 6 if third else 2, low=1)
        windows = tuple(window if (i + 1) % every else None for i in range(sizes["layers"]))
        rope = rope_from_gguf(fields, checkpoint, architecture, sizes["head_dim"], 1_000_000.0 if third else LOCAL_BASE)
        local = fields.number(f"{architecture}.rope.freq_base_swa", LOCAL_BASE, low=1)
        ropes: tuple[RopeConfig, ...] = (rope,)
        if third:
            ropes = tuple(RopeConfig(local, rope.rotated) if w else rope for w in windows)
        width = sizes["head_dim"]
        if sizes["layers"] == BY_HIDDEN[architecture]:
            width = sizes["hidden"] // sizes["heads"]
        return cls(
            **sizes,
            **_family(sizes["hidden"], third),
            windows=windows,
            ropes=ropes,
            activation="gelu_tanh",
            scale=width**-0.5,
            attention_cap=fields.number(f"{architecture}.attn_logit_softcapping", 0.0 if third else 50.0, low=0),
            logit_cap=fields.number(f"{architecture}.final_logit_softcapping", 0.0 if third else 30.0, low=0),
        )

    def to_hf(self, biases: frozenset[str]) -> dict[str, Any]:
        """Norm weights are to be written less 1. The layers with windows keep their base, the others' may be scaled."""
        third = self.qk_norm == "head"
        named = ("Gemma3ForCausalLM", "gemma3_text") if third else ("Gemma2ForCausalLM", "gemma2")
        whole = next(rope for i in range(self.layers) if (rope := self.rope_of(i)) and not self._window(i))
        written: dict[str, Any] = {"architectures": [named[0]], "model_type": named[1]}
        written |= shape.sizes_to_hf(self, activation="hidden_activation") | rope_to_hf(whole, self.max_position)
        if third:
            local = next((rope for i in range(self.layers) if (rope := self.rope_of(i)) and self._window(i)), None)
            written["rope_local_base_freq"] = short(local.theta) if local else LOCAL_BASE
        assert self.scale is not None
        kinds = ["sliding_attention" if self._window(i) else "full_attention" for i in range(self.layers)]
        return written | {
            "query_pre_attn_scalar": round(self.scale**-2), "layer_types": kinds,
            "sliding_window": next((window for window in self.windows if window), None),
            "attn_logit_softcapping": self.attention_cap or None, "final_logit_softcapping": self.logit_cap or None,
        } | shape.biases_to_hf(biases, attention=True)  # fmt: skip

    def _window(self, layer: int) -> int | None:
        return self.windows[layer % len(self.windows)]

    def to_gguf(self) -> GgufForm:
        """UsageError where the layers' order or the scores' scale is not what readers take it to be."""
        third = self.qk_norm == "head"
        architecture = "gemma3" if third else "gemma2"
        in_pattern([window is not None for window in self.windows], 6 if third else 2, "have windows")
        width = self.hidden // self.heads if self.layers == BY_HIDDEN[architecture] else self.head_dim
        if self.scale is None or abs(self.scale * width**0.5 - 1) > 1e-6:
            raise UsageError(f"GGUF files of {architecture} scale scores by 1 / √{width}; this model has {self.scale}.")
        if not third and not (self.attention_cap and self.logit_cap):
            raise UsageError("GGUF files of gemma2 cap scores and logits; this model leaves one of them as it is.")
        window = next(window for window in self.windows if window is not None)
        more: dict[str, Any] = {"attention.sliding_window": window}
        if self.attention_cap:
            more["attn_logit_softcapping"] = float(self.attention_cap)
        if self.logit_cap:
            more["final_logit_softcapping"] = float(self.logit_cap)
        turned = zip(self.ropes * self.layers, self.windows, strict=False)
        whole = next((rope for rope, kept in turned if kept is None), self.ropes[-1])
        if third and self.ropes[0] is not None:
            more["rope.freq_base_swa"] = float(self.ropes[0].theta)
        return form_of(self, architecture, rope=whole, activation="gelu_tanh", more=more, norms=1.0)


def _family(hidden: int, third: bool) -> dict[str, Any]:
    return {"placement": "sandwich", "qk_norm": "head" if third else "", "embedding_scale": hidden**0.5}


def _cap(fields: Fields, key: str, default: float | None) -> float:
    """A soft-cap that is null is none; one that is left out is the family's."""
    given = fields.number(key, None, low=0) if key in fields.data else default
    return given or 0.0


def _ropes_from_hf(
    fields: Fields, head_dim: int, position: int, windows: tuple[int | None, ...], third: bool
) -> tuple[RopeConfig | None, ...]:
    """Gemma 3 turns layers with a window by a base of their own, and scales only the others."""
    if not third:
        return (rope_from_hf(fields, head_dim, position),)
    parameters = fields.section("rope_parameters", None)
    if parameters is not None and "sliding_attention" in parameters:
        if "rope_scaling" in fields:
            raise UsageError(f"{fields.where}: rope_scaling and rope_parameters are both given; Gemma 3 takes one.")
        local = rope_from_hf(fields, head_dim, position, theta=LOCAL_BASE, layer_type="sliding_attention")
        whole = rope_from_hf(fields, head_dim, position, theta=1_000_000.0, layer_type="full_attention")
    else:
        local = RopeConfig(fields.number("rope_local_base_freq", LOCAL_BASE, low=1), head_dim)
        whole = rope_from_hf(fields, head_dim, position, theta=1_000_000.0)
    return tuple(local if window else whole for window in windows)


_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "sliding_window": 33,
}
TINY = (
    ("Gemma2ForCausalLM", _SIZES | {"query_pre_attn_scalar": 24, "rope_theta": 500.0}),
    ("Gemma3ForCausalLM", _SIZES | {"query_pre_attn_scalar": 24, "num_hidden_layers": 7}),
)
QUIRKS = {
    "attention soft-cap": lambda config: replace(config, attention_cap=0.0),
    "final soft-cap": lambda config: replace(config, logit_cap=0.0),
    "norms around each half": lambda config: replace(config, placement="pre"),
    "1 + weight": lambda config: replace(config, unit_offset=not config.unit_offset),
    "embedding scale": lambda config: replace(config, embedding_scale=1.0),
    "score scale": lambda config: replace(config, scale=config.hidden**-0.5),
    "activation": lambda config: replace(config, activation="silu"),
    "window edge": lambda config: replace(config, windows=tuple(w and w + 1 for w in config.windows)),
    "which layers have windows": lambda config: replace(config, windows=config.windows[1:] + config.windows[:1]),
    "QK norm": lambda config: replace(config, qk_norm=""),
    "one base for all": lambda config: replace(config, ropes=config.ropes[:1]),
}
