"""Tensor-parallel ranks as processes: they say what one says, in step with each other, and none outlives another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from distributed.processes import children, listeners, living, seconds_until_gone
from typer.testing import CliRunner

from llmx.cli import app
from llmx.config import EngineConfig
from llmx.core import Output, Request, SamplingParams
from llmx.device import thread_count
from llmx.engine import ranks
from llmx.engine.channel import Process
from llmx.engine.messages import Add
from llmx.engine.service import Core
from llmx.errors import LlmxError, UsageError
from llmx.llm import LLM

ROOT = Path(__file__).parent.parent.parent
PROMISED = 5.0  # seconds in which the death of one ends all: a promise to users, many times what it takes
ENGINE: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 64, "max_num_seqs": 8}
LONG = SamplingParams(temperature=0.0, max_tokens=1000)
LONG_PROMPT = tuple(range(3, 120))  # more than one step takes


def start(ranks: int, **options: Any) -> LLM:
    return LLM("random:tiny", tensor_parallel_size=ranks, **ENGINE, **options)


def processes_of(llm: LLM) -> list[subprocess.Popen[bytes]]:
    return [follower.process for follower in llm._client.core.followers._processes]


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with start(1) as llm:
        yield llm


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with start(2) as llm:
        yield llm


GREEDY = SamplingParams(temperature=0.0, max_tokens=20, seed=0)
ASKED: list[tuple[tuple[int, ...], SamplingParams]] = [
    ((1, 2, 3), GREEDY),
    (LONG_PROMPT, GREEDY),
    (LONG_PROMPT, replace(GREEDY, n=3, temperature=1.1, seed=5)),
    ((9, 8, 7), replace(GREEDY, temperature=0.9, top_p=0.9, seed=2**62 + 1)),
    ((4, 4, 4, 4), replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias=((7, 1.25),))),
    ((5,), replace(GREEDY, stop_token_ids=tuple(range(0, 256, 3)))),
]


def texts(outputs: list[Output]) -> list[Any]:
    return [[(c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs] for output in outputs]


def ask(llm: LLM) -> list[Output]:
    return llm.generate([prompt for prompt, _ in ASKED], [params for _, params in ASKED])


def test_requests_of_every_kind_together_say_what_one_rank_says(one: LLM, two: LLM) -> None:
    assert texts(ask(one)) == texts(ask(two))
    again = ask(two)
    assert texts(ask(one)) == texts(again)
    assert again[1].cached_tokens > 0
    assert (two.info.tensor_parallel_size, two.info.threads) == (2, max(1, thread_count() // 2))
    assert two.info.parameters == one.info.parameters
    assert one.info.weight_bytes < two.info.weight_bytes < 1.1 * one.info.weight_bytes  # norms count for each rank
    assert two.info.max_model_len == one.info.max_model_len
    assert two.info.num_blocks == one.info.num_blocks
    assert two.info.kv_cache_bytes == one.info.kv_cache_bytes


def test_aborted_and_refused_requests_leave_the_ranks_in_step(one: LLM, two: LLM) -> None:
    stream = two.open(LONG_PROMPT[:40], replace(LONG, n=2, max_tokens=900, temperature=1.0, seed=3))
    other = two.open((6, 5, 4), GREEDY)
    for _ in range(5):
        next(stream)
    stream.abort()
    two.send(Add(Request("too long", (1,), replace(GREEDY, max_tokens=100_000))))  # the core alone can refuse it
    assert [delta.token_ids for delta in other] == [delta.token_ids for delta in one.open((6, 5, 4), GREEDY)]
    assert texts(ask(two)) == texts(ask(one))
    metrics = two.metrics()
    assert (metrics.running, metrics.waiting, metrics.free_blocks) == (0, 0, metrics.total_blocks)
    assert two._client.core._untold == []


def test_an_idle_engine_keeps_nothing_of_what_was_refused(two: LLM) -> None:
    for i in range(3):
        two.send(Add(Request(f"refused {i}", (1,), replace(GREEDY, max_tokens=100_000))))
    two.metrics()  # the answer comes after them
    assert two._client.core._untold == []


def test_ranks_listen_on_the_loopback_interface_alone(two: LLM) -> None:
    found = {pid: listeners(pid) for pid in (os.getpid(), *(process.pid for process in processes_of(two)))}
    assert all(found.values())
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert {address for sockets in found.values() for address, _ in sockets} <= loopback


def test_a_second_engine_runs_beside_the_first_and_ends_whole_when_a_rank_is_killed_at_work(one: LLM, two: LLM) -> None:
    with LLM("random:tiny", config=replace(two.config, model="random:tiny", tensor_parallel_size=2)) as other:
        assert texts(other.generate([(1, 2, 3)], GREEDY)) == texts(one.generate([(1, 2, 3)], GREEDY))
        (rank_1,) = processes_of(other)
        streams = [other.open((i, 2), LONG) for i in (1, 2)]
        next(streams[0])
        rank_1.kill()
        began = time.monotonic()
        for stream in streams:
            with pytest.raises(LlmxError, match=r"rank 1 ended by signal 9; the engine can't go on\."):
                list(stream)
        assert time.monotonic() - began < PROMISED
        assert not other.alive()
        with pytest.raises(LlmxError, match="rank 1"):
            other.generate([(1,)], GREEDY)
    assert texts(two.generate([(1, 2, 3)], GREEDY)) == texts(one.generate([(1, 2, 3)], GREEDY))


def test_the_death_of_an_idle_rank_is_noticed_and_ends_the_others() -> None:
    with LLM("random:tiny", tensor_parallel_size=4, **ENGINE) as llm:
        followers = processes_of(llm)
        assert len(living(process.pid for process in followers)) == 3
        followers[1].kill()
        began = time.monotonic()
        while llm.alive():
            time.sleep(0.02)
        assert llm.failed == "Tensor-parallel rank 2 ended by signal 9; the engine can't go on."
        assert seconds_until_gone([process.pid for process in followers]) < PROMISED
        assert time.monotonic() - began < PROMISED


def test_a_spawned_core_ends_with_its_rank_and_says_which() -> None:
    with start(2, spawn=True) as llm:
        core = llm._client.process.pid
        (rank,) = children(core)
        stream = llm.open((1, 2), LONG)
        next(stream)
        os.kill(rank, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(LlmxError, match="rank 1 ended by signal 9"):
            list(stream)
        assert seconds_until_gone([core, rank]) < PROMISED
        assert time.monotonic() - began < PROMISED


FRONT = """
import time
from llmx.core import SamplingParams
from llmx.llm import LLM

