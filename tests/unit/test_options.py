"""The options that commands share: every name, and what they mean to the engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from llmx.commands import options as o
from llmx.config import EngineConfig
from llmx.errors import UsageError

app = typer.Typer()
got: list[EngineConfig] = []


@app.command()
def command(
    model: o.Model = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    kv_cache_dtype: o.KvCacheDtype = "auto",
    max_model_len: o.MaxModelLen = None,
    max_num_seqs: o.MaxNumSeqs = None,
    max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    memory_utilization: o.MemoryUtilization = 0.9,
    block_size: o.BlockSize = 16,
    prefix_caching: o.PrefixCaching = True,
    threads: o.Threads = None,
    seed: o.Seed = None,
) -> None:
    name, _ = o.choose_model(model)
    flags = {k: v for k, v in locals().items() if k not in ("model", "name", "_")}
    got.append(o.engine_config(name, **flags))


def parse(*args: str) -> EngineConfig:
    got.clear()
    result = CliRunner().invoke(app, list(args), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return got.pop()


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("--dtype bfloat16", "dtype", "bfloat16"),
        ("--device cuda:1", "device", "cuda:1"),
        ("--kv-cache-dtype float32", "kv_cache_dtype", "float32"),
        ("--max-model-len 77", "max_model_len", 77),
        ("--model-len 77", "max_model_len", 77),
        ("--max-num-seqs 3", "max_num_seqs", 3),
        ("--max-num-batched-tokens 99", "max_num_batched_tokens", 99),
        ("--gpu-memory-utilization 0.5", "memory_utilization", 0.5),
        ("--memory-utilization 0.5", "memory_utilization", 0.5),
        ("--block-size 32", "block_size", 32),
        ("--no-prefix-caching", "prefix_caching", False),
        ("--no-enable-prefix-caching", "prefix_caching", False),
        ("--enable-prefix-caching", "prefix_caching", True),
        ("--threads 5", "threads", 5),
        ("--seed 9", "seed", 9),
    ],
)
def test_each_flag_sets_its_field_and_no_other(flag: str, field: str, value: Any) -> None:
    want = dataclasses.replace(EngineConfig(model="m"), **{field: value})
    assert parse("m", *flag.split()) == want


def test_no_flags_are_the_defaults_of_the_engine() -> None:
    assert parse("m") == EngineConfig(model="m")


def test_no_model_is_the_demo_and_says_so(capsys) -> None:
    assert o.choose_model(None) == ("demo", True)
    assert capsys.readouterr().err.count("\n") == 1
    assert o.choose_model("demo") == ("demo", False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8 is not built"),
        ({"dtype": "int3"}, "--dtype int3"),
        ({"device": "tpu"}, "--device tpu"),
        ({"max_model_len": 0}, "--max-model-len"),
        ({"memory_utilization": 1.5}, "--memory-utilization"),
        ({"block_size": 17}, "--block-size"),
    ],
)
def test_what_cannot_be_is_refused_by_its_flag(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        o.engine_config("m", **flags)
