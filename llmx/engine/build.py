"""From an EngineConfig to an engine: files, model, and what fits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from llmx.cache.pools import LayerSpec, block_bytes, windows_of
from llmx.config import ALIASES, EngineConfig, EngineInfo
from llmx.device import available_memory, resolve_device, total_memory, use_threads
from llmx.engine.engine import Engine
from llmx.engine.memory import ACTIVATION_SHARE, check_demand, random_demand, weight_demand
from llmx.errors import UsageError
from llmx.formats.hub import Located, locate
from llmx.kernels import Kernels
from llmx.loading import CheckpointWeights, RandomWeights, Shard
from llmx.models import Opened, open_model, random_shape
from llmx.parallel.group import Alone, Group
from llmx.scheduler import Limits

if TYPE_CHECKING:
    from llmx.tokenizer import Tokenizer

RANDOM = "random:"
GIB = 2**30
CPU_KV_BYTES = 4 * GIB  # unless more is asked for, or one sequence needs more

Progress = Callable[[int, int], None]
Join = Callable[[torch.device], Group]


@dataclass(frozen=True)
class Fit:
    """What was decided about sizes."""

    length: int
    sequences: int
    budget: int
    blocks: tuple[int, ...]


def build_engine(
    config: EngineConfig, progress: Progress | None = None, join: Join | None = None
) -> tuple[Engine, EngineInfo]:
    """Load a model, or one rank's share of it, and give it the cache that fits.

    join: gives the group of ranks, once the files are known to be good. UsageError if files or sizes can't work.
    """
    began = time.monotonic()
    ranks = config.tensor_parallel_size
    device = resolve_device(config.device)
    if device.type == "cpu":
        use_threads(config.threads, ranks)
    free = available_memory(device) if device.type == "cpu" else total_memory(device)
    kernels = Kernels(device.type, activations=_activations(config, device))
    located = None if config.model.startswith(RANDOM) else locate(config.model)
    opened = None if located is None else open_model(located)
    family, shape = random_shape(config.model[len(RANDOM) :]) if opened is None else (opened.family, opened.config)
    shape.check_ranks(ranks)
    dtype = _dtype(config, opened, device)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else _torch_dtype(config.kv_cache_dtype)
    length = _length(config, shape.max_position)
    if opened is None:
        wanted = random_demand(shape, dtype, device, kernels)
    else:
        wanted = weight_demand(opened.checkpoint, dtype, device, kernels)
    check_demand(config, wanted, shape.specs(ranks), length, kv_dtype, free, device)
    group: Group = Alone() if join is None else join(device)
    shard = Shard(group.rank, group.size)
    if opened is None:
        weights: Any = RandomWeights(config.seed, dtype, device, kernels, shard=shard)
    else:
        weights = CheckpointWeights(opened.checkpoint, opened.names, shard, dtype, device, kernels, progress=progress)
    with torch.inference_mode():
        model = family.Model(shape, weights, kernels, length=length, device=device, group=group)
    specs = model.specs
    sizes = torch.tensor([weights.bytes, weights.pass_bytes], device=device)
    stored, read = group.sum(sizes).tolist()  # and all have loaded
    fit = _fit(config, specs, length, kv_dtype, free, _taken(free, device), device) if group.rank == 0 else None
    fit = _agreed(group, fit, len(windows_of(specs)), device)
    overlap = device.type == "cuda" if config.overlap is None else config.overlap
    engine = Engine(
        model,
        limits=Limits(budget=fit.budget, running=fit.sequences, length=fit.length, overlap=overlap),
        blocks=fit.blocks,
        size=config.block_size,
        kv_dtype=kv_dtype,
        device=device,
        prefix_caching=config.prefix_caching,
        tokenizer=None if located is None else partial(_tokenizer, located),
    )
    multiply = "linear_packed" if kernels.has("linear_packed") else "linear"
    for op in (multiply, "philox_uniform"):  # named in the report even before anybody asks for them
        kernels.get(op)
    info = EngineInfo(
        model=config.model,
        path=str(located.path) if located else config.model,
        architecture=opened.architecture if opened else family.ARCHITECTURES[0],
        parameters=weights.parameters,
        weight_bytes=stored,
        pass_bytes=read,
        schemes=tuple(sorted(weights.schemes)),
        dtype=_name(dtype),
        kv_cache_dtype=_name(kv_dtype),
        activations=kernels.activations,
        device=str(device),
        threads=torch.get_num_threads(),
        kernels=kernels.chosen(),
        max_model_len=fit.length,
        max_num_seqs=fit.sequences,
        max_num_batched_tokens=fit.budget,
        block_size=config.block_size,
        num_blocks=fit.blocks[0] - 1,
        kv_cache_bytes=engine.cache.bytes * ranks,
        vocab_size=shape.vocab,
        tensor_parallel_size=ranks,
        load_seconds=time.monotonic() - began,
    )
    return engine, info


def _tokenizer(located: Located) -> Tokenizer:
    from llmx.tokenizer import load_tokenizer  # a library of its own, which only requests with a grammar need here

    return load_tokenizer(located)


def _agreed(group: Group, fit: Fit | None, kv_groups: int, device: torch.device) -> Fit:
    """Rank 0's `fit`, on every rank: others find less memory free, and must not plan their steps otherwise."""
    sizes = [0] * (3 + kv_groups) if fit is None else [fit.length, fit.sequences, fit.budget, *fit.blocks]
    length, sequences, budget, *blocks = group.agree(torch.tensor(sizes, device=device)).tolist()
    return Fit(length, sequences, budget, tuple(blocks))


