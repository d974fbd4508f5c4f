"""Against llama-perplexity itself: its logits file of a tiny model, and what it printed of another one beside it.

tests/data/make_llama_perplexity.py made both, and builds the models again here.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from llmx.config import EngineConfig
from llmx.evals import figures, measures
from llmx.evals.logits_file import LogitsFile
from llmx.evals.protocol import LLAMA, Protocol
from llmx.evals.run import Findings, Model, Plan, evaluate, open_tokenizer
from llmx.evals.text import Written
from llmx.formats.hub import locate

DATA = Path(__file__).parents[1] / "data"
LOGITS = DATA / "llama_perplexity.logits"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_llama_perplexity", DATA / "make_llama_perplexity.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models(maker: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    paths = {"base": root / "base.gguf", "other": root / "other.gguf"}
    maker.write_model(paths["base"])
    maker.write_model(paths["other"], maker.STRANGE)
    return paths


def run(path: Path, maker: ModuleType, **plan: Any) -> dict[str, Any]:
    located = locate(str(path))
    config = EngineConfig(model=str(path), device="cpu", dtype="float32", threads=1)
    found = Findings(Plan(Protocol(LLAMA, maker.CTX), maker.CHUNKS, **plan))
    evaluate(Model(config, located, open_tokenizer(located)), None, found, lambda line: None)
    return found.results()


@pytest.fixture(scope="module")
def said() -> dict[str, list[float]]:
    found: dict[str, list[float]] = json.loads(LOGITS.with_suffix(".json").read_text())
    return found


def test_perplexity_of_a_text_is_what_it_prints(
    models: dict[str, Path], maker: ModuleType, said: dict[str, list[float]]
) -> None:
    found = run(models["base"], maker, written=Written("file", "text", maker.TEXT))
    assert found["text"]["windows"] == maker.CHUNKS
    assert found["text"]["bos"] == len(maker.tokens()[0]) - 2
    value, error = said["perplexity_of_base"]
    assert found["perplexity"] == pytest.approx({"mean": value, "se": error}, rel=1e-4)


def test_every_figure_of_the_distance_is_what_it_prints(
    models: dict[str, Path], maker: ModuleType, said: dict[str, list[float]]
) -> None:
    found = run(models["other"], maker, logits=LogitsFile(LOGITS))
    for name in ("perplexity", "reference_perplexity", "ln_ppl_ratio", "ppl_ratio", "ppl_difference", "kld", "delta_p"):
        value, error = said[name]
        percent = 100 if name == "delta_p" else 1
        near = {"rel": 1e-3, "abs": 6e-4 if name == "delta_p" else 2e-5}
        assert percent * found[name]["mean"] == pytest.approx(value, **near), name
        assert percent * found[name]["se"] == pytest.approx(error, **near), name
    for name in ("kld", "delta_p"):
        for part in (key.split(".", 1)[1] for key in said if key.startswith(f"{name}.")):
            percent = 100 if name == "delta_p" else 1
            wanted = pytest.approx(said[f"{name}.{part}"][0], rel=2e-3, abs=1e-3 if percent > 1 else 2e-5)
            assert percent * found[name][part] == wanted, (name, part)
    assert 100 * found["delta_p"]["rms_se"] == pytest.approx(said["delta_p.rms"][1], abs=1e-3)
    assert 100 * found["same_top"]["share"] == pytest.approx(said["same_top"][0], abs=1e-3)
    assert 100 * found["same_top"]["se"] == pytest.approx(said["same_top"][1], abs=1e-3)
    assert 100 * found["nll_correlation"] == pytest.approx(said["nll_correlation"][0], abs=0.01)


def test_the_file_that_we_write_is_the_file_that_it_writes(
    models: dict[str, Path], maker: ModuleType, tmp_path: Path
) -> None:
    """Header and tokens in every byte; codes as near as the last bits of f32 logits let them be."""
    path = tmp_path / "ours"
    run(models["base"], maker, written=Written("file", "text", maker.TEXT), save_logits=path)
    ours, theirs = LogitsFile(path), LogitsFile(LOGITS)
    assert path.read_bytes()[: theirs.layout.start] == LOGITS.read_bytes()[: theirs.layout.start]
    for chunk in range(maker.CHUNKS):
        mine, his = (file.read(chunk, 0, theirs.layout.rows) for file in (ours, theirs))
        away = np.abs(mine[0].astype(int) - his[0].astype(int))
        assert away.max() <= 2
        assert (away > 0).mean() < 0.05
        assert mine[1] == pytest.approx(his[1], rel=1e-5)
        assert mine[2] == pytest.approx(his[2], rel=1e-5)


def test_a_logits_file_against_itself_is_no_distance() -> None:
    file = LogitsFile(LOGITS)
    scores = measures.decode(*file.read(0, 0, file.layout.rows), torch.device("cpu"))
    targets = torch.tensor(file.windows()[0][file.layout.ctx // 2 + 1 :])
    found = measures.compare(scores, scores, targets)
    assert found["same_top"].tolist() == [1.0] * file.layout.rows
    assert figures.mean_of(found["kld"].numpy())["mean"] == pytest.approx(0.0, abs=1e-4)
