"""SmolLM3: Llama's shape, with every fourth layer knowing no positions (NoPE)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llmx.errors import UsageError
from llmx.formats.fields import Fields
from llmx.formats.gguf import Gguf
from llmx.layers import shape
from llmx.layers.decoder import Decoder
from llmx.layers.gguf_form import GgufForm, form_of, in_pattern, without_windows
from llmx.layers.rope import rope_from_gguf, rope_from_hf
from llmx.layers.rope_written import rope_to_hf
from llmx.layers.shape import Shape

Model = Decoder
ARCHITECTURES = ("SmolLM3ForCausalLM",)
GGUF_ARCHITECTURES = ("smollm3",)
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
GGUF = shape.GGUF_NAMES | shape.PRE_NORMS
GGUF_PERMUTED = {"q_proj": "heads", "k_proj": "kv_heads"}
SMOOTH = shape.SMOOTH
INTERVAL = 4


@dataclass(frozen=True)
class Config(Shape):
    """How SmolLM3's Shape is read."""

    @classmethod
    def from_hf(cls, fields: Fields) -> Config:
        """`no_rope_layers` holds a 1 for each layer that turns (the name says the opposite); else 3 of 4 do."""
        sizes = shape.sizes_from_hf(fields, position=32768, tied=True)
        layers = range(sizes["layers"])
        interval = fields.integer("no_rope_layer_interval", INTERVAL, low=1)
        turns = fields.integers("no_rope_layers", tuple(int((i + 1) % interval != 0) for i in layers))
        if len(turns) != sizes["layers"]:
            raise UsageError(
                f"{fields.where}: no_rope_layers names {len(turns)} layers, num_hidden_layers is {sizes['layers']}."
            )
        window = None
        if fields.boolean("use_sliding_window", False):
            window = fields.integer("sliding_window", None, low=1)
        named = tuple("sliding_attention" if window and not turn else "full_attention" for turn in turns)
        if window is None:  # layer_types may name windows all the same: they don't count
            windows: tuple[int | None, ...] = (None,)
        else:
            windows = shape.windows_from_hf(fields, sizes["layers"], window, named)
        rope = rope_from_hf(fields, sizes["head_dim"], sizes["max_position"], theta=2_000_000.0)
        return cls(**sizes, ropes=tuple(rope if turn else None for turn in turns), windows=windows)

    @classmethod
    def from_gguf(cls, fields: Fields, checkpoint: Gguf) -> Config:
        sizes = shape.sizes_from_gguf(fields, checkpoint, "smollm3")
        rope = rope_from_gguf(fields, checkpoint, "smollm3", sizes["head_dim"])
        return cls(**sizes, ropes=tuple(rope if (i + 1) % INTERVAL else None for i in range(sizes["layers"])))

    def to_hf(self, biases: frozenset[str]) -> dict[str, Any]:
        turns = [self.rope_of(i) is not None for i in range(self.layers)]
        rope = next(rope for rope in self.ropes if rope is not None)
        written: dict[str, Any] = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
        written |= shape.sizes_to_hf(self) | rope_to_hf(rope, self.max_position)
        written |= {"no_rope_layers": [int(turn) for turn in turns], "no_rope_layer_interval": INTERVAL}
        written |= {"use_sliding_window": False, "sliding_window": None}
        return written | shape.biases_to_hf(biases, attention=True, mlp=True)

    def to_gguf(self) -> GgufForm:
        without_windows(self, "smollm3")
        in_pattern([rope is not None for rope in self.ropes], INTERVAL, "know no positions")
        return form_of(self, "smollm3", rope=next(rope for rope in self.ropes if rope is not None))


TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "rope_theta": 500.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QUIRKS = {
    "layers without positions": lambda config: replace(config, ropes=config.ropes[:1]),
    "which layers": lambda config: replace(config, ropes=config.ropes[1:] + config.ropes[:1]),
}