options = dict(tensor_parallel_size=2, dtype="float32", threads=1)
engines = [LLM("random:tiny", **options), LLM("random:tiny", spawn=True, **options)]
streams = [llm.open((1, 2), SamplingParams(temperature=0.0, max_tokens=1000)) for llm in engines]
for stream in streams:
    next(stream)
print("they all run", flush=True)
time.sleep(600)
"""


def test_nothing_outlives_a_killed_front() -> None:
    front = subprocess.Popen([sys.executable, "-c", FRONT], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert front.stdout is not None
        assert front.stdout.readline() == b"they all run\n"
        others = children(front.pid)
        assert len(others) == 3
    finally:
        front.kill()
        front.communicate()
    assert seconds_until_gone(others) < PROMISED


# While it starts.


def folder_of(path: Path, *without: str) -> Path:
    """A Llama of one layer."""
    path.mkdir(exist_ok=True)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": 64, **sizes}
    (path / "config.json").write_text(json.dumps(config))
    block = "model.layers.0"
    shapes = {
        "model.embed_tokens": (64, 32), "model.norm": (32,), "lm_head": (64, 32),
        f"{block}.input_layernorm": (32,), f"{block}.post_attention_layernorm": (32,),
        f"{block}.self_attn.q_proj": (32, 32), f"{block}.self_attn.k_proj": (16, 32),
        f"{block}.self_attn.v_proj": (16, 32), f"{block}.self_attn.o_proj": (32, 32),
        f"{block}.mlp.gate_proj": (48, 32), f"{block}.mlp.up_proj": (48, 32), f"{block}.mlp.down_proj": (32, 48),
    }  # fmt: skip
    tensors = {f"{name}.weight": torch.ones(shape) for name, shape in shapes.items() if name not in without}
    safetensors.torch.save_file(tensors, path / "new.safetensors")
    (path / "new.safetensors").rename(path / "model.safetensors")
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Process], None]], list[Process]]:
    """Has something done to each rank's process as soon as it is started; gives those that were."""

    def arrange(do: Callable[[Process], None]) -> list[Process]:
        made: list[Process] = []

        class Watched(Process):
            def __init__(self) -> None:
                super().__init__()
                made.append(self)
                do(self)

        monkeypatch.setattr(ranks, "Process", Watched)
        return made

    return arrange


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(folder), tensor_parallel_size=2, dtype="float32")


