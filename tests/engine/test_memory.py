"""What can't fit is refused before weights are read, with numbers that hold; memory that runs out names the knob."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llmx.cache.pools import LayerSpec
from llmx.config import EngineConfig
from llmx.engine import build
from llmx.engine.memory import check_demand, out_of_memory, random_demand, weight_demand
from llmx.engine.service import Core
from llmx.errors import LlmxError, UsageError
from llmx.formats.gguf import open_gguf
from llmx.formats.hub import locate
from llmx.kernels import Kernels, cpu
from llmx.layers.weights import Part
from llmx.loading import CheckpointWeights, RandomWeights, Shard
from llmx.models import open_model, random_shape
from llmx.schemes import gptq
from llmx.schemes.whole import symmetric
from tests.checkpoints import AsStored, randn, random_blocks, write

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
GIB = 2**30
CONFIG = EngineConfig("random:tiny", device="cpu", dtype="float32", threads=1)
SPECS = [LayerSpec(2, 16) for _ in range(2)]  # 256 bytes of keys and values per token in f32, each


def check(weights: int, free: int, device: torch.device = CPU, length: int = 1024, **changes: Any) -> None:
    check_demand(replace(CONFIG, **changes), weights, SPECS, length, torch.float32, free, device)


@pytest.mark.parametrize("backend", [None, "reference"])
def test_what_the_layers_will_hold_is_known_from_the_header(backend: str | None, demo: Path) -> None:
    """The demo's embedding stays mapped, its tied head and all linears are packed, or unpacked."""
    opened = open_model(locate("demo"))
    kernels = Kernels("cpu", forced=backend)
    weights = CheckpointWeights(opened.checkpoint, opened.names, Shard(), torch.float32, CPU, kernels)
    opened.family.Model(opened.config, weights, kernels, length=64, device=CPU)
    mapped = opened.checkpoint.stored("token_embd.weight").nbytes
    expected = weight_demand(open_gguf(demo), torch.float32, CPU, kernels)
    vectors = sum(s.nbytes for s in map(opened.checkpoint.stored, opened.checkpoint.names()) if len(s.shape) == 1)
    assert expected - vectors == weights.held - mapped


@pytest.mark.parametrize("device", [CPU, torch.device("meta")], ids=["cpu", "elsewhere"])
def test_each_way_to_store_a_matrix_has_its_own_size(tmp_path: Path, device: torch.device) -> None:
    tensors = {
        "blk.0.ffn_up.weight": random_blocks("Q4_0", 96, 64),
        "blk.0.ffn_gate.weight": random_blocks("Q8_0", 96, 64),
        "output.weight": random_blocks("Q8_0", 32, 64),
        "output_norm.weight": torch.ones(64),
    }
    kinds = {name: "Q4_0" if "up" in name else "Q8_0" for name in tensors if "norm" not in name}
    checkpoint = write(tmp_path, tensors, kinds)
    found = weight_demand(checkpoint, torch.bfloat16, device, Kernels("cpu", forced="reference"))
    assert found == (96 + 96 + 32) * 64 * (4 if device is CPU else 2) + 64 * 4


def test_plain_float32_matrices_that_stay_mapped_do_not_count(tmp_path: Path) -> None:
    names = ("q_proj", "o_proj")
    tensors = {f"model.layers.0.self_attn.{name}.weight": torch.ones(64, 64) for name in names}
    checkpoint = write(tmp_path, tensors | {"lm_head.weight": torch.ones(32, 64)})
    assert weight_demand(checkpoint, torch.float32, CPU, Kernels("cpu", forced="reference")) == 64 * 64 * 4


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("act_order", [False, True])
def test_of_linears_in_several_tensors_some_rows_are_prepared(
    backend: str | None, act_order: bool, tmp_path: Path
) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    stored = gptq.store(symmetric(randn(96, 128), 4, 32, torch.float16), 1)
    if act_order:
        stored["g_idx"] = stored["g_idx"].flip(0).roll(7)
    tensors = {f"a.{name}": tensor for name, tensor in stored.items()} | {"a.bias": torch.ones(96)}
    kernels = Kernels("cpu", backend)
    checkpoint = write(tmp_path, tensors, quantization=config)
    weights = CheckpointWeights(checkpoint, AsStored(), Shard(), torch.float32, CPU, kernels)
    weights.column([Part("a", 96)], 128)
    assert weight_demand(checkpoint, torch.float32, CPU, kernels) == weights.held + 96 * 4


