"""Every field of a config.json changed in turn, by the type of its value."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

ABSENT = object()
HEAVY = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
# Words that stand for a choice, and others to choose.
WORDS = {
    "silu": ("gelu_pytorch_tanh", "gelu", "relu"),
    "gelu": ("silu",),
    "gelu_pytorch_tanh": ("gelu", "silu", "relu"),
    "full_attention": ("sliding_attention",),
    "sliding_attention": ("full_attention",),
}
# What a field that is null, or that only some configs have, may hold. Models read these by getattr too.
NULLS: dict[str, tuple[Any, ...]] = {
    "head_dim": (24, 8),
    "sliding_window": (21,),
    "attn_logit_softcapping": (1.5,),
    "final_logit_softcapping": (1.5,),
    "partial_rotary_factor": (0.5,),
    "rope_scaling": ({"rope_type": "linear", "factor": 3.0}, {"type": "linear", "factor": 3.0}),
    "rope_theta": (77.0,),
    "attention_bias": (True,),
    "mlp_bias": (True,),
    "use_sliding_window": (True,),
    "hidden_activation": ("relu", "gelu"),
    "hidden_act": ("relu", "gelu"),
    "is_causal": (False,),
    "quantization_config": (),
}
ROPES: tuple[dict[str, Any], ...] = ({"rope_type": "linear", "factor": 3.0}, {"rope_type": "proportional"})


@dataclass(frozen=True)
class Change:
    """A config.json with one field changed. `named`: the words of which a refusal must hold one."""

    field: str
    value: Any
    config: dict[str, Any]

    @property
    def named(self) -> tuple[str, ...]:
        leaf = self.field.rpartition(".")[2]
        values = self.value if isinstance(self.value, (list, tuple)) else [self.value]
        return (leaf, *(value for value in values if isinstance(value, str)))


def changes(config: Mapping[str, Any]) -> Iterator[list[Change]]:
    """For each field lists of changes, to be tried until one moves what transformers computes. Being missing is one."""
    for path, value in _leaves(config):
        base: Mapping[str, Any] = config
        if path == "num_hidden_layers":  # with another number of layers, lists of what each layer is can't stand
            base = {key: v for key, v in config.items() if not (isinstance(v, list) and len(v) == value)}
        tries = [Change(path, v, _with(base, path, v)) for v in values_for(path.rpartition(".")[2], value)]
        yield from ([change] for change in tries) if isinstance(value, str) else [tries]  # each word is its own matter
        if path not in HEAVY:
            yield [Change(path, ABSENT, _with(config, path, ABSENT))]
    for name, values in NULLS.items():
        if name not in config:
            yield [Change(name, v, _with(config, name, v)) for v in values]


def values_for(name: str, value: Any) -> list[Any]:
    """Other values of one field."""
    if name == "rope_type":
        return []  # a kind comes with its parameters: see _leaves
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [v for v in dict.fromkeys((2 * value, value // 2, value + 1, value - 1)) if v > 0 and v != value]
    if isinstance(value, float):
        return [1.5 * value, 0.5 * value, 1e4 * value] if value else [0.3]
    if isinstance(value, str):
        return list(WORDS.get(value, ()))
    if isinstance(value, list) and value:
        turned = [value[1:] + value[:1], value[::-1]]
        first = values_for(name, bool(value[0]) if value[0] in (0, 1) else value[0])
        changed = [[type(value[0])(v), *value[1:]] for v in first]
        return [v for v in [*turned, *changed] if v != value]
    return list(NULLS.get(name, (True, 3, 0.7)))


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _with(config: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(dict(config))
    *above, leaf = path.split(".")
    table = made
    for key in above:
        table = table[key]
    if value is ABSENT:
        del table[leaf]
    else:
        table[leaf] = value
    return made


def rope_kinds(config: Mapping[str, Any]) -> Iterator[Change]:
    """Another kind of RoPE in each table that has one."""
    for path, _ in _leaves(config):
        if path.endswith(".rope_type"):
            table = path.removesuffix(".rope_type")
            old: Any = config
            for key in table.split("."):
                old = old[key]
            for kind in ROPES:
                yield Change(path, kind["rope_type"], _with(config, table, {**old, **kind}))
