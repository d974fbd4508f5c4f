"""What each rank reads: its part of what is cut, all of what is not, and nothing else; and what can't be cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import AsStored, random_blocks, write
from distributed.threads import CPU, Place, load
from tiny_gguf import write_gguf
from tiny_models import Tiny, build, every_tiny, open_folder, open_gguf_file, save

from llmx.errors import UsageError
from llmx.formats.checkpoint import Checkpoint, Stored
from llmx.formats.hub import Located
from llmx.kernels import Kernels
from llmx.loading import CheckpointWeights, Shard
from llmx.models import Opened, open_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # transformers, of tiny configs
WHOLE = ("norm.weight", "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
FUSED = (".qkv_proj.weight",)
KEYS = tuple(f".{part}" for part in ("k_proj.weight", "v_proj.weight", "attn_k.weight", "attn_v.weight"))


class Counted:
    """A checkpoint that counts the bytes read of each tensor."""

    def __init__(self, inner: Checkpoint) -> None:
        self._inner, self.kind, self.quantization, self.read_of = inner, inner.kind, inner.quantization, Counter[str]()

    def names(self) -> Any:
        return self._inner.names()

    def __contains__(self, name: str) -> bool:
        return name in self._inner

    def stored(self, name: str) -> Stored:
        return self._inner.stored(name)

    def read(self, name: str, slices: Mapping[int, tuple[int, int]] | None = None) -> torch.Tensor:
        before = self._inner.bytes_read
        found = self._inner.read(name, slices or {})
        self.read_of[name] += self._inner.bytes_read - before
        return found


def shares(opened: Callable[[], Opened], ranks: int) -> list[Counted]:
    found = []
    for rank in range(ranks):
        model = opened()
        counted = Counted(model.checkpoint)
        _, weights = load(replace(model, checkpoint=counted), 32, Place(rank, ranks))
        assert weights.bytes == sum(counted.read_of.values())
        found.append(counted)
    return found


def share(name: str, config: Any, ranks: int) -> Fraction:
    """Which part of a tensor each rank needs: one of equal parts, a key head at least, norms whole."""
    if name.endswith(WHOLE):
        return Fraction(1)
    keys = max(Fraction(1, ranks), Fraction(1, config.kv_heads))
    if name.endswith(KEYS):
        return keys
    if name.endswith(FUSED):
        return (Fraction(config.heads, ranks) + 2 * config.kv_heads * keys) / (config.heads + 2 * config.kv_heads)
    return Fraction(1, ranks)


def expect_shares(opened: Callable[[], Opened], ranks: int) -> None:
    """Each rank reads just its share of every tensor, once."""
    read, whole = shares(opened, ranks), opened()
    for name in whole.checkpoint.names():
        wanted = whole.checkpoint.stored(name).nbytes * share(name, whole.config, ranks)
        assert [counted.read_of[name] for counted in read] == [wanted] * ranks, name
    assert all(counted.read_of.keys() == set(whole.checkpoint.names()) for counted in read)


def tiny_of(architecture: str) -> Tiny:
    return next(tiny for tiny in every_tiny() if tiny.architecture == architecture)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM", "Olmo2ForCausalLM"])
def test_each_rank_reads_its_part_and_no_byte_more(architecture: str, tmp_path: Path) -> None:
    tiny = tiny_of(architecture)
    config = tiny.config_json() | {"num_hidden_layers": 1}
    folder = save(tmp_path / "model", config, build(tiny.oracle, config))
    for ranks in (2, 4):
        expect_shares(lambda: open_folder(folder), ranks)


def test_each_rank_reads_its_part_of_a_gguf_file_with_permuted_rows(tmp_path: Path) -> None:
    tiny = tiny_of("LlamaForCausalLM")
    config = tiny.config_json() | {"num_hidden_layers": 1}
    tensors = {n: p.detach().float() for n, p in build(tiny.oracle, config).named_parameters()}
    write_gguf(tmp_path / "model.gguf", tiny.architecture, "llama", config, tensors)
    for ranks in (2, 4):
        expect_shares(lambda: open_gguf_file(tmp_path / "model.gguf"), ranks)


def test_each_of_three_ranks_reads_a_third_of_the_demo_file(demo: Path) -> None:
    expect_shares(lambda: open_model(Located("gguf", demo, demo.name, True)), 3)


def test_nine_ranks_share_the_demo_file_though_its_mlp_has_no_nine_equal_parts(demo: Path) -> None:
    def opened() -> Opened:
        return open_model(Located("gguf", demo, demo.name, True))

    opened().config.check_ranks(9)
    read = shares(opened, 9)
    for part in ("ffn_gate", "ffn_up", "ffn_down"):  # 48 blocks of 32
        parts = [counted.read_of[f"blk.0.{part}.weight"] for counted in read]
        whole = opened().checkpoint.stored(f"blk.0.{part}.weight").nbytes
        assert sum(parts) == whole
        assert {nbytes * 48 // whole for nbytes in parts} == {5, 6}


def test_rows_are_cut_between_blocks_or_refused_in_a_sentence(tmp_path: Path) -> None:
    """Q4_K stores 256 weights together."""
    checkpoint = write(tmp_path, {"down.weight": random_blocks("Q4_K", 64, 512)}, {"down.weight": "Q4_K"})
    kernels = Kernels("cpu", "reference")

    def weights(rank: int, size: int) -> CheckpointWeights:
        return CheckpointWeights(checkpoint, AsStored(), Shard(rank, size), torch.float32, CPU, kernels)

    x = torch.linspace(-1, 1, 3 * 512).reshape(3, 512)
    parts = [weights(r, 2).row("down", 64, 512)(x[:, r * 256 : r * 256 + 256].contiguous()) for r in (0, 1)]
    torch.testing.assert_close(parts[0] + parts[1], weights(0, 1).row("down", 64, 512)(x), rtol=1e-4, atol=1e-3)
    with pytest.raises(UsageError) as refused:
        weights(1, 4).row("down", 64, 512)
    assert refused.value.message == (
        "down can't be cut to input features 128 to 256 of 512: its scheme stores 256 of them together."
    )
    assert refused.value.hint == "use a number of ranks that gives each a multiple of 256 features"
