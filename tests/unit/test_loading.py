"""Layers from a checkpoint: names, row order, biases, ranks, ties, totals and what goes wrong; and random weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from checkpoints import AsStored, randn, write
from torch import Tensor

from llmx.errors import UsageError
from llmx.formats.checkpoint import Checkpoint
from llmx.formats.hub import Located
from llmx.kernels import Kernels
from llmx.layers.linear import Linear
from llmx.layers.weights import Part, Weights
from llmx.loading import CheckpointWeights, RandomWeights, Shard
from llmx.models import open_model
from llmx.schemes import schemes

CPU = torch.device("cpu")
KERNELS = Kernels("cpu", "reference")


def load(checkpoint: Checkpoint, *, rank: int = 0, size: int = 1, names=None, dtype=torch.float32, progress=None):
    return CheckpointWeights(checkpoint, names or AsStored(), Shard(rank, size), dtype, CPU, KERNELS, progress)


def matrix(linear: Linear) -> Tensor:
    """The prepared weights of a linear with one segment."""
    (segment,) = linear.segments
    assert segment.prepared
    return segment.tensors["weight"]


def bias(linear: Linear) -> Tensor:
    (segment,) = linear.segments
    assert segment.bias is not None
    return segment.bias


def as_llama_cpp_stores(weight: Tensor, heads: int) -> Tensor:
    """The row order of llama.cpp's converter for q and k: rows or a bias."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_interleaved_rows_come_back_in_order_on_every_rank(size: int, tmp_path: Path) -> None:
    q, k, b = randn(6 * 16, 64), randn(size * 16, 64, seed=1), randn(6 * 16, seed=2)
    tensors = {
        "q.weight": as_llama_cpp_stores(q, 6),
        "q.bias": as_llama_cpp_stores(b, 6),
        "k.weight": as_llama_cpp_stores(k, size),
    }
    checkpoint = write(tmp_path, tensors)
    for rank in range(size):
        weights = load(checkpoint, rank=rank, size=size, names=AsStored({"q": 6, "k": size}))
        linear = weights.column([Part("q", 96, 6), Part("k", size * 16, size)], 64)
        assert torch.equal(matrix(linear), torch.cat([q.chunk(size)[rank], k.chunk(size)[rank]]))
        assert torch.equal(bias(linear), torch.cat([b.chunk(size)[rank], torch.zeros(16)]))


def test_four_ranks_share_two_key_heads_as_their_query_heads_need_them(tmp_path: Path) -> None:
    q, k = randn(8 * 4, 32), randn(2 * 4, 32, seed=1)
    checkpoint = write(tmp_path, {"q.weight": q, "k.weight": k})
    for rank, key_head in enumerate((0, 0, 1, 1)):
        linear = load(checkpoint, rank=rank, size=4).column([Part("q", 32, 8), Part("k", 8, 2)], 32)
        assert torch.equal(matrix(linear), torch.cat([q.chunk(4)[rank], k.chunk(2)[key_head]]))


def test_a_row_split_linear_has_its_bias_on_rank_0_alone(tmp_path: Path) -> None:
    weight, b = randn(10, 64), randn(10, seed=1)
    checkpoint = write(tmp_path, {"o.weight": weight, "o.bias": b})
    x = randn(3, 64, seed=2)
    parts = [load(checkpoint, rank=r, size=2).row("o", 10, 64, 2)(x.chunk(2, 1)[r].contiguous()) for r in (0, 1)]
    torch.testing.assert_close(parts[0] + parts[1], x @ weight.T + b, rtol=1e-5, atol=1e-5)
    assert load(checkpoint, rank=1, size=2).row("o", 10, 64, 2).segments[0].bias is None


