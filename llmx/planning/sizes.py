"""Bytes on each device: weights, keys and values, activations, for a way to spread a model over devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from llmx.planning.anatomy import Anatomy, Layer, Matrix
from llmx.planning.hardware import Hardware
from llmx.planning.storage import PLAIN

LOGITS = 3  # float32 copies of a sampled row of logits that are alive at once: raw, processed, noise


@dataclass(frozen=True)
class Layout:
    """tp ranks share every layer; pp stages have a part of the layers each; dp replicas have a part of the requests.

    ep: ranks that the routed experts are dealt out to, tp * dp of them, or 1: cut like all else.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"TP {self.tp}, PP {self.pp}, DP {self.dp}, EP {self.ep}"


@dataclass(frozen=True)
class Load:
    """What is asked of a model. context: most tokens of prompt and output of one request. kv_bytes: of one element.
    kv_scales: bytes that each head of a token has beside its keys and values."""

    context: int
    concurrency: int
    input_len: int
    output_len: int
    kv_bytes: int
    kv_scales: int = 0

    def kept(self, anatomy: Anatomy) -> int:
        """Bytes of keys and values of one request."""
        return anatomy.kv_kept(self.context, self.kv_bytes, self.kv_scales)

    def on(self, layout: Layout) -> int:
        """Requests of one replica."""
        return -(-self.concurrency // layout.dp)


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest device. usable: of its memory, what may be used."""

    weights: int
    kv: int
    activations: int
    usable: int

    @property
    def needed(self) -> int:
        return self.weights + self.kv + self.activations

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable


def layouts(anatomy: Anatomy, hardware: Hardware) -> Iterator[Layout]:
    """All that use every device: heads divide as the engine asks, TP stays in a machine, stages have whole layers."""
    for tp in range(1, hardware.per_node + 1):
        if hardware.count % tp or not heads_fit(anatomy, tp):
            continue
        for pp in range(1, min(hardware.count // tp, len(anatomy.layers)) + 1):
            if hardware.count // tp % pp:
                continue
            dp = hardware.count // tp // pp
            yield Layout(tp, pp, dp)
            if anatomy.experts and tp * dp > 1 and anatomy.experts % (tp * dp) == 0:
                yield Layout(tp, pp, dp, tp * dp)


def heads_fit(anatomy: Anatomy, ranks: int) -> bool:
    """The engine's rule: whole query heads; key-value heads divide the ranks or the ranks them."""
    kv = anatomy.kv_heads
    return anatomy.heads % ranks == 0 and (anatomy.latent or kv % ranks == 0 or ranks % kv == 0)


def stages(count: int, pp: int) -> list[slice]:
    """The layers of each stage: as even as can be, later ones smaller, since the last also has the head."""
    ends = [-(-count * i // pp) for i in range(pp + 1)]
    return [slice(a, b) for a, b in pairwise(ends)]


def held(matrix: Matrix, anatomy: Anatomy, hardware: Hardware) -> int:
    """Bytes of a matrix in memory. Embeddings are looked up as they are stored."""
    if hardware.held is None or matrix.kind == "embedding":
        return matrix.nbytes(PLAIN[anatomy.dtype])
    return int(matrix.parameters * hardware.held)


def share(matrix: Matrix, anatomy: Anatomy, layout: Layout) -> float:
    """Of the matrix, what one device holds."""
    if matrix.kind == "experts" and layout.ep > 1:
        return 1 / layout.ep
    return float(matrix.share(layout.tp, anatomy.kv_heads))


def ends_bytes(anatomy: Anatomy, layout: Layout, hardware: Hardware) -> tuple[int, int]:
    """On the first stage and on the last: embedding, last norm and head. One stage has a tied matrix once, if it is
    held as it is stored; else the head is a copy."""
    part = 1 / layout.tp
    first = held(anatomy.embedding, anatomy, hardware) * part
    top = anatomy.head
    last = held(top, anatomy, hardware) * part
    if anatomy.tied and hardware.held is not None:
        last = int(top.parameters * hardware.held) * part
    elif anatomy.tied and layout.pp == 1:
        last = 0.0
    rest = sum(held(m, anatomy, hardware) for m in anatomy.ends if m.n_in == 1)
    return int(first), int(last) + rest


def layer_bytes(layer: Layer, anatomy: Anatomy, layout: Layout, hardware: Hardware) -> float:
    return sum(held(m, anatomy, hardware) * share(m, anatomy, layout) for m in layer.matrices)


def memory(anatomy: Anatomy, layout: Layout, hardware: Hardware, load: Load, usable: int) -> Memory:
    """Of the stage that needs most."""
    first, last = ends_bytes(anatomy, layout, hardware)
    requests = load.on(layout)
    sizes = [0.0] * len(anatomy.layers)
    for layer, where in anatomy.alike.items():
        each = layer_bytes(layer, anatomy, layout, hardware)
        for i in where:
            sizes[i] = each
    worst = Memory(0, 0, 0, usable)
    for i, part in enumerate(stages(len(sizes), layout.pp)):
        weights = int(sum(sizes[part])) + (first if i == 0 else 0) + (last if i == layout.pp - 1 else 0)
        kv = requests * anatomy.kv_kept(load.context, load.kv_bytes, load.kv_scales, layout.tp, part)
        sampled = requests if i == layout.pp - 1 else 0
        active = activations(anatomy, layout, hardware, min(hardware.budget, requests * load.context), sampled)
        one = Memory(weights, kv, active, usable)
        worst = max(worst, one, key=lambda m: m.needed)
    return worst


def activations(anatomy: Anatomy, layout: Layout, hardware: Hardware, rows: int, sampled: int) -> int:
    """Peak of a step with so many rows: residual, its norm, what a layer adds, and the widest thing inside a layer;
    then the logits of the sampled rows."""
    width = 4 if hardware.held else 2
    attention = anatomy.layers[0].attention
    inner = max(layer.inner for layer in anatomy.alike) // (layout.tp if layout.ep == 1 else 1)
    heads = attention.heads * attention.key // layout.tp
    inside = max(3 * inner, 2 * heads + 2 * attention.elements(layout.tp))
    vocab = -(-anatomy.vocab // layout.tp) if layout.tp > 1 else anatomy.vocab
    return rows * (3 * anatomy.hidden + inside) * width + sampled * (vocab + (LOGITS - 1) * anatomy.vocab) * 4
