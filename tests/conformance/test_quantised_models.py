"""Tiny models stored in each of Hugging Face's quantised formats say what they say with the weights unpacked."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from quantised import METHODS, twins
from tiny_models import TOLERANCE, Saved, distance, every_tiny, load, make, open_folder, prompt_of, run
from torch import Tensor

from llmx.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Phi3ForCausalLM")  # plain; with biases; stored fused
TINY = {t.architecture: t for t in reversed(every_tiny()) if t.architecture in ARCHITECTURES}
SEEN = 40  # positions


@cache
def saved(architecture: str, folder: Path) -> Saved:
    return make(TINY[architecture], folder / architecture)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def logits(folder: Path) -> Tensor:
    opened = open_folder(folder)
    model, weights = load(opened, SEEN + 1)
    assert weights.unused() == ()
    return run(model, prompt_of(model.config.vocab, SEEN)).logits


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_model_says_what_its_unpacked_weights_say(
    method: str, architecture: str, home: Path, tmp_path: Path
) -> None:
    quantised, plain = twins(saved(architecture, home), method, tmp_path)
    found, wanted = logits(quantised), logits(plain)
    assert distance(found, wanted) < TOLERANCE
    assert distance(wanted, logits(saved(architecture, home).folder)) > 10 * TOLERANCE, "quantising changed nothing"


@pytest.mark.parametrize("method", ["packed", "fp8 rows"])
def test_transformers_says_the_same_of_what_we_stored(method: str, home: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors, with which transformers reads it, is missing")
    quantised, _ = twins(saved("LlamaForCausalLM", home), method, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.float32)
    with torch.no_grad():
        said = model(input_ids=torch.tensor([prompt_of(model.config.vocab_size, SEEN)])).logits[0]
    assert distance(logits(quantised), said) < TOLERANCE


def test_a_linear_that_lacks_a_tensor_is_named(home: Path, tmp_path: Path) -> None:
    quantised, _ = twins(saved("LlamaForCausalLM", home), "awq", tmp_path)
    path = quantised / "model.safetensors"
    held = safetensors.torch.load_file(path)
    del held["model.layers.1.mlp.up_proj.qzeros"]
    safetensors.torch.save_file(held, path)
    with pytest.raises(UsageError, match=r"model\.layers\.1\.mlp\.up_proj\.qzeros is missing"):
        open_folder(quantised)