def test_a_head_with_a_bias_pads_it_with_its_rows(tmp_path: Path) -> None:
    weight, b = randn(7, 32), randn(7, seed=1)
    checkpoint = write(tmp_path, {"h.weight": weight, "h.bias": b})
    heads = [load(checkpoint, rank=r, size=3).head("h", 7, 32, tied_to=None) for r in range(3)]
    assert torch.equal(torch.cat([matrix(h) for h in heads]), torch.cat([weight, torch.zeros(2, 32)]))
    assert torch.equal(torch.cat([bias(h) for h in heads]), torch.cat([b, torch.zeros(2)]))


def test_parts_stored_alike_are_one_matrix_and_others_stay_apart(tmp_path: Path) -> None:
    packed = {kind: schemes()[f"gguf_{kind.lower()}"] for kind in ("Q4_0", "Q8_0")}
    kinds = {"a.weight": "Q4_0", "b.weight": "Q4_0", "c.weight": "Q8_0", "e.weight": "Q4_0"}
    tensors = {n: packed[k].pack(randn(32, 64, seed=i), k)["weight"] for i, (n, k) in enumerate(kinds.items())}
    whole = {n: packed[kinds[n]].unpack({"weight": t}, torch.float32) for n, t in tensors.items()}
    tensors |= {"d.weight": randn(32, 64, seed=9)}
    tensors |= {"f.weight": randn(32, 64, seed=8).half()}
    weights = load(write(tmp_path, tensors, kinds))
    linear = weights.column([Part(name, 32) for name in "abcedf"], 64)
    assert [(s.scheme.name, s.n_out) for s in linear.segments] == [
        ("Q4_0", 64),
        ("Q8_0", 32),
        ("Q4_0", 32),
        ("dense", 32),
        ("dense", 32),
    ]
    assert weights.schemes == ("Q4_0", "Q8_0", "dense")
    x = randn(5, 64, seed=10)
    order = [*(whole[f"{n}.weight"] for n in "abce"), tensors["d.weight"], tensors["f.weight"].float()]
    torch.testing.assert_close(linear(x), x @ torch.cat(order).T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Q4_1", "BF16"])
def test_prepare_0_keeps_the_stored_bytes_and_gives_the_same_bits(kind, dtype, tmp_path, monkeypatch) -> None:
    scheme = schemes()["dense" if kind == "BF16" else f"gguf_{kind.lower()}"]
    packed = {f"{n}.weight": scheme.pack(randn(96, 64, seed=i), kind)["weight"] for i, n in enumerate("abt")}
    checkpoint = write(tmp_path, packed, dict.fromkeys(packed, kind) if kind == "Q4_1" else None)
    x, results, held = randn(9, 64, seed=5).to(dtype), [], []
    for setting in ("1", "0"):
        monkeypatch.setenv("LLMX_PREPARE", setting)
        weights = load(checkpoint, dtype=dtype)
        layers = [weights.column([Part("a", 96), Part("b", 96)], 64), weights.head("none", 96, 64, tied_to="t")]
        results.append([layer(x) for layer in layers])
        held.append(weights.held)
        assert weights.bytes == 3 * packed["a.weight"].nbytes
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert held == [3 * 96 * 64 * 4, 3 * packed["a.weight"].nbytes]


def test_a_tied_head_reads_the_table_once_and_a_stored_head_is_used(tmp_path: Path) -> None:
    table, own = randn(12, 32), randn(12, 32, seed=1)
    checkpoint = write(tmp_path / "tied", {"e.weight": table})
    weights = load(checkpoint)
    rows = weights.embedding("e", 12, 32)(torch.arange(12))
    head = weights.head("h", 12, 32, tied_to="e")
    assert torch.equal(rows, table)
    assert torch.equal(matrix(head), table)
    assert checkpoint.bytes_read == weights.bytes == weights.held == table.nbytes
    assert weights.parameters == table.numel()
    with pytest.raises(UsageError, match=r"no tensor h\.weight"):
        weights.head("h", 12, 32, tied_to=None)
    weights = load(write(tmp_path / "own", {"e.weight": table, "h.weight": own}))
    assert torch.equal(matrix(weights.head("h", 12, 32, tied_to="e")), own)
    assert weights.unused() == ("e.weight",)


def test_vectors_are_float32_and_whole_on_every_rank(tmp_path: Path) -> None:
    vectors = {"a.weight": randn(9).bfloat16(), "b.weight": randn(9), "c.weight": torch.arange(9)}
    checkpoint = write(tmp_path, vectors)
    for name in "ab":
        got = load(checkpoint, rank=1, size=2).vector(name, 9)
        assert got.dtype == torch.float32
        assert torch.equal(got, vectors[f"{name}.weight"].float())
    with pytest.raises(UsageError, match=r"c\.weight is stored as I64"):
        load(checkpoint).vector("c", 9)


def test_totals_progress_and_unused_tensors_are_reported(tmp_path: Path) -> None:
    tensors = {"a.weight": randn(8, 32), "a.bias": randn(8), "n.weight": randn(32), "x.weight": randn(4)}
    seen: list[tuple[int, int]] = []
    weights = load(write(tmp_path, tensors), progress=lambda done, total: seen.append((done, total)))
    weights.column([Part("a", 8)], 32)
    weights.vector("n", 32)
    total = sum(t.nbytes for t in tensors.values())
    assert seen == [(8 * 32 * 4, total), (8 * 33 * 4, total), (8 * 33 * 4 + 128, total)]
    assert weights.parameters == 8 * 32 + 8 + 32
    assert weights.bytes == total - 16
    assert weights.schemes == ("dense",)
    assert weights.unused() == ("x.weight",)


def test_the_whole_model_is_counted_though_a_rank_holds_a_part(tmp_path: Path) -> None:
    weights = load(write(tmp_path, {"a.weight": randn(8, 32)}), rank=1, size=2)
    weights.column([Part("a", 8)], 32)
    assert (weights.parameters, weights.bytes, weights.held) == (256, 512, 512)


def test_missing_and_misshapen_tensors_are_named_with_both_shapes(tmp_path: Path) -> None:
    weights = load(write(tmp_path, {"a.weight": randn(8, 32), "a.bias": randn(9), "n.weight": randn(32)}))
    with pytest.raises(UsageError, match=r"no tensor q\.weight"):
        weights.column([Part("q", 8)], 32)
    with pytest.raises(UsageError, match=r"no tensor q\.weight"):
        weights.vector("q", 8)
    with pytest.raises(UsageError, match=r"no tensor e\.weight"):
        weights.head("h", 8, 32, tied_to="e")
    with pytest.raises(UsageError, match="a is stored as 8×32, but the model's config asks for 8×64"):
        weights.row("a", 8, 64)
    with pytest.raises(UsageError, match=r"a\.bias is stored as 9, .* asks for 8"):
        weights.column([Part("a", 8)], 32)
    with pytest.raises(UsageError, match=r"n\.weight is stored as 32, .* asks for 31"):
        weights.vector("n", 31)


def test_a_tensor_that_is_no_linear_is_refused_by_what_it_is(tmp_path: Path) -> None:
    weights = load(write(tmp_path, {"a.weight": torch.zeros(8, 32, dtype=torch.int8), "b.qweight": torch.zeros(2, 2)}))
    with pytest.raises(UsageError, match=r"a is stored as weight \(I8\)"):
        weights.column([Part("a", 8)], 32)
    with pytest.raises(UsageError, match=r"b is stored as qweight \(F32\)"):
        weights.column([Part("b", 8)], 32)


def test_heads_that_ranks_cannot_share_are_refused_with_sizes_that_can(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, {"q.weight": randn(9 * 4, 32), "k.weight": randn(3 * 4, 32), "o.weight": randn(8, 36)})
    weights = load(checkpoint, size=2)
    with pytest.raises(UsageError, match="q has 9 heads, which 2 tensor-parallel ranks can't") as caught:
        weights.column([Part("q", 36, 9)], 32)
    assert caught.value.hint == "sizes that divide them: 1, 3, 9"
    with pytest.raises(UsageError, match="k has 3 heads"):
        weights.column([Part("k", 12, 3)], 32)
    with pytest.raises(UsageError, match="o has 1 heads"):
        weights.row("o", 8, 36, 1)
    assert checkpoint.bytes_read == 0


def test_features_without_heads_are_shared_as_equally_as_whole_blocks_can_be(tmp_path: Path) -> None:
    up, down = randn(12, 64), randn(8, 32 * 13, seed=1)
    packed = schemes()["gguf_q4_0"].pack(down, "Q4_0")["weight"]
    checkpoint = write(tmp_path, {"up.weight": up, "down.weight": packed}, {"down.weight": "Q4_0"})
    whole = matrix(load(checkpoint).row("down", 8, 416))
    ups = [matrix(load(checkpoint, rank=r, size=5).column([Part("up", 12)], 64)) for r in range(5)]
    downs = [matrix(load(checkpoint, rank=r, size=3).row("down", 8, 416)) for r in range(3)]
    assert torch.equal(torch.cat(ups), up)
    assert [len(part) for part in ups] == [2, 2, 3, 2, 3]
    assert [part.shape[1] for part in downs] == [4 * 32, 4 * 32, 5 * 32]
    assert torch.equal(torch.cat(downs, 1), whole)


def test_a_split_inside_a_block_is_refused(tmp_path: Path) -> None:
    packed = schemes()["gguf_q4_0"].pack(randn(8, 96), "Q4_0")["weight"]
    weights = load(write(tmp_path, {"down.weight": packed}, {"down.weight": "Q4_0"}), rank=1, size=2)
    with pytest.raises(UsageError, match=r"down\S* can't be cut to input features 48 to 96 of 96") as caught:
        weights.row("down", 8, 96)
    assert "multiple of 32" in str(caught.value.hint)


def test_off_the_cpu_weights_are_unpacked_to_the_compute_dtype(tmp_path: Path) -> None:
    packed = schemes()["gguf_q4_1"].pack(randn(96, 64), "Q4_1")["weight"]
    checkpoint = write(tmp_path, {"a.weight": packed, "a.bias": randn(96)}, {"a.weight": "Q4_1"})
    meta = torch.device("meta")  # stands in for a GPU: only dtypes and shapes are seen
    weights = CheckpointWeights(checkpoint, AsStored(), Shard(), torch.bfloat16, meta, KERNELS)
    layer = weights.column([Part("a", 96)], 64)
    assert (matrix(layer).dtype, matrix(layer).shape) == (torch.bfloat16, (96, 64))
    assert bias(layer).dtype == torch.bfloat16
    got = layer(torch.empty(3, 64, dtype=torch.bfloat16, device=meta))
    assert (got.dtype, got.shape, got.device) == (torch.bfloat16, (3, 96), meta)


def build(weights: Weights) -> list[Tensor]:
    layers = [weights.column([Part("q", 24, 6), Part("k", 12, 3)], 32), weights.row("o", 16, 24, 6)]
    return [matrix(layer) for layer in layers] + [weights.vector("n", 32)]


@pytest.mark.parametrize("size", [1, 3])
def test_random_weights_are_one_model_cut_for_any_number_of_ranks(size: int) -> None:
    def weights(rank: int, ranks: int, seed: int = 5) -> RandomWeights:
        return RandomWeights(seed, torch.float32, CPU, KERNELS, shard=Shard(rank, ranks))

    qkv, out, norm = build(weights(0, 1))
    ids = torch.arange(7)
    table = weights(0, 1).embedding("e", 7, 32)(ids)
    looked_up = torch.zeros(7, 32)
    for rank in range(size):
        q, o, n = build(weights(rank, size))
        assert torch.equal(q, torch.cat([qkv[:24].chunk(size)[rank], qkv[24:].chunk(size)[rank]]))
        assert torch.equal(o, out.chunk(size, 1)[rank])
        assert torch.equal(n, norm)
        looked_up += weights(rank, size).embedding("e", 7, 32)(ids)
    assert torch.equal(looked_up, table)
    assert not torch.equal(build(weights(0, 1, seed=6))[0], qkv)


def test_random_weights_look_normal_and_count_like_a_checkpoint() -> None:
    weights = RandomWeights(0, torch.bfloat16, CPU, KERNELS)
    values = matrix(weights.column([Part("a", 256), Part("b", 256)], 4096))
    assert abs(float(values.mean())) < 1e-4
    assert abs(float(values.std()) - 0.02) < 1e-4
    assert (
        abs(float((values / values.std()).pow(4).mean()) - 2.7) < 0.1
    )  # 3 for a normal; the sum of four bytes has 2.7
    first, second = values.chunk(2)
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([first[0], first[1]]))[0, 1])) < 0.1
    vector = weights.vector("n", 4096)
    assert vector.dtype == torch.float32
    assert abs(float(vector.mean()) - 1) < 0.01
    tied = weights.head("none", 7, 4096, tied_to=None)
    assert tied.n_out == 7
    assert weights.parameters == 512 * 4096 + 4096 + 7 * 4096
    assert weights.bytes == 2 * weights.parameters
    assert weights.schemes == ("dense",)