def all_gone(made: list[Process]) -> bool:
    return bool(made) and not living(process.process.pid for process in made)


def test_a_rank_that_finds_its_files_gone_ends_the_start_with_its_sentence(started: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    made = started(lambda _: (folder / "config.json").unlink())
    with pytest.raises(UsageError, match=r"config\.json"):
        Core.load(config_of(folder))
    assert all_gone(made)


def test_a_rank_that_can_not_load_its_share_ends_the_start_with_its_sentence(started: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    made = started(lambda _: folder_of(folder, "model.norm"))  # rank 0 has the old file open
    with pytest.raises(UsageError, match=r"The checkpoint has no tensor model\.norm\.weight"):
        Core.load(config_of(folder))
    assert all_gone(made)


def test_rank_0_that_can_not_load_its_share_leaves_nothing_behind(started: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "model.norm")
    made = started(lambda _: None)
    with pytest.raises(UsageError, match=r"The checkpoint has no tensor model\.norm\.weight"):
        Core.load(config_of(folder))
    assert all_gone(made)


def test_a_rank_killed_while_it_loads_ends_the_start(started: Any, monkeypatch: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    made = started(lambda _: None)
    join = ranks.Ranks.join

    def join_and_kill(group: Any) -> None:
        join(group)
        made[0].process.kill()

    monkeypatch.setattr(ranks.Ranks, "join", join_and_kill)
    with pytest.raises(LlmxError, match="rank 1 ended by signal 9"):
        Core.load(config_of(folder))
    assert all_gone(made)


@pytest.mark.parametrize("when", ["told", "before it is told"])
def test_a_rank_that_dies_while_it_starts_ends_the_start(when: str, started: Any, tmp_path: Path) -> None:
    def strike(process: Process) -> None:
        process.process.kill()
        if when == "before it is told":
            process.process.wait()  # so that nobody is there to read what it is told

    made = started(strike)
    with pytest.raises(LlmxError, match="rank 1 ended by signal 9"):
        Core.load(config_of(folder_of(tmp_path / "model")))
    assert all_gone(made)


def test_ctrl_c_while_ranks_start_leaves_nothing_behind(started: Any, tmp_path: Path) -> None:
    def strike(process: Process) -> None:
        def interrupted(timeout: float | None) -> Any:
            raise KeyboardInterrupt

        process.channel.receive = interrupted  # type: ignore[method-assign]

    made = started(strike)
    with pytest.raises(KeyboardInterrupt):
        Core.load(config_of(folder_of(tmp_path / "model")))
    assert all_gone(made)


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_ranks_that_can_not_share_the_heads_are_refused_with_those_that_can(
    command: str, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "Process", None)  # nothing is started
    where = ["--model", str(demo), "hello"] if command == "generate" else [str(demo)]
    result = CliRunner().invoke(app, [command, "--tp", "2", *where])
    assert result.exit_code == 2
    assert "error: 9 attention heads can't be split over 2 ranks; 1, 3 or 9 would do." in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_three_ranks_say_of_the_demo_file_what_one_says(demo: Path) -> None:
    # A sum in another order may round to another whole number of 8 bits.
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "activations": "bf16"}
    prompts = ["The capital of France is", "def fibonacci(n):"]
    params = SamplingParams(temperature=0.0, max_tokens=32, logprobs=2)
    with LLM(str(demo), **options) as llm:
        whole = llm.generate(prompts, params)
    with LLM(str(demo), tensor_parallel_size=3, **options) as llm:
        cut = llm.generate(prompts, params)
    for mine, theirs in zip(whole, cut, strict=True):
        expect_same(mine, theirs)


def expect_same(mine: Output, theirs: Output, noise: float = 1e-3) -> None:
    """Equal greedy tokens, up to the first near tie: two tokens whose log-probabilities are within noise."""
    for ours, other in zip(mine.outputs[0].logprobs or (), theirs.outputs[0].logprobs or (), strict=True):
        assert ours.value == pytest.approx(other.value, abs=noise)
        if ours.token != other.token:
            (_, first), (_, second) = ours.top[:2]
            assert first - second < noise, f"{ours} and {other} are no near tie"
            return
    assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
