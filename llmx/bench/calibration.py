"""What the engine does on this CPU, measured in a second or two on a model's own sizes: the rates a plan is made of.

The engine's products with weights, its attention, and all else it does (with products that cost nothing) are timed
apart, on few layers, and a plan puts them together for all layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from llmx.core import Request, SamplingParams
from llmx.device import available_memory
from llmx.engine.engine import Engine
from llmx.engine.graph import ROOMS
from llmx.errors import UsageError
from llmx.formats.checkpoint import PLAIN, Stored
from llmx.formats.gguf import TYPES
from llmx.kernels import Kernels
from llmx.layers.decoder import Decoder
from llmx.layers.linear import Linear
from llmx.layers.rope import RopeConfig
from llmx.layers.shape import Shape
from llmx.layers.weights import Part
from llmx.planning.anatomy import Anatomy, Matrix
from llmx.planning.hardware import Hardware, Rates, this_machine
from llmx.planning.roofline import pairs, row_bytes
from llmx.planning.sizes import Layout, Load
from llmx.scheduler import Limits
from llmx.schemes import find
from llmx.schemes.base import Segment

FEW, MORE = 1, 5  # layers of the two engines: their difference is what a layer costs
PROMPT = 512  # tokens of a step, the engine's own budget on a CPU
SPREAD = 192 * 2**20  # bytes of matrices that are gone through, so that none is read from a cache
WIDEST = 64 * 2**20  # bytes of one of them; wider ones are cut
PATIENCE = 0.6  # seconds after which a product is not tried again
STEPS = 8  # decode steps that are timed
CPU = torch.device("cpu")
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
BLOCKS = {name: (elements, size) for name, elements, size in TYPES.values()}


@dataclass(frozen=True)
class _Nothing:
    """A linear or an embedding that gives zeros."""

    zeros: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.zeros.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return self.zeros[: len(x)]


class _Idle:
    """A Weights whose linears give zeros at once: what is left is the rest of the engine."""

    parameters = bytes = 0

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def _nothing(self, width: int) -> _Nothing:
        return _Nothing(torch.zeros(self.rows, width))

    def column(self, parts: Sequence[Part], n_in: int) -> Any:
        return self._nothing(sum(part.n_out for part in parts))

    def row(self, name: str, n_out: int, n_in: int, heads: int | None = None) -> Any:
        return self._nothing(n_out)

    def embedding(self, name: str, vocab: int, hidden: int) -> Any:
        return self._nothing(hidden)

    def head(self, name: str, vocab: int, hidden: int, tied_to: str | None) -> Any:
        return self._nothing(vocab)

    def vector(self, name: str, n: int) -> Tensor:
        return torch.ones(n)


class _Timed(Kernels):
    """The engine's kernels; `seconds` adds up what attention takes, which a replayed forward would hide."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.seconds = 0.0

    def get(self, op: str) -> Callable[..., Any]:
        inner = super().get(op)
        if op not in ("attention", "plan_attention"):
            return inner

        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            found = inner(*args, **options)
            self.seconds += time.perf_counter() - began
            return found

        return timed

    def has(self, op: str) -> bool:
        return op != "recorder" and super().has(op)


@dataclass(frozen=True)
class _Rest:
    """Seconds of a step of an idle engine, of which `attention`."""

    step: float
    attention: float

    @property
    def other(self) -> float:
        return self.step - self.attention


