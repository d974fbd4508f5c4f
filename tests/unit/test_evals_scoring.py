"""Scores of whole models: against transformers in float64, and the same bits however the engine cuts its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_gguf import write_gguf
from tiny_models import Saved, every_tiny, logits_of, make

from llmx.config import EngineConfig
from llmx.errors import LlmxError, UsageError
from llmx.evals import measures
from llmx.evals.logits_file import Layout, LogitsFile, LogitsWriter
from llmx.evals.protocol import HF, LLAMA, Protocol
from llmx.evals.scoring import Scorer, Scores

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # transformers, of tiny configs
CTX, BOS = 48, 1
CPU = {"device": "cpu", "dtype": "float32", "threads": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """A Llama, and a Gemma 3 with windows; transformers' view of both."""
    root = tmp_path_factory.mktemp("models")
    wanted = ("LlamaForCausalLM", "Gemma3ForCausalLM")
    found: dict[str, Saved] = {}
    for tiny in every_tiny():
        if tiny.architecture in wanted and tiny.architecture not in found:
            found[tiny.architecture] = make(tiny, root / tiny.architecture)
    return found


def windows_of(vocab: int, count: int = 3) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(3, vocab, (count, CTX), generator=generator)
    return [tuple(window) for window in drawn.tolist()]


def oracle(model: Any, windows: list[tuple[int, ...]], protocol: str) -> tuple[np.ndarray, list[torch.Tensor]]:
    """ln p (windows, positions) and log-probabilities (positions, vocab) per window, by transformers in float64."""
    values, every = [], []
    for window in windows:
        read = (BOS, *window[1:]) if protocol == LLAMA else window
        scores = logits_of(model, read).double().log_softmax(-1)
        first = CTX // 2 if protocol == LLAMA else 0
        every.append(scores[first : CTX - 1])
        values.append([float(scores[i, window[i + 1]]) for i in range(first, CTX - 1)])
    return np.array(values), every


def score(model: str | Path, protocol: str, windows: list[tuple[int, ...]], **more: Any) -> Scores:
    own = ("max_num_batched_tokens", "max_num_seqs", "tensor_parallel_size", "overlap")
    engine = {k: more.pop(k) for k in own if k in more}
    with Scorer(EngineConfig(model=str(model), **CPU, **engine), Protocol(protocol, CTX)) as scorer:
        scores, interrupted = scorer.score(windows, BOS if protocol == LLAMA else None, **more)
    assert not interrupted
    assert scores.done.all()
    return scores


@pytest.mark.parametrize("protocol", [LLAMA, HF])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
def test_log_likelihoods_are_those_of_transformers(saved: dict[str, Saved], architecture: str, protocol: str) -> None:
    model = saved[architecture]
    windows = windows_of(model.config["vocab_size"])
    wanted, _ = oracle(model.model, windows, protocol)
    found = score(model.folder, protocol, windows).values["ln_p"]
    assert found.shape == wanted.shape
    assert found == pytest.approx(wanted, abs=2e-4)


def test_a_gguf_of_the_same_weights_scores_the_same(saved: dict[str, Saved], tmp_path: Path) -> None:
    model = saved["LlamaForCausalLM"]
    windows = windows_of(model.config["vocab_size"])
    write_gguf(tmp_path / "it.gguf", "LlamaForCausalLM", "llama", model.config, model.tensors)
    wanted, _ = oracle(model.model, windows, LLAMA)
    assert score(tmp_path / "it.gguf", LLAMA, windows).values["ln_p"] == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize(
    "steps",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 1},
        {"max_num_batched_tokens": 70},
        {"max_num_batched_tokens": 70, "overlap": True},
    ],
)
def test_the_same_bits_come_out_however_windows_share_steps(saved: dict[str, Saved], steps: dict[str, int]) -> None:
    model = saved["Gemma3ForCausalLM"]
    windows = windows_of(model.config["vocab_size"], 5)
    one = score(model.folder, LLAMA, windows, max_num_batched_tokens=512).values["ln_p"]
    assert np.array_equal(one, score(model.folder, LLAMA, windows, **steps).values["ln_p"])


