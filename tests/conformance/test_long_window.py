"""A prompt of 70,000 tokens through sliding windows of 4096: the naive logits, from a cache no larger than a window."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CPU, SIZE, TOLERANCE, distance
from torch import Tensor

from llmx.core import Request, SamplingParams
from llmx.engine.engine import Engine
from llmx.kernels import Kernels
from llmx.layers.rope import RopeConfig
from llmx.loading import RandomWeights
from llmx.models.llama import Config, Model
from llmx.scheduler import Limits

TOKENS, WINDOW, BUDGET, LAST = 70_000, 4096, 1024, 16
CONFIG = Config(
    vocab=48, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8, inner=16, max_position=TOKENS + 1, eps=1e-5,
    rope=RopeConfig(10_000.0, 8), windows=(WINDOW,),
)  # fmt: skip


def naive(model: Model, tokens: Tensor, window: int) -> Tensor:
    """(LAST, vocab) in f64, with full attention under a mask, 256 queries at a time; nothing of the engine.

    Only the last (layers - i) * window + LAST positions of layer i's output are computed: others can't be seen.
    """

    def weight(linear: object) -> Tensor:
        return torch.cat([s.tensors["weight"].double() for s in linear.segments])  # type: ignore[attr-defined]

    def norm(x: Tensor, by: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + CONFIG.eps).sqrt() * by.double()

    half = CONFIG.head_dim // 2
    rates = 10_000.0 ** (-torch.arange(half).double() / half)

    def turn(x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[:, None].double() * rates
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    positions = torch.arange(max(0, len(tokens) - CONFIG.layers * window - LAST), len(tokens))
    x = model.embedding(tokens[positions]).double()
    for i, layer in enumerate(model.layers):
        fused = norm(x, layer.before_attention.weight) @ weight(layer.attention.qkv).T
        q, k, v = fused.unflatten(-1, (-1, CONFIG.head_dim)).split([CONFIG.heads, 1, 1], 1)
        q, k, v = turn(q, positions), turn(k, positions)[:, 0], v[:, 0]
        kept = len(positions) - min(len(positions), (CONFIG.layers - 1 - i) * window + LAST)
        mixed = []
        for start in range(kept, len(positions), 256):
            rows = slice(start, start + 256)
            gap = positions[rows, None] - positions
            scores = torch.einsum("qhd,kd->hqk", q[rows], k) / CONFIG.head_dim**0.5
            seen = scores.masked_fill((gap < 0) | (gap >= window), -torch.inf).softmax(-1)
            mixed.append(torch.einsum("hqk,kd->qhd", seen, v).flatten(1))
        positions, x = positions[kept:], x[kept:] + torch.cat(mixed) @ weight(layer.attention.out).T
        gate, up = (norm(x, layer.before_mlp.weight) @ weight(layer.mlp.gate_up).T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ weight(layer.mlp.down).T
    return norm(x, model.final.weight) @ weight(model.output).T


@pytest.mark.slow
@torch.inference_mode()
def test_a_prompt_of_70_000_tokens_in_a_cache_of_one_window() -> None:
    torch.set_num_threads(1)

    def made(kernels: Kernels) -> Model:
        weights = RandomWeights(1, torch.float32, CPU, kernels, std=0.5)
        return Model(CONFIG, weights, kernels, length=TOKENS + 1, device=CPU)

    model, plain = made(Kernels("cpu")), made(Kernels("cpu", forced="reference"))
    tokens = torch.randint(CONFIG.vocab, (TOKENS,))
    bound = -(-(WINDOW + BUDGET) // SIZE) + 1
    engine = Engine(
        model,
        limits=Limits(budget=BUDGET, running=1, length=TOKENS + 1),
        blocks=[TOKENS // SIZE + 2],  # enough for all of it: that so few are held is the window's doing
        size=SIZE,
        kv_dtype=torch.float32,
        device=CPU,
        poison=True,
    )
    (sequence,) = engine.scheduler.add(
        Request("long", tuple(tokens.tolist()), SamplingParams(temperature=0, max_tokens=1, seed=0))
    )
    held, last = [], torch.empty(0)
    while sequence.finish is None:
        launched = engine.launch()
        assert launched is not None
        held.append(engine.scheduler.blocks.pools[0].held)
        last = launched.hidden[-LAST:]
        engine.land(engine.decide(launched))
    assert len(held) == -(-TOKENS // BUDGET)
    assert max(held) <= bound
    wanted = naive(plain, tokens, WINDOW)
    assert wanted.std() > 1
    assert distance(naive(plain, tokens, WINDOW - 1), wanted) > 10 * TOLERANCE, "the window's edge shows"
    assert distance(model.head(last), wanted) < TOLERANCE