@pytest.mark.skipif(not cpu.available(), reason=f"cpu kernels: {cpu.describe()}")
def test_packed_matrices_take_about_what_they_are_stored_in(tmp_path: Path) -> None:
    tensors = {
        "blk.0.ffn_up.weight": random_blocks("Q4_0", 96, 64),
        "blk.0.ffn_gate.weight": random_blocks("Q8_0", 96, 64),
    }
    checkpoint = write(tmp_path, tensors, {name: "Q4_0" if "up" in name else "Q8_0" for name in tensors})
    assert weight_demand(checkpoint, torch.float32, CPU, Kernels("cpu")) == 96 * 64 // 32 * (18 + 34)


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_weights_are_known_from_their_shape(backend: str | None, dtype: torch.dtype) -> None:
    family, shape = random_shape("tiny")
    kernels = Kernels("cpu", forced=backend)
    weights = RandomWeights(0, dtype, CPU, kernels)
    family.Model(shape, weights, kernels, length=64, device=CPU)
    assert random_demand(shape, dtype, CPU, kernels) == weights.held


def test_what_fits_passes_and_what_does_not_names_the_flag_that_makes_it_fit() -> None:
    check(weights=8 * GIB, free=10 * GIB)
    with pytest.raises(UsageError, match=r"weights take 8\.80 GiB .* 8\.50 GiB may be used") as caught:
        check(weights=int(8.8 * GIB), free=10 * GIB)
    assert caught.value.hint is not None
    found = re.search(r"raise --memory-utilization to at least ([\d.]+)", caught.value.hint)
    assert found is not None
    check(weights=int(8.8 * GIB), free=10 * GIB, memory_utilization=float(found[1]))
    with pytest.raises(UsageError) as caught:
        check(weights=12 * GIB, free=10 * GIB)
    assert "--memory-utilization" not in str(caught.value.hint)
    assert "smaller model" in str(caught.value.hint)


def test_a_context_that_was_asked_for_counts_and_the_longest_that_fits_is_named() -> None:
    free, weights = 10 * 2**20, 8 * 2**20  # 8.5 MiB may be used: half a MiB is left, 1024 tokens
    check(weights, free, length=1000, max_model_len=1000)
    with pytest.raises(UsageError, match="keys and values at least") as caught:
        check(weights, free, length=2000, max_model_len=2000)
    found = re.search(r"lower --max-model-len to at most (\d+)", str(caught.value.hint))
    assert found is not None
    most = int(found[1])
    check(weights, free, length=most, max_model_len=most)
    with pytest.raises(UsageError):
        check(weights, free, length=most + 17, max_model_len=most + 17)
    check(weights, free, length=2000)  # nobody asked for it: the engine shortens it


def test_a_cache_of_a_given_size_must_fit_beside_the_weights() -> None:
    check(weights=8 * GIB, free=10 * GIB, kv_cache_bytes=2 * GIB)
    with pytest.raises(UsageError) as caught:
        check(weights=8 * GIB, free=10 * GIB, kv_cache_bytes=2 * GIB + 1)
    assert f"lower --kv-cache-bytes to at most {2 * GIB}" in str(caught.value.hint)


def test_ranks_on_devices_of_their_own_share_the_weights() -> None:
    with pytest.raises(UsageError, match="on each device") as caught:
        check(weights=16 * GIB, free=10 * GIB, device=CUDA)
    assert "--tp above 1" in str(caught.value.hint)
    check(weights=16 * GIB, free=10 * GIB, device=CUDA, tensor_parallel_size=2)
    with pytest.raises(UsageError):  # on the CPU they share the machine
        check(weights=16 * GIB, free=10 * GIB, tensor_parallel_size=2)


def test_an_engine_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "available_memory", lambda device: 2**20)
    monkeypatch.setattr(build, "RandomWeights", None)  # would be called to load
    config = replace(CONFIG, model="random:llama-8b")
    with pytest.raises(UsageError, match=r"random:llama-8b does not fit: its weights take 29\.91 GiB"):
        build.build_engine(config)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
            "The device ran out of memory",
        ),
        (MemoryError(), "This machine ran out of memory while loading it"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."), "9 bytes."),
    ],
)
def test_memory_that_runs_out_names_the_knobs(error: Exception, says: str) -> None:
    found = out_of_memory(error, "loading it", 0.9)
    assert found is not None
    assert says in found.message
    assert found.hint is not None
    assert found.hint.startswith("lower --memory-utilization (now 0.9)")
    assert "\n" not in found.message


def test_other_errors_stay_what_they_are() -> None:
    assert out_of_memory(RuntimeError("shape mismatch"), "loading it") is None
    assert out_of_memory(ValueError("memory"), "loading it") is None


def test_memory_that_runs_out_in_a_step_is_a_sentence() -> None:
    core = Core.load(replace(CONFIG, kv_cache_bytes=2**20))

    def step() -> None:
        raise MemoryError

    core.engine.step = step  # type: ignore[method-assign, assignment]
    with pytest.raises(LlmxError, match="ran out of memory while computing"):
        core.step()