def check_files(located: Located) -> None:
    """The family's own checks of a model's files, without loading weights."""
    open_model(located)


def _torch_dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, ALIASES.get(name, name))
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(config: EngineConfig, opened: Opened | None, device: torch.device) -> torch.dtype:
    """For "auto" what the checkpoint's config names; for GGUF float32 on the CPU, bfloat16 on CUDA."""
    if config.dtype != "auto":
        return _torch_dtype(config.dtype)
    named = opened.stored_dtype if opened else None
    if named in ("float32", "float16", "bfloat16"):
        return _torch_dtype(named)
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _activations(config: EngineConfig, device: torch.device) -> str:
    asked = config.activations
    if asked.startswith("int8") and device.type != "cpu":
        raise UsageError(
            f"--activations {asked} is built for the CPU, not for {device}.", hint="leave --activations out"
        )
    if asked == "auto":
        return "int8" if device.type == "cpu" else "bf16"
    return asked


def _length(config: EngineConfig, trained: int) -> int:
    if config.max_model_len is not None and config.max_model_len > trained:
        raise UsageError(
            f"--max-model-len {config.max_model_len} is more than the {trained} positions that the model was made for."
        )
    return config.max_model_len or trained


def _taken(free: int, device: torch.device) -> int:
    """Bytes that the weights have taken of what was free."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return max(0, free - available_memory(device))


def _fit(
    config: EngineConfig,
    specs: list[LayerSpec],
    length: int,
    dtype: torch.dtype,
    free: int,
    taken: int,
    device: torch.device,
) -> Fit:
    """Blocks for each KV group, and a context and a number of sequences that they can serve."""
    size, cpu = config.block_size, device.type == "cpu"
    sequences = config.max_num_seqs or (32 if cpu else 256)
    budget = config.max_num_batched_tokens or max(512 if cpu else 8192, sequences)
    if sequences > budget:
        raise UsageError(
            f"--max-num-seqs {sequences} needs --max-num-batched-tokens of at least as much, not {budget}.",
        )
    windows = windows_of(specs)
    per_block = [block_bytes(specs, window, size, dtype) for window in windows]
    # A window group never needs more than every sequence's window and the tokens of one step.
    ahead = -(-budget // size) + 2
    least = [
        1 + _blocks(length, size) if w is None else 1 + _blocks(min(length, w + budget), size) + 2 for w in windows
    ]
    most = [
        1 + sequences * _blocks(length, size) + ahead if w is None
        else 1 + sequences * (_blocks(min(length, w), size) + 2) + ahead
        for w in windows
    ]  # fmt: skip
    share = config.kv_cache_bytes or int(free * config.memory_utilization - taken - free * ACTIVATION_SHARE)
    needed = sum(n * b for n, b in zip(least, per_block, strict=True))
    if cpu or config.kv_cache_bytes is not None:  # bytes of all ranks together
        share //= config.tensor_parallel_size
    if config.kv_cache_bytes is None and cpu:
        share = min(share, max(CPU_KV_BYTES // config.tensor_parallel_size, needed))
    if needed > share:
        return _shrunk(config, windows, per_block, length, share, size, sequences, budget)
    blocks = _share_out(windows, per_block, least, most, share)
    return Fit(length, sequences, budget, tuple(blocks))


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


def _share_out(
    windows: tuple[int | None, ...], per_block: list[int], least: list[int], most: list[int], share: int
) -> list[int]:
    """Window groups get all they can use, as far as it lasts; the group that keeps everything gets the rest."""
    blocks, left = list(least), share - sum(n * b for n, b in zip(least, per_block, strict=True))
    for group in sorted(range(len(windows)), key=lambda g: (windows[g] is None, windows[g] or 0)):
        more = max(0, min(most[group] - least[group], left // per_block[group]))
        blocks[group] += more
        left -= more * per_block[group]
    return blocks


def _shrunk(
    config: EngineConfig,
    windows: tuple[int | None, ...],
    per_block: list[int],
    length: int,
    share: int,
    size: int,
    sequences: int,
    budget: int,
) -> Fit:
    """One whole context doesn't fit: a shorter one, unless the user named the length."""
    each = sum(per_block)
    fits = max(0, share // each - 1 - 2) * size  # as if no layer had a window: simple, and safe
    if config.max_model_len is not None or fits < 2 * size:
        mib = each / size / 2**20
        raise UsageError(
            f"A context of {length} tokens needs {length * mib:.0f} MiB of KV cache ({mib:.3f} MiB a token); "
            f"{max(0, share) / 2**20:.0f} MiB are left.",
            hint=f"lower --max-model-len to at most {fits}, or raise --memory-utilization",
        )
    blocks = tuple(1 + _blocks(fits, size) + (0 if w is None else 2) for w in windows)
    return Fit(fits, sequences, min(budget, max(sequences, fits)), blocks)