def calibrate(anatomy: Anatomy, load: Load) -> tuple[Rates, float]:
    """Rates of this CPU for this model and load, with the threads that torch has now, and the bytes that the engine
    holds of a weight. Takes one to three seconds."""
    batch, prompt = min(load.concurrency, 16), max(PROMPT // 2, min(PROMPT, load.input_len))
    context = max(16, min(PROMPT, load.input_len + load.output_len // 2))
    with torch.inference_mode():
        prefill, one, many = zip(*(_idle(anatomy, n, batch, prompt, context) for n in (FEW, MORE)), strict=True)
        small, large, held = _layer_products(anatomy, batch, prompt)
        top = anatomy.head
        wide = _product([_linear(top.n_out, top.n_in, _kind(top, anatomy))], batch)
    layer, layer_prompt = _each(one, "other"), _each(prefill, "other")
    fixed, fixed_many = one[0].other - FEW * layer, many[0].other - FEW * _each(many, "other")
    a = anatomy.layers[0].attention
    moved = row_bytes(anatomy.layers[0], anatomy, Layout(), this_machine(0, _NOTHING, 4))
    work = 2.0 * a.score * a.heads * pairs(a, prompt, prompt)
    kept = batch * context * a.kept(load.kv_bytes, load.kv_scales)
    rates = Rates(
        bandwidth=small,
        head_bandwidth=wide,
        flops={"bf16": large},
        attention_bandwidth=kept / max(1e-7, _each(many, "attention")),
        attention_flops=work / max(1e-7, _each(prefill, "attention")),
        elementwise=moved * (prompt - 1) / max(1e-7, layer_prompt - layer),
        layer_seconds=max(0.0, layer - moved / 1e12),
        step_seconds=max(0.0, fixed),
        token_seconds=max(0.0, (fixed_many - fixed) / (batch - 1)) if batch > 1 else 0.0,
        link=float("inf"),
        network=float("inf"),
        rows=4,
        measured=True,
    )
    return rates, held


_NOTHING = Rates(1.0, 1.0, {"bf16": 1.0}, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0)


def _each(engines: Sequence[_Rest], what: str) -> float:
    few, more = (getattr(rest, what) for rest in engines)
    return max(0.0, float(more - few) / (MORE - FEW))


def _idle(anatomy: Anatomy, layers: int, batch: int, prompt: int, context: int) -> tuple[_Rest, _Rest, _Rest]:
    """A prompt's step, one sequence's decode step and `batch` sequences', without products with weights."""
    length = max(prompt, context) + 3 * STEPS + 4
    timed = _Steps(anatomy, layers, batch, length, _Timed())
    plain = _Steps(anatomy, layers, batch, length, Kernels("cpu"))  # which replays its steps, once it knows them

    def decode(count: int) -> _Rest:
        return _Rest(plain.decode(count, context).step, timed.decode(count, context).attention)

    def whole(i: int) -> _Rest:
        return _Rest(plain.prompt(f"prompt/{i}", prompt).step, timed.prompt(f"prompt/{i}", prompt).attention)

    steps = [whole(i) for i in range(5)]
    one = decode(1)
    return _middle(steps[2:]), one, decode(batch) if batch > 1 else one


class _Steps:
    """An idle engine, whose steps are timed."""

    def __init__(self, anatomy: Anatomy, layers: int, batch: int, length: int, kernels: Kernels) -> None:
        self.anatomy, self.kernels = anatomy, kernels
        self.engine = _engine(anatomy, layers, batch, length, kernels)

    def prompt(self, name: str, length: int) -> _Rest:
        self._add(name, length, 1)
        return self._step()

    def decode(self, count: int, context: int) -> _Rest:
        for i in range(count):
            self._add(f"decode/{count}/{i}", context, 3 * STEPS)
        while any(s.remaining > 2 * STEPS or not s.output_len for s in _unfinished(self.engine)):
            self.engine.step()
        found = _middle([self._step() for _ in range(STEPS)])
        while self.engine.step() is not None:
            pass
        return found

    def _add(self, name: str, length: int, tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, seed=0, ignore_eos=True)
        prompt = tuple(i % self.anatomy.vocab for i in range(length))
        self.engine.scheduler.add(Request(name, prompt, params))

    def _step(self) -> _Rest:
        before, began = getattr(self.kernels, "seconds", 0.0), time.perf_counter()
        self.engine.step()
        return _Rest(time.perf_counter() - began, getattr(self.kernels, "seconds", 0.0) - before)


def _unfinished(engine: Engine) -> list[Any]:
    return [*engine.scheduler.waiting, *engine.scheduler.running]


def _middle(rests: Sequence[_Rest]) -> _Rest:
    return _Rest(median(r.step for r in rests), median(r.attention for r in rests))


def _engine(anatomy: Anatomy, layers: int, batch: int, length: int, kernels: Kernels) -> Engine:
    a = anatomy.layers[0].attention
    shape = Shape(
        vocab=anatomy.vocab,
        hidden=anatomy.hidden,
        layers=layers,
        heads=a.heads,
        kv_heads=a.kv_heads,
        head_dim=a.key,
        inner=anatomy.layers[-1].inner,
        max_position=length,
        eps=1e-6,
        rope=RopeConfig(10_000.0, a.key // 2 * 2),
        placement="sandwich" if anatomy.norms == 4 else "pre",
        qk_norm="head" if any("q_norm" in m.name for m in anatomy.layers[0].matrices) else "",
    )
    model = Decoder(shape, _Idle(max(PROMPT, batch)), kernels, length=length, device=CPU)
    blocks = 2 + batch * (2 + length // 16)
    limits = Limits(budget=max(PROMPT, batch), running=batch, length=length)
    return Engine(
        model, limits=limits, blocks=(blocks,), size=16, kv_dtype=torch.float32, device=CPU, prefix_caching=False
    )


def _layer_products(anatomy: Anatomy, batch: int, prompt: int) -> tuple[float, float, float]:
    """The engine's linears of a layer: bytes/s with `batch` rows, flops/s with `prompt` rows, bytes of a weight."""
    shapes: dict[tuple[str, int, str], int] = {}
    for m in anatomy.layers[0].matrices:
        if m.n_in > 1 and m.kind not in ("router", "experts"):
            # as the engine fuses them where they are stored alike: q, k and v are one product, gate and up another
            key = (FUSED.get(m.name, m.name), m.n_in, _kind(m, anatomy))
            shapes[key] = shapes.get(key, 0) + m.n_out
    linears = [_linear(n_out, n_in, kind) for (_, n_in, kind), n_out in shapes.items()]
    weights = sum(one.n_out * one.n_in for one in linears)
    size = sum(map(_held, linears))
    flops = 2.0 * prompt * weights * _product(linears, prompt, tries=2) / size
    return _product(linears, batch), flops, size / weights


def _kind(matrix: Matrix, anatomy: Anatomy) -> str:
    name = matrix.storage.name if matrix.storage else anatomy.dtype
    return {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}.get(name, name)


def _linear(n_out: int, n_in: int, kind: str) -> Linear:
    """The engine's own, as it prepares it from what is stored; of zeros. What it can't read is taken for BF16."""
    kernels = Kernels("cpu", activations="int8")
    n_out = max(1, min(n_out, WIDEST // 4 // n_in))
    elements, size = BLOCKS.get(kind, (1, 2))
    stored = {"weight": Stored("weight", kind, (n_out, n_in), n_out * n_in // elements * size)}
    try:
        scheme = find("calibration", stored)
    except UsageError:
        return _linear(n_out, n_in, "BF16")
    dtype = getattr(torch, PLAIN[kind][1]) if kind in PLAIN else torch.uint8
    layout = scheme.axes(stored)
    zeros = {"weight": torch.zeros(stored["weight"].read_shape, dtype=dtype)}
    held = scheme.prepare(zeros, layout, torch.float32, kernels)
    return Linear([Segment(scheme, n_out, layout, held, None, True)], n_in, kernels)


def _held(linear: Linear) -> int:
    return sum(tensor.nbytes for segment in linear.segments for tensor in segment.tensors.values())


def _another(linear: Linear) -> Linear:
    """The same with memory of its own."""
    kernels = Kernels("cpu", activations="int8")
    segments = [replace(s, tensors={k: t.clone() for k, t in s.tensors.items()}) for s in linear.segments]
    return Linear(segments, linear.n_in, kernels)


def _product(linears: Sequence[Linear], rows: int, tries: int = 3) -> float:
    """Bytes of held weights a second that these linears, one after the other, go through with so many rows."""
    whole = sum(map(_held, linears))
    copies = max(1, SPREAD // whole) if rows <= 64 else 1
    every = [*linears, *(_another(one) for _ in range(copies - 1) for one in linears)]
    inputs = {one.n_in: torch.ones(rows, one.n_in) for one in linears}
    through = _recorded(lambda: [one(inputs[one.n_in]) for one in every]) if rows <= ROOMS[-1] else None
    taken = []
    for _ in range(tries + 1):
        began = time.perf_counter()
        if through is not None:
            through()
        else:
            for one in every:
                one(inputs[one.n_in])
        taken.append(time.perf_counter() - began)
        if len(taken) > 1 and sum(taken) > PATIENCE:
            break
    return copies * whole / median(taken[1:])


def _recorded(run: Callable[[], Any]) -> Callable[[], None] | None:
    """Replays what `run` calls as the engine replays its small steps; None where it would not."""
    kernels = Kernels("cpu")
    if not kernels.has("recorder"):
        return None
    recorder = kernels.get("recorder")()
    results, recorded = recorder.record(run)

    def replay(kept: Any = (recorder, run, results)) -> None:  # in whose memory it reads and writes
        recorded.replay()

    return replay if recorded is not None else None


def measured_machine(anatomy: Anatomy, load: Load) -> Hardware:
    """This machine as a plan's hardware."""
    rates, held = calibrate(anatomy, load)
    return this_machine(available_memory(CPU), rates, held)