def test_pieces_of_logits_are_bounded(saved: dict[str, Saved], monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved["LlamaForCausalLM"]
    vocab = model.config["vocab_size"]
    windows = windows_of(vocab)
    whole = score(model.folder, LLAMA, windows).values["ln_p"]
    monkeypatch.setattr("llmx.engine.engine.SCORE_BYTES", 8 * 4 * vocab)
    rows: list[int] = []
    measure = measures.log_likelihoods

    def counting(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows.append(len(logits))
        return measure(logits, targets)

    monkeypatch.setattr(measures, "log_likelihoods", counting)
    assert np.array_equal(whole, score(model.folder, LLAMA, windows).values["ln_p"])
    assert max(rows) == 8
    assert sum(rows) == 3 * (CTX - 1 - CTX // 2)


@pytest.fixture(scope="module")
def base(saved: dict[str, Saved], tmp_path_factory: pytest.TempPathFactory) -> LogitsFile:
    """The Llama's own logits in a file."""
    model = saved["LlamaForCausalLM"]
    vocab = model.config["vocab_size"]
    windows, path = windows_of(vocab), tmp_path_factory.mktemp("logits") / "it"
    with LogitsWriter(path, Layout(CTX, vocab, len(windows)), windows) as out:
        score(model.folder, LLAMA, windows, out=out)
        return out.finish()


def test_a_model_is_no_distance_from_its_own_logits(saved: dict[str, Saved], base: LogitsFile) -> None:
    found = score(saved["LlamaForCausalLM"].folder, LLAMA, base.windows(), base=base).values
    assert found["same_top"].mean() > 0.97  # two may be closer than the file's 16 bits
    assert found["kld"] == pytest.approx(0.0, abs=1e-4)  # the file's probabilities don't quite sum to 1
    assert found["kld"].mean() == pytest.approx(0.0, abs=1e-5)
    assert found["ln_p_base"] == pytest.approx(found["ln_p"], abs=2e-4)


def test_the_distance_of_two_models_is_that_of_float64(saved: dict[str, Saved], base: LogitsFile) -> None:
    one = saved["LlamaForCausalLM"]
    _, wanted = oracle(one.model, base.windows(), LLAMA)
    for i, scores in enumerate(wanted):
        codes, scale, least = base.read(i, 0, base.layout.rows)
        found = measures.decode(codes, scale, least, torch.device("cpu"))
        near = scores > scores.amax(-1, keepdim=True) - 16
        assert (found - scores)[near].abs().max() < 4e-4
    changed = {name: value + 0.05 * torch.randn_like(value) for name, value in one.tensors.items()}
    import safetensors.torch

    folder = base.path.parent / "other"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((one.folder / "config.json").read_bytes())
    safetensors.torch.save_file(changed, folder / "model.safetensors")
    with torch.no_grad():
        originals = {name: p.clone() for name, p in one.model.named_parameters()}
        for name, p in one.model.named_parameters():
            p.copy_(changed[name])
        _, others = oracle(one.model, base.windows(), LLAMA)
        for name, p in one.model.named_parameters():
            p.copy_(originals[name])
    kld = [(p.exp() * (p - q)).sum(-1) for p, q in zip(wanted, others, strict=True)]
    found = score(folder, LLAMA, base.windows(), base=base).values["kld"]
    assert found.mean() == pytest.approx(float(torch.stack(kld).mean()), rel=1e-3)
    assert found == pytest.approx(torch.stack(kld).numpy(), rel=0.02, abs=1e-4)
    assert found.mean() > 0.01


def test_models_of_other_vocabularies_are_refused(saved: dict[str, Saved], base: LogitsFile) -> None:
    with Scorer(EngineConfig(model="random:tiny", **CPU), Protocol(LLAMA, CTX)) as scorer:
        vocab = scorer.info.vocab_size
        assert vocab != base.layout.vocab
        with pytest.raises(UsageError, match=f"has a vocabulary of {vocab}, the reference logits have"):
            scorer.score([(0,) * CTX], None, base=base)
        with pytest.raises(UsageError, match=f"The text has the token {vocab}; random:tiny has"):
            scorer.score([(vocab,) * CTX], None)


def test_several_ranks_score_as_one(saved: dict[str, Saved]) -> None:
    model = saved["LlamaForCausalLM"]
    windows = windows_of(model.config["vocab_size"])
    one = score(model.folder, LLAMA, windows).values["ln_p"]
    assert score(model.folder, LLAMA, windows, tensor_parallel_size=2).values["ln_p"] == pytest.approx(one, abs=1e-4)


def test_logits_that_are_not_numbers_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    nan = torch.tensor(torch.nan)
    monkeypatch.setattr(measures, "log_likelihoods", lambda logits, targets: nan.expand(len(targets)).double())
    with (
        Scorer(EngineConfig(model="random:tiny", **CPU), Protocol(LLAMA, CTX)) as scorer,
        pytest.raises(LlmxError, match="in window 1 are not numbers"),
    ):
        scorer.score([tuple(range(CTX))], None)


@pytest.fixture
def interrupting() -> Any:
    """A line's receiver that behaves as a Ctrl-C behind the second window does."""
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if line.startswith("2 of"):
            raise KeyboardInterrupt

    return say


def test_an_interrupt_keeps_the_windows_that_are_whole(interrupting: Any) -> None:
    config = EngineConfig(model="random:tiny", max_num_batched_tokens=CTX, max_num_seqs=1, **CPU)
    windows = windows_of(256, 6)
    with Scorer(config, Protocol(LLAMA, CTX)) as scorer:
        scores, interrupted = scorer.score(windows, None, say=interrupting)
    assert interrupted
    assert scores.done.tolist() == [True, True, False, False, False, False]
    assert len(scores.whole()["ln_p"]) == 2 * (CTX - 1 - CTX // 2)


def test_a_model_s_own_text_is_the_same_however_many_are_written_at_once() -> None:
    def text(together: int, seed: int) -> list[int]:
        config = EngineConfig(model="random:tiny", max_num_seqs=together, **CPU)
        with Scorer(config, Protocol(LLAMA, CTX)) as scorer:
            return scorer.write(0, frozenset({7}), 200, seed)

    one = text(1, 5)
    assert one == text(4, 5)
    assert len(one) == 200
    assert one != text(4, 6)
    starts = [i for i, token in enumerate(one) if token == 0 and (i == 0 or one[i - 1] == 7 or i % CTX == 0)]
    assert starts[0] == 0
