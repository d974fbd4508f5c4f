"""Stored tensors of two checkpoints, as the model's layers get them: which differ, and where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmx.errors import UsageError
from llmx.kernels import Kernels
from llmx.layers.weights import Part
from llmx.loading import CheckpointWeights, Shard
from llmx.models import Opened

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Differs:
    """a, b: the tensor's names in the two checkpoints. relative: |b - a| / |a|. count of `of` elements differ.

    at: the element with the largest difference, whose values are `was` and `now`. why: where they can't be compared.
    """

    name: str
    a: str
    b: str
    relative: float = 0.0
    count: int = 0
    of: int = 0
    at: tuple[int, ...] = ()
    was: float = 0.0
    now: float = 0.0
    why: str = ""


class _Asked:
    """A Weights that only writes down what a model asks for, as calls on another."""

    parameters = bytes = 0

    def __init__(self) -> None:
        self.calls: list[tuple[str, Callable[[Any], Tensor]]] = []

    def column(self, parts: Sequence[Part], n_in: int) -> Any:
        for part in parts:
            name = part.name if part.total is None else f"{part.name}[{part.first}:{part.first + part.n_out}]"
            self.calls.append((name, lambda w, part=part: _weight(w.column([part], n_in))))  # type: ignore[misc]
        return None

    def row(self, name: str, n_out: int, n_in: int, heads: int | None = None) -> Any:
        self.calls.append((name, lambda w: _weight(w.row(name, n_out, n_in, heads))))

    def embedding(self, name: str, vocab: int, hidden: int) -> Any:
        ids = torch.arange(vocab)
        self.calls.append((name, lambda w: w.embedding(name, vocab, hidden)(ids)))
        return torch.zeros(0)  # the model looks at its dtype

    def head(self, name: str, vocab: int, hidden: int, tied_to: str | None) -> Any:
        if tied_to is None:
            self.calls.append((name, lambda w: _weight(w.head(name, vocab, hidden, None))))

    def vector(self, name: str, n: int) -> Tensor:
        self.calls.append((name, lambda w: w.vector(name, n)))
        return torch.zeros(n)


def _weight(linear: Any) -> Tensor:
    """(n_out, n_in + 1): the weights as they are computed with, and the bias."""
    pieces = []
    for segment in linear.segments:
        weight = segment.tensors["weight"]
        bias = weight.new_zeros(len(weight)) if segment.bias is None else segment.bias
        pieces.append(torch.cat([weight, bias[:, None]], 1))
    return torch.cat(pieces)


def calls_of(opened: Opened) -> dict[str, Callable[[Any], Tensor]]:
    asked = _Asked()
    opened.family.Model(opened.config, asked, Kernels("cpu", "reference"), length=2, device=CPU)
    return dict(asked.calls)


def compared(a: Opened, b: Opened) -> Iterator[Differs]:
    """Each tensor that differs, in the model's order, one pair in memory at a time. Rows that GGUF permutes are put
    back, and schemes unpacked, so what is compared is what the layers compute with."""
    left, right = calls_of(a), calls_of(b)
    for name in dict.fromkeys((*left, *right)):
        stored = (_stored(a, name), _stored(b, name))
        if name not in left or name not in right:
            yield Differs(name, *stored, why=f"only {'A' if name in left else 'B'} has it")
            continue
        try:
            x, y = left[name](_reader(a)), right[name](_reader(b))
        except UsageError as error:
            yield Differs(name, *stored, why=error.message)
            continue
        if x.shape != y.shape:
            rows = min(len(x), len(y))  # vocabularies may be padded differently
            if x.shape[1:] != y.shape[1:]:
                yield Differs(name, *stored, why=f"{tuple(x.shape)} against {tuple(y.shape)}")
                continue
            x, y = x[:rows], y[:rows]
        if not torch.equal(x, y):
            yield _measured(name, *stored, x, y)


def _measured(name: str, a: str, b: str, x: Tensor, y: Tensor) -> Differs:
    apart = (y - x).abs().nan_to_num(nan=torch.inf)
    place = int(apart.argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), x.shape))
    relative = float((y - x).double().norm() / x.double().norm().clamp(min=1e-30))
    return Differs(
        name, a, b, relative, int((x != y).sum()), x.numel(), at, float(x.flatten()[place]), float(y.flatten()[place])
    )


def _reader(opened: Opened) -> CheckpointWeights:
    """Unpacks to float32 with the reference: kernels may keep weights in forms of their own."""
    kernels = Kernels("cpu", "reference")
    return CheckpointWeights(opened.checkpoint, opened.names, Shard(), torch.float32, CPU, kernels)


def _stored(opened: Opened, name: str) -> str:
    plain, bracket, rest = name.partition("[")
    try:
        return opened.names.stored(plain, "weight") + bracket + rest
    except KeyError:
        return name
