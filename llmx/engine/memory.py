"""Before weights are loaded: can they and some keys and values fit at all? And which knob, when memory has run out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from llmx.cache.pools import LayerSpec, block_bytes, windows_of
from llmx.config import EngineConfig
from llmx.errors import LlmxError, UsageError
from llmx.formats.checkpoint import PLAIN, Checkpoint, Stored
from llmx.kernels import Kernels
from llmx.schemes import find
from llmx.schemes.base import Span, in_steps, narrow, weight_dtype

GIB = 2**30
ACTIVATION_SHARE = 0.05  # of the memory in play, for activations
MOST_UTILIZATION = 0.98
SAMPLE = 64  # rows that are prepared to see what a scheme keeps of a weight
FEWEST_BLOCKS = 5  # of each group, with which an engine still begins to shorten the context
VIEWED = ("o_proj", "down_proj", "attn_output", "ffn_down", "lm_head", "output")  # never joined with a neighbour


@dataclass(frozen=True)
class Demand:
    """Bytes on one device. least: of keys and values, for one context. free: what there is. share: of it, for use."""

    weights: int
    least: int
    free: int
    share: int


def weight_demand(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> int:
    """Bytes that the layers will hold, of all ranks together, without what stays mapped from the file.

    A scheme says itself what it keeps of a weight: a few rows of zeros are prepared for each way of storing.
    """
    total, kept = 0, {}
    tied = not any(name in checkpoint for name in ("lm_head.weight", "output.weight"))
    quantised = _quantised(checkpoint)
    rates: dict[object, float] = {}
    for module, group in quantised.items():
        alike = tuple((suffix, stored.kind, stored.shape) for suffix, stored in sorted(group.items()))
        if alike not in rates:
            rates[alike] = _rate(checkpoint, module, group, weight_dtype(dtype, device), device, kernels)
        total += int(sum(stored.nbytes for stored in group.values()) * rates[alike])
    for stored in map(checkpoint.stored, checkpoint.names()):
        module, _, suffix = stored.name.rpartition(".")
        if module in quantised and suffix in quantised[module]:
            continue
        is_embedding = module.endswith(("embed_tokens", "token_embd"))
        if suffix != "weight" or len(stored.shape) != 2:
            total += stored.nbytes  # vectors, biases, and the parts of schemes with several tensors
            continue
        if is_embedding and not tied:
            total += 0 if device.type == "cpu" else stored.nbytes
            continue
        key = (stored.kind, stored.shape[1])
        if key not in kept:
            kept[key] = _kept(stored, dtype, device, kernels)
        per_row, is_view = kept[key]
        part = module.rpartition(".")[2]
        if not (is_view and (part in VIEWED or is_embedding)):
            total += stored.shape[0] * per_row
        if is_embedding and device.type != "cpu":
            total += stored.nbytes
    return total


def _quantised(checkpoint: Checkpoint) -> dict[str, dict[str, Stored]]:
    """Linears that are stored in several tensors, by name; without their biases."""
    groups: dict[str, dict[str, Stored]] = {}
    for name in checkpoint.names():
        module, _, suffix = name.rpartition(".")
        if suffix != "bias":
            groups.setdefault(module, {})[suffix] = checkpoint.stored(name)
    return {module: group for module, group in groups.items() if len(group) > 1}


def _rate(
    checkpoint: Checkpoint,
    module: str,
    group: dict[str, Stored],
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
) -> float:
    """Bytes that such a linear's scheme keeps for each stored one: what is in it decides, so some rows are prepared."""
    try:
        scheme = find(module, group, checkpoint.quantization)
    except UsageError:  # whoever asks for it will hear of that
        return 1.0
    layout = scheme.axes(group)
    tensors = {suffix: checkpoint.read(stored.name) for suffix, stored in group.items() if suffix in layout}
    steps = in_steps(layout, tensors)
    if steps is None:
        return 1.0
    kind, n_out, grain = steps
    rows = min(n_out, -(-SAMPLE // grain) * grain)
    few = {n: t.contiguous().to(device) for n, t in narrow(tensors, layout, {kind: Span(0, rows, n_out)}).items()}
    held = scheme.prepare(few, layout, dtype, kernels)
    return sum(t.nbytes for t in held.values()) * n_out / rows / sum(stored.nbytes for stored in group.values())


def _kept(stored: Stored, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> tuple[int, bool]:
    """Bytes of a row that the scheme keeps, and whether it copies none; as stored if it has no scheme."""
    few = Stored(stored.name, stored.kind, (SAMPLE, stored.shape[1]), stored.nbytes // stored.shape[0] * SAMPLE)
    group = {"weight": few}
    try:
        scheme = find(stored.name, group)
    except UsageError:  # whoever asks for it will hear of that
        return stored.nbytes // stored.shape[0], False
    kind = getattr(torch, PLAIN[stored.kind][1]) if stored.kind in PLAIN else torch.uint8
    zeros = torch.zeros(few.read_shape, dtype=kind, device=device)
    held = scheme.prepare({"weight": zeros}, scheme.axes(group), weight_dtype(dtype, device), kernels)
    is_view = device.type == "cpu" and all(t.data_ptr() == zeros.data_ptr() for t in held.values())
    return sum(t.nbytes for t in held.values()) // SAMPLE, is_view


def random_demand(shape: Any, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> int:
    """As weight_demand, of random weights, which are stored in `dtype`."""
    layer = shape.hidden * (shape.head_dim * 2 * (shape.heads + shape.kv_heads) + 3 * shape.inner)
    linears: int = shape.layers * layer + shape.vocab * shape.hidden
    embedding: int = shape.vocab * shape.hidden * dtype.itemsize
    held = dtype if kernels.has("linear_packed") else weight_dtype(dtype, device)
    return linears * held.itemsize + embedding


def check_demand(
    config: EngineConfig,
    weights: int,
    specs: list[LayerSpec],
    length: int,
    kv_dtype: torch.dtype,
    free: int,
    device: torch.device,
) -> None:
    """UsageError if weights and keys and values can't fit, with the numbers and the flags that would change it.

    weights: of all ranks. specs: of one rank. free: bytes of the machine's memory, or of each device.
    """
    cpu, ranks = device.type == "cpu", config.tensor_parallel_size
    size, copies = config.block_size, ranks if cpu else 1
    per_block = sum(block_bytes(specs, window, size, kv_dtype) for window in windows_of(specs))
    blocks = 1 + -(-length // size) if config.max_model_len and None in windows_of(specs) else FEWEST_BLOCKS
    if config.kv_cache_bytes is not None:
        demand = Demand(
            weights if cpu else weights // ranks, config.kv_cache_bytes // (1 if cpu else ranks), free, free
        )
    else:
        share = int(free * (config.memory_utilization - ACTIVATION_SHARE))
        demand = Demand(
            weights if cpu else weights // ranks, max(blocks, FEWEST_BLOCKS) * per_block * copies, free, share
        )
    if demand.weights + demand.least <= demand.share:
        return
    allowed = f"of {demand.free / GIB:.2f} GiB {'free' if cpu else 'on each device'}"
    if config.kv_cache_bytes is None:
        allowed += f", {demand.share / GIB:.2f} GiB may be used (--memory-utilization {config.memory_utilization:g})"
    raise UsageError(
        f"{config.model} does not fit: its weights take {demand.weights / GIB:.2f} GiB as this version holds them, "
        f"keys and values at least {demand.least / GIB:.2f} GiB; {allowed}.",
        hint="; ".join(_knobs(config, demand, blocks, per_block * copies, device)),
    )


def _knobs(config: EngineConfig, demand: Demand, blocks: int, per_block: int, device: torch.device) -> Iterator[str]:
    needed = demand.weights + demand.least
    if config.kv_cache_bytes is not None:
        if (left := demand.free - demand.weights) > 0:
            yield f"lower --kv-cache-bytes to at most {left}"
    else:
        utilization = needed / demand.free + ACTIVATION_SHARE
        if utilization <= MOST_UTILIZATION:
            yield f"raise --memory-utilization to at least {utilization + 0.005:.2f}"
        tokens = (demand.share - demand.weights) // per_block * config.block_size - config.block_size
        if config.max_model_len and 0 < tokens < blocks * config.block_size:
            yield f"lower --max-model-len to at most {tokens}"
    if device.type == "cuda":
        yield f"split the model over more devices (--tp above {config.tensor_parallel_size})"
    yield "take a smaller model, or one that is stored in fewer bits"
    yield f"`llmx plan {config.model}` says what fits where"


def out_of_memory(error: BaseException, doing: str, utilization: float | None = None) -> LlmxError | None:
    """What to say of an error, if it is one of memory that ran out; else None."""
    text = str(error).strip().splitlines()[0][:200] if str(error).strip() else "no memory is left"
    on_cuda = isinstance(error, torch.OutOfMemoryError)
    on_cpu = isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "not enough memory" in str(error))
    )
    if not on_cuda and not on_cpu:
        return None
    where = "The device" if on_cuda else "This machine"
    now = f" (now {utilization:g})" if utilization is not None else ""
    return LlmxError(
        f"{where} ran out of memory while {doing}: {text.rstrip('.')}.",
        hint=f"lower --memory-utilization{now}, --max-num-batched-tokens or --max-model-len, or end what else uses it",
    )