def test_the_demo_model_loads_whole_and_as_the_gguf_package_reads_it(demo: Path) -> None:
    opened = open_model(Located("gguf", demo, "demo", True))
    weights = load(opened.checkpoint, names=opened.names)
    config = opened.config
    tensors = {t.name: t for t in gguf.GGUFReader(demo).tensors}

    def oracle(name: str) -> Tensor:
        tensor = tensors[f"{name}.weight"]
        return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())

    table = weights.embedding("model.embed_tokens", config.vocab, config.hidden)
    ids = torch.tensor([0, 17, config.vocab - 1])
    assert torch.equal(table(ids), oracle("token_embd")[ids])
    for i in range(config.layers):
        name, blk = f"model.layers.{i}", f"blk.{i}"
        heads = {"q": config.heads, "k": config.kv_heads, "v": config.kv_heads}
        parts = [Part(f"{name}.self_attn.{p}_proj", n * config.head_dim, n) for p, n in heads.items()]
        qkv = weights.column(parts, config.hidden)
        out = weights.row(f"{name}.self_attn.o_proj", config.hidden, config.heads * config.head_dim, config.heads)
        mlp = weights.column([Part(f"{name}.mlp.{p}_proj", config.inner) for p in ("gate", "up")], config.hidden)
        down = weights.row(f"{name}.mlp.down_proj", config.hidden, config.inner)
        norms = [weights.vector(f"{name}.{p}_layernorm", config.hidden) for p in ("input", "post_attention")]
        if i not in (0, config.layers - 1):
            continue
        q, k, v = matrix(qkv).split([part.n_out for part in parts])
        assert torch.equal(as_llama_cpp_stores(q, config.heads), oracle(f"{blk}.attn_q"))
        assert torch.equal(as_llama_cpp_stores(k, config.kv_heads), oracle(f"{blk}.attn_k"))
        assert torch.equal(v, oracle(f"{blk}.attn_v"))
        assert torch.equal(matrix(out), oracle(f"{blk}.attn_output"))
        assert torch.equal(matrix(mlp), torch.cat([oracle(f"{blk}.ffn_gate"), oracle(f"{blk}.ffn_up")]))
        assert torch.equal(matrix(down), oracle(f"{blk}.ffn_down"))
        assert torch.equal(norms[0], oracle(f"{blk}.attn_norm"))
        assert torch.equal(norms[1], oracle(f"{blk}.ffn_norm"))
    assert torch.equal(weights.vector("model.norm", config.hidden), oracle("output_norm"))
    weights.head("lm_head", config.vocab, config.hidden, tied_to="model.embed_tokens")
    assert weights.unused() == ()
    assert weights.parameters == 134_515_008
    assert weights.bytes == opened.checkpoint.bytes_read
    assert weights.schemes == ("Q4_1", "Q8_0")
