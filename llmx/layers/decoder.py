"""The decoder that most open models are: embed, layers of attention and MLP, norm, head. What differs is its Shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from llmx.batch import Batch
from llmx.cache.pools import Cache
from llmx.kernels import Kernels
from llmx.layers.attention import Attention, Forward
from llmx.layers.mlp import GatedMLP
from llmx.layers.norm import RMSNorm
from llmx.layers.rope import Rope
from llmx.layers.shape import Shape
from llmx.layers.weights import Part, Weights
from llmx.parallel.group import Alone, Group

SEPARATE = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}


class Block:
    """One decoder layer."""

    def __init__(self, shape: Shape, index: int, weights: Weights, kernels: Kernels, group: Group) -> None:
        self.shape, self.index = shape, index
        name = f"model.layers.{index}"
        sandwich, post = shape.placement == "sandwich", shape.placement == "post"
        self.before_attention = None if post else self._norm("input_layernorm", weights, kernels)
        self.before_mlp = None
        if not post:
            part = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
            self.before_mlp = self._norm(part, weights, kernels)
        self.after_attention = self._norm("post_attention_layernorm", weights, kernels) if sandwich or post else None
        self.after_mlp = self._norm("post_feedforward_layernorm", weights, kernels) if sandwich or post else None
        self.attention = _attention(shape, index, weights, kernels, group)
        parts = [Part(f"{name}.{p}", shape.inner) for p in SEPARATE["gate_up"]]
        if shape.fused:
            stored = (f"{name}.mlp.gate_up_proj", 2 * shape.inner)
            parts = [Part(stored[0], shape.inner, first=i * shape.inner, total=stored[1]) for i in range(2)]
        gate_up = weights.column(parts, shape.hidden)
        down = weights.row(f"{name}.mlp.down_proj", shape.hidden, shape.inner)
        self.mlp = GatedMLP(gate_up, down, shape.activation, kernels, group)
        self._add_scaled = kernels.get("add_scaled")

    def __call__(self, x: Tensor, step: Forward) -> Tensor:
        """(rows, hidden) -> (rows, hidden)"""
        added = self.attention(x if self.before_attention is None else self.before_attention(x), step)
        if self.after_attention is not None:
            added = self.after_attention(added)
        if self.before_mlp is None:
            x = self._add(added, x)
            added = self.mlp(x)
        else:
            normed, x = self.before_mlp.add(self._scaled(added), x)
            added = self.mlp(normed)
        if self.after_mlp is not None:
            added = self.after_mlp(added)
        return self._add(added, x)

    def _scaled(self, added: Tensor) -> Tensor:
        scale = self.shape.residual_scale
        scaled: Tensor = added if scale == 1.0 else self._add_scaled(added, scale, None)
        return scaled

    def _add(self, added: Tensor, x: Tensor) -> Tensor:
        total: Tensor = self._add_scaled(added, self.shape.residual_scale, x)
        return total

    def _norm(self, part: str, weights: Weights, kernels: Kernels) -> RMSNorm:
        weight = weights.vector(f"model.layers.{self.index}.{part}", self.shape.hidden)
        return norm_of(self.shape, weight, kernels)


def norm_of(shape: Shape, weight: Tensor, kernels: Kernels) -> RMSNorm:
    return RMSNorm(weight + 1 if shape.unit_offset else weight, shape.eps, kernels)


def _attention(shape: Shape, index: int, weights: Weights, kernels: Kernels, group: Group) -> Attention:
    name, dim = f"model.layers.{index}", shape.head_dim
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    parts = [Part(f"{name}.{p}", n * dim, n) for p, n in zip(SEPARATE["qkv"], heads, strict=True)]
    if shape.fused:
        starts = (0, shape.heads * dim, (shape.heads + shape.kv_heads) * dim)
        stored = f"{name}.self_attn.qkv_proj"
        parts = [Part(stored, n * dim, n, first, sum(heads) * dim) for n, first in zip(heads, starts, strict=True)]
    qkv = weights.column(parts, shape.hidden)
    out = weights.row(f"{name}.self_attn.o_proj", shape.hidden, shape.heads * dim, shape.heads)
    norms = None
    if shape.qk_norm:
        widths = (dim, dim) if shape.qk_norm == "head" else (shape.heads * dim, shape.kv_heads * dim)
        named = zip(("q_norm", "k_norm"), widths, strict=True)
        vectors = [weights.vector(f"{name}.self_attn.{part}", width) for part, width in named]
        norms = (norm_of(shape, vectors[0], kernels), norm_of(shape, vectors[1], kernels))
    return Attention(
        qkv,
        out,
        index=index,
        heads=shape.heads // group.size,
        scale=dim**-0.5 if shape.scale is None else shape.scale,
        cap=shape.attention_cap,
        rope=shape.rope_of(index),
        norms=norms,
        kernels=kernels,
        group=group,
    )


class Decoder:
    """embed / layers[a:b] / norm / head. `length`: the served context, which the rotary tables cover.

    In a tensor-parallel `group` this is one rank's share; what goes in and comes out is whole on every rank.
    """

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        kernels: Kernels,
        *,
        length: int,
        device: torch.device,
        group: Group | None = None,
    ) -> None:
        self.config, self.kernels, self.group = shape, kernels, group or Alone()
        self.specs = shape.specs(self.group.size)
        self.embedding = weights.embedding("model.embed_tokens", shape.vocab, shape.hidden)
        # the factor is rounded to the model's dtype
        self._embedding_scale = torch.tensor(shape.embedding_scale, dtype=self.embedding.dtype).item()
        self._add_scaled, self._join = kernels.get("add_scaled"), kernels.get("join_columns")
        self._widen = kernels.get("to_float32")
        rules = {rule for i in range(shape.layers) if (rule := shape.rope_of(i)) is not None}
        self.ropes = {rule: Rope(rule, length, device, kernels) for rule in rules}
        self.layers = [Block(shape, i, weights, kernels, self.group) for i in range(shape.layers)]
        self.final = norm_of(shape, weights.vector("model.norm", shape.hidden), kernels)
        self.output = weights.head(
            "lm_head", shape.vocab, shape.hidden, tied_to="model.embed_tokens" if shape.tied else None
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """(rows,) -> (rows, hidden)"""
        x = self.group.sum(self.embedding(tokens))
        return x if self._embedding_scale == 1.0 else self._add_scaled(x, self._embedding_scale, None)

    def step(self, batch: Batch, cache: Cache, plans: dict[int, Any] | None = None) -> Forward:
        """What the layers share in one pass. `plans` as in `forward`."""
        turns = {rule: rope.at(batch.positions) for rule, rope in self.ropes.items()}
        return Forward(batch, cache, turns) if plans is None else Forward(batch, cache, turns, plans, lasting=True)

    def norm(self, x: Tensor) -> Tensor:
        """(rows, hidden) -> (rows, hidden)"""
        return self.final(x)

    def head(self, x: Tensor) -> Tensor:
        """(rows, hidden) after the norm -> (rows, vocab) logits, f32"""
        logits: Tensor = self._widen(self.group.gather(self.output(x))[:, : self.config.vocab])
        if self.config.logit_scale != 1.0:
            logits = self._add_scaled(logits, self.config.logit_scale, None)
        if self.config.logit_cap:
            logits = torch.tanh(logits / self.config.logit_cap) * self.config.logit_cap
        return logits

    def forward(
        self,
        batch: Batch,
        cache: Cache,
        *,
        taps: tuple[int, ...] = (),
        layers: Iterable[int] | None = None,
        plans: dict[int, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Hidden after the norm (T, hidden), and taps (T, len(taps) * hidden): i is layer i's input, -1 the hidden.

        plans: gets the attention plans of this pass by KV group, made so that they can be refilled for another batch
        of the same shape.
        """
        step, seen = self.step(batch, cache, plans), {}
        x = self.embed(batch.tokens)
        for i in range(len(self.layers)) if layers is None else layers:
            seen[i] = x
            x = self.layers[i](x, step)
        x = seen[-1] = self.norm(x)
        return x, self._join([seen[i] for i in taps]) if taps else x[:, :0]
