"""The arithmetic of a step's time, by hand on a machine whose every rate is a round number."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from llmx.formats.fields import Fields
from llmx.planning.anatomy import Anatomy, Attention
from llmx.planning.configs import from_config
from llmx.planning.hardware import LINK_LATENCY, NETWORK_LATENCY, Hardware, Rates
from llmx.planning.roofline import Rows, Term, pairs, predict, step, touched
from llmx.planning.sizes import Layout, Load

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "intermediate_size": 300,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
RATES = Rates(
    bandwidth=1e6,
    head_bandwidth=1e5,
    flops={"bf16": 1e9, "fp8": 2e9, "int8": 2e9},
    attention_bandwidth=1e4,
    attention_flops=1e7,
    elementwise=1e7,
    layer_seconds=0.5,
    step_seconds=3.0,
    token_seconds=0.25,
    link=1e5,
    network=1e4,
)
MACHINE = Hardware("round", "round", 2, 4, 2**30, RATES, "wire")
LOAD = Load(1024, 4, 512, 64, 2)
ATTENTION = 100 * 100 * 2 + 100 * 50 * 2
MLP = 3 * 100 * 300


def model() -> Anatomy:
    return from_config(Fields(CONFIG, "config.json"), "round")


def routed() -> Anatomy:
    config = CONFIG | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    return from_config(Fields(config, "config.json"), "round")


def terms(rows: Rows, layout: Layout | None = None, anatomy: Anatomy | None = None) -> dict[str, Term]:
    return {term.name: term for term in step(anatomy or model(), layout or Layout(), MACHINE, LOAD, rows)}


def test_one_token_reads_all_weights() -> None:
    found = terms(Rows(1, 1, 1, 100))
    assert found["attention"].seconds == pytest.approx(4 * ATTENTION * 2 / 1e6)
    assert found["mlp"].seconds == pytest.approx(4 * MLP * 2 / 1e6)
    assert found["head"].seconds == pytest.approx(1000 * 100 * 2 / 1e5)
    assert found["attention scores"].seconds == pytest.approx(4 * 100 * 2 * 5 * 10 * 2 / 1e4)
    assert found["overheads"].seconds == pytest.approx(4 * 0.5 + 3 + 0.25)
    assert "720 kB / 1 MB/s" in found["mlp"].formula
    assert "all-reduce" not in found


def test_a_long_prompt_computes() -> None:
    found = terms(Rows(2000, 1, 1, 2000))
    assert found["mlp"].seconds == pytest.approx(4 * 2 * MLP * 2000 / 1e9)
    queries_and_keys = 2000 * 2001 / 2
    assert found["attention scores"].seconds == pytest.approx(4 * 2 * 20 * 10 * queries_and_keys / 1e7)


@pytest.mark.parametrize("window", [None, 1, 7, 16, 40])
@pytest.mark.parametrize(("each", "context"), [(1, 1), (1, 30), (10, 10), (10, 30), (30, 30)])
def test_pairs_are_those_of_a_mask(window: int | None, each: int, context: int) -> None:
    keys = torch.arange(context)
    queries = keys[context - each :, None]
    mask = (keys <= queries) & (keys > queries - (window or context))
    assert pairs(Attention(1, 1, 1, 1, 2, window), each, context) == mask.sum()


def test_tensor_parallel_ranks_add_up_around_a_ring() -> None:
    found = terms(Rows(8, 8, 8, 100), Layout(tp=5))
    each = 2 * 4 / 5 * 8 * 100 * 2 / 1e5 + 8 * LINK_LATENCY
    assert found["all-reduce"].seconds == pytest.approx((2 * 4 + 1) * each)
    assert found["mlp"].seconds == pytest.approx(4 * MLP * 2 / 5 / 1e6)


def test_stages_send_rows_on_over_the_slower_wire_where_they_leave_the_machine() -> None:
    near, far = terms(Rows(8, 8, 8, 100), Layout(pp=2)), terms(Rows(8, 8, 8, 100), Layout(tp=4, pp=2))
    assert near["pipeline sends"].seconds == pytest.approx(8 * 200 / 1e5 + LINK_LATENCY)
    assert far["pipeline sends"].seconds == pytest.approx(8 * 200 / 4 / 1e4 + NETWORK_LATENCY)


def test_experts_are_read_where_a_token_goes_to_them() -> None:
    layer = routed().layers[0]
    assert touched(layer, 1) == 2 / 8
    draws = torch.stack([torch.randperm(8)[:2] for _ in range(4 * 4000)]).view(4000, -1)
    hit = sum(len(set(row.tolist())) for row in draws) / 4000 / 8
    assert touched(layer, 4) == pytest.approx(hit, rel=0.02)
    found = terms(Rows(1, 1, 1, 100), anatomy=routed())
    assert found["experts"].seconds == pytest.approx(4 * 8 * MLP * 2 / 4 / 1e6)


def test_spread_experts_get_the_tokens_of_all_replicas() -> None:
    found = terms(Rows(1000, 10, 10, 500), Layout(tp=1, dp=8, ep=8), routed())
    assert found["experts"].seconds == pytest.approx(4 * 2 * MLP * 1000 * 2 / 1e9)  # 8 x the tokens, 1/8 of the experts
    sent = 1000 * 2 * 200 * 7 / 8
    assert found["all-to-all"].seconds == pytest.approx(2 * 4 * (sent / 1e4 + NETWORK_LATENCY))


def test_schemes_with_faster_arithmetic_use_it() -> None:
    from llmx.planning.storage import quant

    plain, fp8 = (terms(Rows(9000, 1, 1, 9000), anatomy=a) for a in (model(), model().quantised(quant("fp8"))))
    assert fp8["mlp"].seconds == pytest.approx(plain["mlp"].seconds / 2)
    assert fp8["head"].seconds == plain["head"].seconds


def test_a_prediction_puts_steps_together() -> None:
    alone = replace(LOAD, concurrency=1)
    found = predict(model(), Layout(), MACHINE, alone)
    prefill = sum(t.seconds for t in step(model(), Layout(), MACHINE, alone, Rows(512, 1, 1, 512)))
    decode = sum(t.seconds for t in step(model(), Layout(), MACHINE, alone, Rows(1, 1, 1, 544)))
    assert found.ttft == pytest.approx(prefill)
    assert found.tbt == pytest.approx(decode)
    assert found.throughput == pytest.approx(64 / (prefill + 63 * decode))


def test_a_prompt_longer_than_a_step_takes_several() -> None:
    small = replace(MACHINE, budget=200)
    found = predict(model(), Layout(), small, replace(LOAD, concurrency=1))
    chunks = [(200, 0, 200), (200, 0, 400), (112, 1, 512)]
    parts = [t.seconds for n, s, end in chunks for t in step(model(), Layout(), small, LOAD, Rows(n, s, 1, end))]
    assert found.ttft == pytest.approx(sum(parts))


def test_replicas_multiply_throughput_and_stages_keep_each_other_busy() -> None:
    one, two = (predict(model(), Layout(dp=n), MACHINE, replace(LOAD, concurrency=4 * n)) for n in (1, 2))
    assert two.throughput == pytest.approx(2 * one.throughput)
    assert two.tbt == pytest.approx(one.tbt)
    many = replace(LOAD, concurrency=512)
    flat, deep = (predict(model(), Layout(pp=n), MACHINE, many) for n in (1, 2))
    assert deep.throughput > 1.3 * flat.throughput


def test_weights_that_are_held_in_another_form_are_read_in_it() -> None:
    held = replace(MACHINE, held=4.0)
    found = {t.name: t.seconds for t in step(model(), Layout(), held, LOAD, Rows(1, 1, 1, 100))}
    assert found["mlp"] == pytest.approx(4 * MLP * 4 / 1e6)
    assert found["head"] == pytest.approx(1000 * 100 * 4 / 1e5)
