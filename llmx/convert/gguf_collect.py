"""Importance collected in llmx's own engine: how large each input of each linear is while the model reads texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llmx.cache.pools import windows_of
from llmx.convert.arrays import Numbers
from llmx.core import Request, SamplingParams
from llmx.engine.engine import Engine
from llmx.formats.hub import Located
from llmx.kernels import Kernels
from llmx.layers.linear import Linear
from llmx.layers.weights import Part
from llmx.loading import CheckpointWeights, Shard
from llmx.models import Names, open_model
from llmx.scheduler import Limits

Say = Callable[[str], None]
CPU = torch.device("cpu")
SIZE = 16  # positions of a cache block


class Watched(Linear):
    """A linear that adds up its inputs' squares. counts: rows that came in."""

    def __init__(self, inner: Linear) -> None:
        self.__dict__.update(inner.__dict__)
        self.total = torch.zeros(inner.n_in, dtype=torch.float64)
        self.count = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.total += x.float().square().sum(0, dtype=torch.float64)
        self.count += len(x)
        return super().__call__(x)


class WatchingWeights(CheckpointWeights):
    """watched: the linears inside layers, by the names of what they are made of."""

    watched: dict[str, Watched]

    def column(self, parts: Sequence[Part], n_in: int) -> Linear:
        return self._watch(super().column(parts, n_in), [part.name for part in parts])

    def row(self, name: str, n_out: int, n_in: int, heads: int | None = None) -> Linear:
        return self._watch(super().row(name, n_out, n_in, heads), [name])

    def _watch(self, linear: Linear, names: Sequence[str]) -> Linear:
        made = Watched(linear)
        for name in names:
            self.watched[name] = made
        return made


def collect(located: Located, texts: Sequence[Sequence[int]], say: Say) -> dict[str, tuple[Tensor, int]]:
    """GGUF's tensor name -> (its inputs' squares added up (n_in,), rows), over all positions of the texts.

    As llama-imatrix does: of what is inside the layers, not of the head.
    """
    opened = open_model(located)
    longest = max(map(len, texts)) + 1
    kernels = Kernels("cpu")
    weights = WatchingWeights(opened.checkpoint, opened.names, Shard(), torch.float32, CPU, kernels)
    weights.watched = {}
    with torch.inference_mode():
        model = opened.family.Model(opened.config, weights, kernels, length=longest, device=CPU)
    blocks = 2 + -(-longest // SIZE)
    engine = Engine(
        model,
        limits=Limits(budget=1024, running=1, length=longest),
        blocks=[1 + blocks] * len(windows_of(model.config.specs())),
        size=SIZE,
        kv_dtype=torch.float32,
        device=CPU,
        prefix_caching=False,
        record=False,  # a replay passes no Watched again
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
    for index, text in enumerate(texts):
        if index % 8 == 0:
            say(f"reading text {index + 1} of {len(texts)} for the importance matrix")
        engine.run([Request(str(index), tuple(text), params)])
    names = Names(opened.family.GGUF, {})
    return {names.stored(name, "weight"): (made.total, made.count) for name, made in weights.watched.items()}


def as_importance(sums: dict[str, tuple[Tensor, int]]) -> dict[str, Numbers]:
    """The mean squares (1, n_in) float32, as an importance matrix that is read gives them."""
    return {name: (total / count).float().reshape(1, -1).numpy() for name, (total, count) in sums.items() if count}
