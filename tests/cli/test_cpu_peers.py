"""The comparison with other engines: its arithmetic, its models, and processes that run only in their turns."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def samples(*values: float) -> list[dict[str, Any]]:
    return [{"round": i, "value": value} for i, value in enumerate(values)]


@pytest.fixture
def state() -> dict[str, Any]:
    rows = {
        "decode": {
            "llmx": samples(100, 220, 330),
            "llama.cpp": samples(50, 100, 100),
            "OpenVINO": samples(10, 200),
            "vLLM": [],
        }
    }
    check = {"tokens": 4, "prompts": [{}, {"parts_at": 2, "margin": 0.125}, {"parts_at": 0, "margin": None}]}
    model = {"title": "Random", "made": "here", "pass_bytes": 10**9, "rows": rows, "checks": {"llama.cpp": check}}
    probes = [{"round": i, "read_bandwidth": 4e11, "round_trip_ns": None, "load": 0.5} for i in range(3)]
    machine = {"cpu": {"model": "A", "isa": ["avx2"]}, "usable_processors": 2}
    return {
        "models": {"1b-q4_0": model | {"missing": {"vLLM": "no such file"}}},
        "probes": probes,
        "machine": machine,
        "started": "today",
        "commit": "abc",
        "how": {"decode": "so"},
    }


@pytest.mark.usefixtures("scripts")
def test_ratios_are_medians_of_quotients_within_rounds_and_the_best_peer_is_by_its_median(
    state: dict[str, Any],
) -> None:
    from peers.table import summaries

    found = summaries(state)["1b-q4_0"]
    ours = found["decode"]["llmx"]
    assert (ours["median"], ours["low"], ours["high"]) == (220, 100, 330)
    assert ours["best_peer"] == "OpenVINO"  # 105 against 100
    assert ours["ratios"]["llama.cpp"] == pytest.approx(2.2)  # of 2, 2.2 and 3.3
    assert ours["to_best_peer"] == pytest.approx((10 + 1.1) / 2)  # only rounds that both have
    assert "vLLM" not in found["decode"]
    assert found["bandwidth"]["llmx"]["share"] == pytest.approx(220e9 / 4e11)


@pytest.mark.usefixtures("scripts")
def test_the_table_says_what_is_missing_and_where_texts_part(state: dict[str, Any]) -> None:
    from peers.table import markdown

    page = markdown(state)
    assert "| Random, decode, 1 request | 220 (100–330) | 100 (50.0–100) | 105 (10.0–200, 2 rounds) | – | " in page
    assert "0.12 nats (token 3), beyond its 20 best" in page
    assert "Random, vLLM: not measured: no such file" in page
    assert "55 % of the read bandwidth" in page


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K"])
def test_random_blocks_are_finite_weights_of_the_usual_size(kind: str) -> None:
    import gguf
    import numpy as np
    from peers.models import STD, _blocks

    of = gguf.GGMLQuantizationType[kind]
    weights = gguf.dequantize(_blocks(np.random.default_rng(1), of, 64, 1024), of)
    assert weights.shape == (64, 1024)
    assert float(weights.std()) == pytest.approx(STD, rel=0.05)
    assert abs(float(weights.mean())) < 0.15 * STD  # Q4_0's codes are -8..7


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc whether a process is stopped")
@pytest.mark.usefixtures("scripts")
def test_a_contender_is_stopped_outside_its_turns(tmp_path: Path) -> None:
    from peers.processes import Held

    held = Held([sys.executable, "-c", "while True: pass"], tmp_path / "log")
    try:
        for _ in range(2):
            with held.turn():
                await_state(held.process.pid, "RS")
            await_state(held.process.pid, "T")
    finally:
        held.close()
    assert held.process.poll() is not None


def await_state(pid: int, states: str) -> None:
    while state_of(pid) not in states:
        time.sleep(0.01)


@pytest.mark.usefixtures("scripts")
def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    from peers.processes import Unavailable, Worker

    with pytest.raises(Unavailable, match="gone"):
        Worker(sys.executable, "llmx", {"model": "gone.gguf"}, tmp_path / "log", {"PYTHONPATH": str(ROOT)})


@pytest.fixture
def activation_kl(scripts: None) -> ModuleType:
    import activation_kl

    return activation_kl


def test_activations_are_judged_by_their_limits_and_by_llama_cpp(activation_kl: ModuleType) -> None:
    good = {"kld": [4e-3, 0], "same_top": [96.0, 0], "ppl_to_float32": 1.001}
    names = activation_kl.BF16, activation_kl.INT8
    assert activation_kl.verdicts(dict.fromkeys(names, good)) == []
    assert activation_kl.verdicts({names[1]: {"missing": "not built"}}) == []
    for error, count in ((0.5e-3, 1), (2e-3, 0)):
        theirs = {activation_kl.LLAMA_CPP: {"kld": [3e-3, error]}}
        assert len(activation_kl.verdicts({names[0]: good} | theirs)) == count
    bad = {"kld": [7e-3, 0], "same_top": [90.0, 0], "ppl_to_float32": 0.99}
    assert [len(activation_kl.verdicts({name: bad})) for name in names] == [3, 2]
