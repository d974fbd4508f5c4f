"""What each op of a model takes and gives: recorded in one model, and held against the record in another.

Nothing here is in the way of a model that is not probed: ops are wrapped where a built model keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmx.kernels.reference.rope import quantize
from llmx.layers.decoder import Block, Decoder

TINIEST = 1e-30  # a row of zeros is as wrong as it is large

Run = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Place:
    """An op in a model. layer: None before and after the layers. `op`: its name in the kernel table, if it has one.

    parts: names and widths of what lies side by side in its output, where one product serves several linears.
    """

    layer: int | None
    name: str
    op: str = ""
    parts: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return self.name if self.layer is None else f"layer {self.layer}: {self.name}"


@dataclass(frozen=True)
class Taken:
    """What an op took and gave, each (rows, ...), on the CPU."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Error:
    """How far an op is from the record: per token the largest relative error of what it took and of what it gave.

    part: of the output, the one with the largest error. A row's relative error is |b - a| / |a| (2-norms).
    """

    place: Place
    part: str
    inputs: Tensor
    outputs: Tensor

    def worst(self) -> float:
        return float(self.outputs.max()) if len(self.outputs) else 0.0

    def first_token(self, tolerance: float) -> int | None:
        beyond = (self.outputs > tolerance).nonzero()
        return int(beyond[0]) if len(beyond) else None


def row_errors(a: Tensor, b: Tensor) -> Tensor:
    """(rows,) f64. Where only one is finite the error is infinite; where neither is, they agree."""
    a, b = a.reshape(len(a), -1).double(), b.reshape(len(b), -1).double()
    finite = a.isfinite() & b.isfinite()
    differ = (a.isfinite() != b.isfinite()).any(1)
    size = a.where(finite, 0).norm(dim=1)
    found = (b - a).where(finite, 0).norm(dim=1) / size.clamp(min=TINIEST)
    errors: Tensor = found.where(~differ, torch.inf)
    return errors


class Recorder:
    """Keeps what every op takes and gives, in the order of the computation."""

    def __init__(self) -> None:
        self.taken: dict[Place, Taken] = {}

    def take(self, place: Place, inputs: tuple[Tensor, ...], run: Run) -> tuple[Tensor, ...]:
        given = run(*inputs)
        self.taken[place] = Taken(tuple(map(_kept, inputs)), tuple(map(_kept, given)))
        return given


class Follower:
    """Lets a model run and measures how far each op is from the record.

    forced: every op is given the record's inputs, and its outputs are replaced by the record's: so each error is the
    op's own, and nothing is inherited. Else errors grow along the way, as they do in use.
    """

    def __init__(self, record: Mapping[Place, Taken], forced: bool, tokens: int) -> None:
        self.forced, self.tokens = forced, tokens
        self.record = {(place.layer, place.name): (place, taken) for place, taken in record.items()}
        self.errors: list[Error] = []
        self.extra: list[Place] = []  # ops that the record has not

    def take(self, place: Place, inputs: tuple[Tensor, ...], run: Run) -> tuple[Tensor, ...]:
        known = self.record.get((place.layer, place.name))
        if known is None:
            self.extra.append(place)
            return run(*inputs)
        taken = known[1]
        given = run(*map(_like, taken.inputs, inputs)) if self.forced else run(*inputs)
        apart = torch.zeros(self.tokens)
        if not self.forced:
            each = [row_errors(a, _kept(b)) for a, b in zip(taken.inputs, inputs, strict=True)]
            apart = self._by_token(_largest(each))
        part, error = _compared(place, taken.outputs, tuple(map(_kept, given)))
        self.errors.append(Error(place, part, apart, self._by_token(error)))
        return tuple(map(_like, taken.outputs, given)) if self.forced else given

    def _by_token(self, errors: Tensor) -> Tensor:
        """Norms of heads have a row for each head; the head of the model sees the last tokens only."""
        if len(errors) < self.tokens:
            return torch.nn.functional.pad(errors, (self.tokens - len(errors), 0))
        return errors.view(self.tokens, -1).amax(1)


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu")


def _like(recorded: Tensor, own: Tensor) -> Tensor:
    """The recorded values, as this side holds them."""
    return recorded[..., : own.shape[-1]].to(own.device, own.dtype)


def _largest(errors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(errors)).amax(0)


