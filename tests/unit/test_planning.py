"""Sizes against transformers' own models, the files themselves, and bytes computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llmx.errors import UsageError
from llmx.formats.fields import Fields
from llmx.formats.gguf import open_gguf
from llmx.models import families
from llmx.planning import gguf_header
from llmx.planning.anatomy import Anatomy
from llmx.planning.configs import FAMILIES, from_config
from llmx.planning.gguf_header import from_gguf
from llmx.planning.hardware import parse
from llmx.planning.plans import make
from llmx.planning.show import readable
from llmx.planning.sizes import Layout, Load, heads_fit, layouts, memory, stages
from llmx.planning.storage import QUANTS, ggml, grouped, kv_bytes, more_bits, quant
from llmx.schemes import schemes
from tests.tiny_models import Tiny, every_tiny

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
SMALL = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MLA = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "head_dim": 8}
ROUTED = {"moe_intermediate_size": 40, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("MixtralForCausalLM", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    ("Qwen3MoeForCausalLM", SMALL | {"num_experts": 8, "moe_intermediate_size": 40, "head_dim": 24}),
    ("Qwen3MoeForCausalLM", SMALL | {"num_experts": 8, "moe_intermediate_size": 40, "mlp_only_layers": [1]}),
    (
        "Qwen2MoeForCausalLM",
        SMALL
        | {"num_experts": 8, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48}
        | {"decoder_sparse_step": 2},
    ),
    ("DeepseekV2ForCausalLM", SMALL | MLA | ROUTED | {"q_lora_rank": None, "n_shared_experts": 2}),
    ("DeepseekV2ForCausalLM", SMALL | MLA | ROUTED | {"q_lora_rank": 20, "first_k_dense_replace": 2}),
    ("DeepseekV3ForCausalLM", SMALL | MLA | ROUTED | {"q_lora_rank": 20, "first_k_dense_replace": 1}),
    (
        "Llama4ForCausalLM",
        SMALL
        | {"intermediate_size_mlp": 80, "num_local_experts": 4, "interleave_moe_layer_step": 2, "head_dim": 16}
        | {"attention_chunk_size": 32},
    ),
    ("GptOssForCausalLM", SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
]


def planned(config: dict[str, Any], name: str = "it") -> Anatomy:
    return from_config(Fields(config, "config.json"), name)


def load(context: int = 4096, concurrency: int = 1, kv: int = 2) -> Load:
    return Load(context, concurrency, context * 3 // 4, context // 4, kv)


def by_transformers(architecture: str, options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """(config.json, the model without memory)."""
    oracle = getattr(transformers, architecture)
    made = oracle.config_class(**options)
    config = json.loads(made.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    with torch.device("meta"):
        return config, oracle._from_config(made)


@pytest.mark.parametrize("case", [(tiny.architecture, dict(tiny.options)) for tiny in every_tiny()] + OTHERS, ids=str)
def test_a_config_gives_as_many_parameters_as_transformers_makes_of_it(case: tuple[str, dict[str, Any]]) -> None:
    config, model = by_transformers(*case)
    found = planned(config)
    extra = 0  # V3's bias of the selection is a buffer there, and stored in checkpoints
    if case[0] == "DeepseekV3ForCausalLM":
        extra = sum(b.numel() for name, b in model.named_buffers() if "correction" in name)
    assert found.parameters == sum(p.numel() for p in model.parameters()) + extra
    assert found.tied == bool(model.config.tie_word_embeddings)


@pytest.mark.parametrize("tiny", every_tiny(), ids=lambda tiny: tiny.name)
def test_keys_and_values_are_those_that_the_engine_keeps(tiny: Tiny) -> None:
    config = tiny.config_json()
    specs = tiny.family.Config.from_hf(Fields(config, "config.json")).specs()
    layers = planned(config).layers
    assert [(s.kv_heads, s.head_dim, s.window) for s in specs] == [
        (a.attention.kv_heads, a.attention.key, a.attention.window) for a in layers
    ]


def test_what_runs_is_what_the_families_run() -> None:
    runs = {name for family in families() for name in family.ARCHITECTURES}
    assert {name for name, family in FAMILIES.items() if family.runs} == runs
    assert {name for family in families() for name in family.GGUF_ARCHITECTURES} == gguf_header.RUNS


def test_what_is_readable_is_what_has_a_scheme() -> None:
    known = {name.removeprefix("gguf_") for name in schemes()}
    for name in QUANTS:
        family = name.removesuffix("_m") if name in ("q4_k_m", "q5_k_m") else name.removesuffix("-block")
        if name == "mxfp4":  # here Hugging Face's layout of it, which isn't GGUF's
            continue
        assert readable(name) == (family in known or family in ("float32", "float16", "bfloat16")), name


def test_the_widths_of_the_engines_ranks_are_the_planners() -> None:
    for tiny in every_tiny():
        config = tiny.config_json()
        shape, found = tiny.family.Config.from_hf(Fields(config, "config.json")), planned(config)
        for ranks in range(1, 9):
            try:
                shape.check_ranks(ranks)
                fits = True
            except UsageError:
                fits = False
            assert heads_fit(found, ranks) == fits, (tiny.name, ranks)


def test_llama_3_70b_by_hand() -> None:
    found = planned(LLAMA_70B)
    attention = 8192 * 8192 * 2 + 8192 * 1024 * 2  # q and o; k and v
    layer = attention + 3 * 8192 * 28672 + 2 * 8192
    assert found.parameters == 80 * layer + 2 * 128256 * 8192 + 8192 == 70_553_706_496
    assert sum(found.weight_bytes().values()) == 2 * 70_553_706_496
    assert found.kv_kept(1, 2) == 80 * 2 * 8 * 128 * 2 == 327_680
    assert found.kv_kept(4096, 2) == 1_342_177_280  # 1.34 GB


def test_deepseek_v3_by_hand() -> None:
    found = planned(DEEPSEEK_V3)
    mla = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168 + 1536 + 512
    dense, expert = 3 * 7168 * 18432, 3 * 7168 * 2048
    routed = 256 * expert + expert + 256 * 7168 + 256
    total = 61 * (mla + 2 * 7168) + 3 * dense + 58 * routed + 2 * 129280 * 7168 + 7168
    assert found.parameters == total == 671_026_419_200  # what DeepSeek's report calls 671B
    active = 61 * (mla + 2 * 7168) + 3 * dense + 58 * (routed - 248 * expert) + 2 * 129280 * 7168 + 7168
    assert found.active_parameters == active
    assert 37e9 < active < 38e9
    assert found.kv_kept(1, 2) == 61 * (512 + 64) * 2 == 70_272
    experts = found.weight_bytes()["experts"]
    assert experts == 2 * 58 * 256 * expert


def test_deepseek_v3_as_it_is_stored() -> None:
    """FP8 with a float32 scale for each 128 x 128 block; embedding, head and router in bfloat16."""
    stored = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    found = planned(DEEPSEEK_V3 | stored).weight_bytes()
    expert = 3 * (7168 * 2048 + 4 * 56 * 16)
    assert found["experts"] == 58 * 256 * expert
    assert found["embedding"] == found["head"] == 2 * 129280 * 7168
    assert found["router"] == 58 * (2 * 256 * 7168 + 4 * 256)
    # 576 outputs are 4.5 blocks: the half one has scales of its own
    narrow = 7168 * 576 + 4 * 56 * 5
    rest = (7168 * 1536, 56 * 12), (1536 * 24576, 12 * 192), (512 * 32768, 4 * 256), (16384 * 7168, 128 * 56)
    assert found["attention"] == 61 * (narrow + sum(w + 4 * s for w, s in rest))


@pytest.mark.parametrize(
    ("name", "bits"),
    [("q4_0", 4.5), ("q8_0", 8.5), ("q4_k", 4.5), ("q6_k", 6.5625), ("q3_k", 3.4375), ("iq2_xxs", 2.0625)],
)
def test_gguf_types_have_the_bits_that_llama_cpp_states(name: str, bits: float) -> None:
    assert ggml(name.upper(), 4096).nbytes(4096, 4096) * 8 / 4096**2 == bits


def test_four_bit_groups_have_scales_and_zero_points() -> None:
    awq = grouped("awq", 4, 128, indexed=False).nbytes(4096, 4096)
    assert awq == 4096 * 4096 // 2 + 32 * 4096 * 2 + 32 * 4096 // 2  # qweight, scales, qzeros
    assert grouped("gptq", 4, 128, indexed=True).nbytes(4096, 4096) == awq + 4 * 4096  # g_idx


def test_rows_that_are_no_whole_blocks_fall_back_as_in_llama_cpp() -> None:
    assert ggml("Q4_K", 640).name == "Q5_0"
    assert ggml("Q6_K", 640).name == "Q8_0"
    assert ggml("Q4_K", 2048).name == "Q4_K"
    assert ggml("Q4_0", 40).name == "F16"
    assert [more_bits(i, 16) for i in range(16)].count(True) == 8


def test_the_demo_files_header_gives_the_bytes_of_the_file(demo: Path) -> None:
    file = open_gguf(demo)
    found = from_gguf(file, "demo")
    assert sum(found.weight_bytes().values()) == sum(file.stored(name).nbytes for name in file.names())
    assert found.parameters == 134_515_008
    assert (found.tied, found.stored, found.runs, found.kv_kept(1, 1)) == (True, "q4_1", True, 30 * 2 * 3 * 64)


def test_q4_k_m_of_llama_8b_is_as_large_as_the_file_that_people_know() -> None:
    config = LLAMA_70B | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    found = planned(config | {"intermediate_size": 14336}).quantised(quant("q4_k_m"))
    assert sum(found.weight_bytes().values()) == pytest.approx(4_920_734_000, rel=0.003)  # tensors of Meta-Llama-3-8B


def test_windows_keep_no_more_than_their_width() -> None:
    config, _ = by_transformers("Gemma3ForCausalLM", SMALL | {"head_dim": 16, "sliding_window": 32})
    found = planned(config | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]})
    assert found.kv_kept(500, 1) == (3 * 32 + 500) * 2 * 2 * 16


def test_one_device_has_its_share_of_heads_and_copies_what_cannot_be_split() -> None:
    found, hardware = planned(LLAMA_70B), parse("16xH100")
    whole = memory(found, Layout(), hardware, load(), 0)
    eighth = memory(found, Layout(tp=8), hardware, load(), 0)
    sixteenth = memory(found, Layout(tp=16), hardware, load(), 0)
    assert whole.kv == 8 * eighth.kv == 8 * sixteenth.kv  # 8 key-value heads: each of 16 ranks still has one
    assert whole.kv == 1_342_177_280
    kv = 80 * 2 * 1024 * 8192 * 2  # of which 16 ranks hold two copies each
    norms = 161 * 8192 * 2
    assert eighth.weights == (whole.weights - norms) // 8 + norms
    assert sixteenth.weights == (whole.weights - norms - kv) // 16 + kv // 8 + norms


def test_mla_keeps_the_whole_latent_on_every_rank() -> None:
    found, hardware = planned(DEEPSEEK_V3), parse("8xH200")
    for layout in (Layout(), Layout(tp=8)):
        assert memory(found, layout, hardware, load(), 0).kv == 4096 * 70_272


def test_experts_are_dealt_out_and_replicas_share_requests() -> None:
    found, hardware = planned(DEEPSEEK_V3), parse("16x8xH800")
    spread = memory(found, Layout(tp=1, dp=128, ep=128), hardware, load(concurrency=256), 0)
    assert spread.kv == 2 * 4096 * 70_272
    experts, rest = found.weight_bytes()["experts"], sum(found.weight_bytes().values())
    assert spread.weights == experts // 128 + rest - experts


def test_layouts_follow_the_rules() -> None:
    found = list(layouts(planned(DEEPSEEK_V3), parse("2x8xH800")))
    assert all(one.devices == 16 and one.tp <= 8 and one.ep in (1, one.tp * one.dp) for one in found)
    assert Layout(tp=8, pp=2) in found
    assert Layout(tp=2, dp=8, ep=16) in found
    assert {one.tp for one in layouts(planned(LLAMA_70B), parse("6xH100"))} == {1, 2}  # 64 heads in 3 or 6 don't go
    assert [s.stop - s.start for s in stages(61, 4)] == [16, 15, 15, 15]


def test_what_does_not_fit_gets_changes_with_the_bytes_they_save() -> None:
    found = make(planned(LLAMA_70B), parse("4xA100-80G"), load(concurrency=120))
    assert found.best is None
    texts = {change.text: change for change in found.changes}
    assert texts["store the weights in fp8 (--quant fp8)"].fits
    half = texts["store keys and values in int8 (--kv-dtype int8)"]
    scales = 4096 * 80 * 8 * 2 * 4  # a float32 for each head's keys and one for its values
    assert half.saves == 120 * (1_342_177_280 // 2 - scales) // 4
    fewer = next(c for text, c in texts.items() if "--concurrency" in text)
    most = int(fewer.text.rsplit(" ", 1)[1])
    assert make(planned(LLAMA_70B), parse("4xA100-80G"), load(concurrency=most)).best is not None
    assert make(planned(LLAMA_70B), parse("4xA100-80G"), load(concurrency=most + 1)).best is None
    shorter = next(c for text, c in texts.items() if "--context" in text)
    assert int(shorter.text.rsplit(" ", 1)[1]) < 4096
    assert any("--hardware 8xA100-80G" in text for text in texts)


def test_the_best_of_what_fits_has_the_highest_throughput() -> None:
    found = make(planned(LLAMA_70B), parse("8xH100"), load(concurrency=32))
    assert found.best is not None
    rates = [choice.speed.throughput for choice in found.choices if choice.speed]
    assert rates == sorted(rates, reverse=True)
    assert all(choice.memory.fits == (choice.speed is not None) for choice in found.choices)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' can't be planned"),
        ({"architectures": None}, "'none' can't be planned"),
        ({"num_key_value_heads": 7}, "64 attention heads can't share 7"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be a whole number between"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_a_config_that_cannot_be_planned_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        planned(LLAMA_70B | change)


@pytest.mark.parametrize("text", ["H1000", "0xH100", "xH100", "12xH100", "3x", "", "1x2x3xH100"])
def test_hardware_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--hardware"):
        parse(text)


def test_hardware_is_machines_of_devices() -> None:
    assert (parse("h100").nodes, parse("h100").per_node) == (1, 1)
    assert (parse("4xa100-80g").nodes, parse("4xA100-80G").per_node) == (1, 4)
    assert parse("A100-80GB").device == parse("A100-80G").device
    assert (parse("16x8xH800").nodes, parse("16x8xH800").per_node) == (16, 8)
    assert (parse("32xH100").nodes, parse("32xH100").per_node) == (4, 8)


def test_words_that_are_no_scheme_are_refused() -> None:
    with pytest.raises(UsageError, match="--quant int3"):
        quant("int3")
    with pytest.raises(UsageError, match="--kv-dtype int3"):
        kv_bytes("int3")
    with pytest.raises(UsageError, match="--context 8193"):
        make(planned(LLAMA_70B), parse("H100"), load(8193))
    with pytest.raises(UsageError, match="more than --context"):
        make(planned(LLAMA_70B), parse("H100"), replace(load(), input_len=4000))
