"""What a run is configured with: frozen, resolved into new values, never edited. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from llmx.errors import UsageError

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "int8")
ACTIVATIONS = ("auto", "int8", "int8-pow2", "bf16")
ALIASES = {"float": "float32", "half": "float16", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"} | {
    "f32": "float32",
    "f16": "float16",
}


@dataclass(frozen=True)
class EngineConfig:
    """What the engine core is built from. `None` and "auto" are resolved against the model and the machine.

    model: directory, `.gguf` file or a name such as "demo", as `formats.hub.locate` reads it.
    max_model_len: most tokens of prompt and output together. max_num_seqs: most sequences in one step.
    max_num_batched_tokens: token budget of one step. block_size: tokens in a KV block.
    memory_utilization: share of the free memory (CPU) or of the device's memory (CUDA) that weights and KV may use.
    kv_cache_bytes: bytes for the KV cache, of all ranks together, instead of that share. threads: CPU threads of each
    rank (None: as the machine allows).
    tensor_parallel_size: processes that share the model, each with a part of every layer.
    activations: what is multiplied with weights in whole numbers: "int8", rounded to 8 bits in groups of 32,
    "int8-pow2", the same with scales that are powers of two, or "bf16", not rounded; "auto": int8 on the CPU.
    """

    model: str = "demo"
    dtype: str = "auto"
    device: str = "auto"
    kv_cache_dtype: str = "auto"
    activations: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    memory_utilization: float = 0.9
    kv_cache_bytes: int | None = None
    prefix_caching: bool = True
    overlap: bool | None = None
    threads: int | None = None
    seed: int = 0
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        for flag, value, allowed in (("dtype", self.dtype, DTYPES), ("kv-cache-dtype", self.kv_cache_dtype, KV_DTYPES)):
            if ALIASES.get(value, value) not in allowed:
                raise UsageError(f"--{flag} {value} is not built; this version has {', '.join(allowed)}.")
        if self.activations not in ACTIVATIONS:
            raise UsageError(f"--activations {self.activations} is not known; use {', '.join(ACTIVATIONS)}.")
        if self.device != "auto" and self.device.split(":")[0] not in ("cpu", "cuda"):
            raise UsageError(f"--device {self.device} is not known; use auto, cpu, cuda or cuda:N.")
        for flag, number in (
            ("max-model-len", self.max_model_len),
            ("max-num-seqs", self.max_num_seqs),
            ("max-num-batched-tokens", self.max_num_batched_tokens),
            ("threads", self.threads),
            ("kv-cache-bytes", self.kv_cache_bytes),
            ("tp", self.tensor_parallel_size),
        ):
            if number is not None and number < 1:
                raise UsageError(f"--{flag} must be at least 1, not {number}.")
        if self.block_size not in (8, 16, 32, 64, 128):
            raise UsageError(f"--block-size must be 8, 16, 32, 64 or 128, not {self.block_size}.")
        if not 0.0 < self.memory_utilization <= 1.0:
            raise UsageError(f"--memory-utilization must be above 0 and at most 1, not {self.memory_utilization}.")


@dataclass(frozen=True)
class EngineInfo:
    """What was built: facts for the start line, `/v1/models`, `llmx env` and every report. Plain values only."""

    model: str  # as it was named
    path: str
    architecture: str
    parameters: int
    weight_bytes: int  # as stored; of all ranks, so what each of them holds whole counts for each
    pass_bytes: int  # of weights, as held, that one pass over the model reads; of all ranks
    schemes: tuple[str, ...]  # stored-weight schemes found in the checkpoint
    dtype: str
    kv_cache_dtype: str
    activations: str  # "int8", "int8-pow2" or "bf16"; see EngineConfig
    device: str
    threads: int
    kernels: tuple[tuple[str, str], ...]  # (op, implementation)
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int  # of the largest KV group, without the block that is nobody's
    kv_cache_bytes: int
    vocab_size: int
    tensor_parallel_size: int
    load_seconds: float


STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Metrics:
    """Counters since the start (and three gauges: running, waiting, free_blocks)."""

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    steps: int = 0
    most_running: int = 0  # most sequences that one step computed
    preemptions: int = 0
    prompt_tokens: int = 0  # of admitted requests
    cached_tokens: int = 0  # of those, found in the prefix cache
    computed_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    slots_held: int = 0  # sum over steps of token slots held in the largest KV group
    slots_live: int = 0  # and of tokens that live in them
    step_seconds: float = 0.0
    step_sizes: tuple[int, ...] = (0,) * (len(STEP_BOUNDS) + 1)  # steps that computed at most so many tokens, or more