def _compared(place: Place, a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> tuple[str, Tensor]:
    """(the part that is farthest off, errors by row of all parts)."""
    named: list[tuple[str, Tensor]] = []
    for left, right in zip(a, b, strict=True):
        width = min(left.shape[-1], right.shape[-1])  # vocabularies may be padded differently
        left, right = left[..., :width], right[..., :width]
        if not place.parts:
            named.append((place.name, row_errors(left, right)))
            continue
        widths = [width for _, width in place.parts]
        pieces = zip(place.parts, left.split(widths, -1), right.split(widths, -1), strict=True)
        named += [(name, row_errors(x, y)) for (name, _), x, y in pieces]
    worst = max(named, key=lambda one: float(one[1].max()))
    return worst[0], _largest([errors for _, errors in named])


def attach(model: Decoder, to: Recorder | Follower) -> None:
    """Wrap every op of a built model. It stays so: a model that was probed is thrown away."""
    _wrap(to, model, "embed", Place(None, "embedding"))
    for i, block in enumerate(model.layers):
        _attach_block(to, block, i)
        model.layers[i] = _around(to, block, Place(i, "residual sum"), 1)  # type: ignore[call-overload]
    _wrap(to, model.final, "_norm", Place(None, "final norm", "rms_norm"))
    _wrap(to, model, "head", Place(None, "head", "linear"))


def _attach_block(to: Recorder | Follower, block: Block, i: int) -> None:
    shape, attention, mlp = block.shape, block.attention, block.mlp
    q, kv = attention.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for name, norm, op in (
        ("input_layernorm", block.before_attention, "_norm"),
        ("post_attention_layernorm", block.after_attention, "_norm"),
        ("pre_mlp_norm", block.before_mlp, "_add_norm"),
        ("post_feedforward_layernorm", block.after_mlp, "_norm"),
    ):
        if norm is not None:
            kernel = "add_rms_norm" if op == "_add_norm" else "rms_norm"
            _wrap(to, norm, op, Place(i, name, kernel), 2 if op == "_add_norm" else 1)
    parts = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    _wrap(to, attention, "qkv", Place(i, "qkv", "linear", parts))
    for name, norm in zip(("q_norm", "k_norm"), attention.norms or (), strict=False):
        _wrap(to, norm, "_norm", Place(i, name, "rms_norm"))
    attention._write = _rope(to, attention._write, Place(i, "rope", "rope_and_write"))
    attention._attend = _attend(to, attention._attend, Place(i, "attention", "attention"))
    _wrap(to, attention, "out", Place(i, "o_proj", "linear"))
    inner = shape.inner
    _wrap(to, mlp, "gate_up", Place(i, "gate_up", "linear", (("gate_proj", inner), ("up_proj", inner))))
    _wrap(to, mlp, "_activate", Place(i, "activation", f"{shape.activation}_mul"))
    _wrap(to, mlp, "down", Place(i, "down_proj", "linear"))


def _wrap(to: Recorder | Follower, owner: Any, attribute: str, place: Place, count: int = 1) -> None:
    setattr(owner, attribute, _around(to, getattr(owner, attribute), place, count))


def _around(to: Recorder | Follower, inner: Callable[..., Any], place: Place, count: int) -> Callable[..., Any]:
    """`inner`, whose first `count` arguments hold a row for each token."""

    def call(*args: Any, **options: Any) -> Any:
        single = True

        def run(*given: Tensor) -> tuple[Tensor, ...]:
            nonlocal single
            found = inner(*given, *args[count:], **options)
            single = isinstance(found, Tensor)
            return (found,) if single else tuple(found)

        found = to.take(place, args[:count], run)
        return found[0] if single else found

    return call


def _rope(to: Recorder | Follower, inner: Callable[..., Tensor], place: Place) -> Callable[..., Tensor]:
    """The turned queries, and the keys and values as they are in the cache after the write."""

    def call(
        qkv: Tensor,
        heads: int,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        scales: Tensor | None,
    ) -> Tensor:
        at = (slice(None), slots // keys.shape[2], slots % keys.shape[2])  # heads first

        def run(given: Tensor) -> tuple[Tensor, ...]:
            q = inner(given, heads, keys, values, slots, cos, sin, scales)
            written = [pool[at] for pool in (keys, values)]
            if scales is not None:
                written = [codes * scales[at][..., i, None] for i, codes in enumerate(written)]
            return q, *(pool.transpose(0, 1) for pool in written)

        q, *written = to.take(place, (qkv,), run)
        if isinstance(to, Follower) and to.forced:
            for i, (pool, new) in enumerate(zip((keys, values), written, strict=True)):
                pool[at], factors = _stored(new.transpose(0, 1), pool.dtype)
                if scales is not None and factors is not None:
                    scales[(*at, i)] = factors
        return q

    return call


def _stored(new: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    return quantize(new.float()) if dtype == torch.int8 else (new.to(dtype), None)


def _attend(to: Recorder | Follower, inner: Callable[..., Tensor], place: Place) -> Callable[..., Tensor]:
    def call(q: Tensor, *args: Any, **options: Any) -> Tensor:
        return to.take(place, (q,), lambda given: (inner(given, *args, **options),))[0]

    return call
