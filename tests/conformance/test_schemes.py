"""Every file of llmx/schemes: packing, axes and running, cut for 1, 2 and 3 ranks. Wrong schemes are caught."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from checkpoints import AsStored, dequantized, is_block, randn, random_blocks, write
from torch import Tensor
from torch.nn import functional

import llmx.schemes
from llmx import loading
from llmx.errors import UsageError
from llmx.formats.checkpoint import Checkpoint, Stored
from llmx.formats.fields import Fields
from llmx.formats.quantization import read
from llmx.kernels import Kernels
from llmx.layers.linear import Linear
from llmx.layers.weights import Part
from llmx.loading import CheckpointWeights, Shard
from llmx.schemes import HELPERS, for_checkpoint, schemes
from llmx.schemes.base import Axis, Case, Dims, Kind, Layout, Scheme, Segment, Span, narrow, row_axes
from llmx.schemes.dense import Dense
from llmx.schemes.fp8 import FP8
from llmx.schemes.gguf_q8_0 import Q8_0
from llmx.schemes.gptq import GPTQ

FILES = sorted(p.stem for p in Path(llmx.schemes.__file__).parent.glob("*.py") if p.stem != "__init__")


def as_configured(scheme: Scheme, case: Case) -> Scheme:
    """The scheme as a checkpoint's config sets it up, if the case has one."""
    if case.config is None:
        return scheme
    (found,) = scheme.configured(read(Fields(case.config, "config.json")))
    return found


GRID = [pytest.param(as_configured(s, c), c, id=f"{name}-{c.kind}") for name, s in schemes().items() for c in s.cases]
BLOCKS = [p for p in GRID if is_block(p.values[1].kind)]
RANKS = [(1, 3), (2, 2), (2, 1), (3, 3), (3, 1)]  # ranks, key-value heads; with 1 of these the ranks replicate it
VOCAB = 49  # neither 2 nor 3 ranks divide it
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMX_PREPARE", "0")  # linears keep the stored bytes, so that the checks see which were read


def stored_of(checkpoint: Checkpoint, name: str) -> dict[str, Stored]:
    """What the file says about a linear's tensors, by suffix."""
    found = [n for n in checkpoint.names() if n.startswith(name + ".")]
    return {n.removeprefix(name + "."): checkpoint.stored(n) for n in found}


def stored_weights(scheme: Scheme, case: Case, *shape: int, seed: int = 0) -> dict[str, Tensor]:
    """Weights as `scheme` stores them: packed, or random blocks of a GGUF type that has no quantizer yet."""
    if case.error is None:
        return {"weight": random_blocks(case.kind, *shape, seed=seed)}
    return scheme.pack(randn(*shape, seed=seed), case.kind)


@dataclass
class Stage:
    """Linears of one case in a file, and the weights that they stand for."""

    scheme: Scheme
    case: Case
    checkpoint: Checkpoint
    weights: Mapping[str, Tensor]  # float32, unpacked from the whole tensors

    @classmethod
    def build(cls, scheme: Scheme, case: Case, folder: Path, sizes: Mapping[str, tuple[int, ...]]) -> Stage:
        tensors, kinds, weights = {}, {}, {}
        for seed, (name, shape) in enumerate(sizes.items()):
            packed = stored_weights(scheme, case, *shape, seed=seed)
            weights[name] = scheme.unpack(packed, torch.float32)
            for suffix, tensor in packed.items():
                tensors[f"{name}.{suffix}"] = tensor
                if is_block(case.kind) and suffix == "weight":
                    kinds[f"{name}.{suffix}"] = case.kind
        return cls(scheme, case, write(folder, tensors, kinds, case.config), weights)

    def load(self, rank: int, size: int, dtype: torch.dtype = torch.float32) -> CheckpointWeights:
        return CheckpointWeights(
            self.checkpoint, AsStored(), Shard(rank, size), dtype, CPU, Kernels("cpu", "reference")
        )

    def bytes_of(self, name: str, kind: Kind, share: int, total: int) -> int:
        """Bytes of `share` of `total` features: all of a tensor that has no such axis."""
        stored = {k: v for k, v in stored_of(self.checkpoint, name).items() if k not in self.scheme.unread}
        cut = {
            k
            for k, dims in self.scheme.axes(stored).items()
            if any(isinstance(a, Axis) and a.kind is kind for a in dims)
        }
        return sum(s.nbytes * share // total if suffix in cut else s.nbytes for suffix, s in stored.items())


def unpacked(linear: Linear) -> Tensor:
    return torch.cat([s.scheme.unpack(s.tensors, torch.float32) for s in linear.segments])


def check_packing(scheme: Scheme, case: Case, folder: Path) -> None:
    """What is packed has the file's own shape, is close to the weights, and packs to the same bytes again."""
    weight = randn(case.rows, case.hidden)
    if case.error is None:
        with pytest.raises(UsageError, match=f"{case.kind}.* no quantizer"):
            scheme.pack(weight, case.kind)
        packed = stored_weights(scheme, case, *weight.shape)
        back = scheme.unpack(packed, torch.float32)
        assert (back.shape, back.dtype) == (weight.shape, torch.float32)
        assert torch.equal(scheme.unpack(packed, torch.bfloat16), back.bfloat16())
        return
    packed = scheme.pack(weight, case.kind)
    back = scheme.unpack(packed, torch.float32)
    assert back.shape == weight.shape
    assert back.dtype == torch.float32
    error = float((back - weight).square().mean().sqrt() / weight.square().mean().sqrt())
    assert error <= case.error
    assert case.error < 0.2, "a case that allows any error shows nothing"
    again = scheme.pack(back, case.kind)
    assert all(torch.equal(again[name], tensor) for name, tensor in packed.items())
    assert torch.equal(scheme.unpack(packed, torch.bfloat16), back.bfloat16())


def check_file(scheme: Scheme, case: Case, folder: Path) -> None:
    """The stored tensors are recognised, have the shape that was packed, and every axis has its declared length."""
    stage = Stage.build(scheme, case, folder, {"a": (case.rows, case.inner)})
    stored = stored_of(stage.checkpoint, "a")
    assert scheme.matches(stored)
    known = for_checkpoint(stage.checkpoint.quantization)
    assert [s.name for s in known if s.matches(stored)] == [scheme.name], "exactly one may recognise it"
    assert scheme.shape(stored) == (case.rows, case.inner)
    layout = scheme.axes(stored)
    assert set(layout) == set(stored) - scheme.unread
    features = {Kind.OUT: case.rows, Kind.IN: case.inner}
    for suffix, dims in layout.items():
        wanted = [a if isinstance(a, int) else a.at(features[a.kind], features[a.kind]) for a in dims]
        assert list(stored[suffix].read_shape) == wanted
    for kind in features:
        assert any(isinstance(a, Axis) and a.kind is kind for dims in layout.values() for a in dims)


def check_columns(scheme: Scheme, case: Case, folder: Path) -> None:
    """A fused QKV and a fused MLP: this rank's rows, one matrix, and only its bytes read."""
    hidden = case.hidden
    for ranks, kv_heads in RANKS:
        heads = {"q": case.heads, "k": kv_heads, "v": kv_heads}
        sizes = {name: (n * case.head_dim, hidden) for name, n in heads.items()} | {"up": (case.inner, hidden)}
        stage = Stage.build(scheme, case, folder / f"{ranks}-{kv_heads}", sizes)
        for rank in range(ranks):
            weights = stage.load(rank, ranks)
            before = stage.checkpoint.bytes_read
            qkv = weights.column([Part(name, sizes[name][0], n) for name, n in heads.items()], hidden)
            up = weights.column([Part("up", case.inner)], hidden)
            rows = {name: max(n // ranks, 1) * case.head_dim for name, n in heads.items()} | {"up": case.inner // ranks}
            starts = {name: rank * n // ranks * case.head_dim for name, n in heads.items()}
            starts["up"] = rank * rows["up"]
            expected = {n: stage.weights[n][starts[n] : starts[n] + rows[n]] for n in sizes}
            assert torch.equal(unpacked(qkv), torch.cat([expected[n] for n in heads]))
            assert torch.equal(unpacked(up), expected["up"])
            assert len(qkv.segments) == (1 if case.merges else 3), "equal neighbours merge"
            read = sum(stage.bytes_of(n, Kind.OUT, rows[n], sizes[n][0]) for n in sizes)
            assert stage.checkpoint.bytes_read - before == read == weights.bytes


def check_rows(scheme: Scheme, case: Case, folder: Path) -> None:
    """A linear split by its inputs: this rank's columns, only its bytes read, and sums that give the whole."""
    hidden = case.head_dim * case.heads
    rows = case.rows
    stage = Stage.build(scheme, case, folder, {"o": (rows, hidden), "down": (rows, case.inner)})
    for ranks in (1, 2, 3):
        total = torch.zeros(5, rows)
        x = randn(5, case.inner, seed=9)
        for rank in range(ranks):
            weights = stage.load(rank, ranks)
            before = stage.checkpoint.bytes_read
            out, down = weights.row("o", rows, hidden, case.heads), weights.row("down", rows, case.inner)
            for name, linear, width in (("o", out, hidden), ("down", down, case.inner)):
                assert torch.equal(unpacked(linear), stage.weights[name].chunk(ranks, 1)[rank])
                assert linear.n_in == width // ranks
            read = stage.bytes_of("o", Kind.IN, 1, ranks) + stage.bytes_of("down", Kind.IN, 1, ranks)
            assert stage.checkpoint.bytes_read - before == read == weights.bytes
            total += down(x.chunk(ranks, 1)[rank].contiguous())
        torch.testing.assert_close(total, x @ stage.weights["down"].T, rtol=1e-4, atol=1e-4)


def check_vocabulary(scheme: Scheme, case: Case, folder: Path) -> None:
    """Embedding and head of a vocabulary that no number of ranks divides: zeros beyond it, only its bytes read."""
    hidden = case.hidden
    if any(isinstance(a, Axis) and a.kind is Kind.OUT and not a.single for a in axes_of(scheme, case, folder)):
        stage = Stage.build(scheme, case, folder, {"table": (case.rows, hidden)})
        assert row_axes(scheme.axes(stored_of(stage.checkpoint, "table"))) is None
        with pytest.raises(UsageError, match="row by row"):
            stage.load(0, 1).embedding("table", case.rows, hidden)
        return
    stage = Stage.build(scheme, case, folder, {"table": (VOCAB, hidden)})
    if row_axes(scheme.axes(stored_of(stage.checkpoint, "table"))) is None:
        with pytest.raises(UsageError, match="row by row"):
            stage.load(0, 1).embedding("table", VOCAB, hidden)
        return
    ids = torch.tensor([0, 16, 17, 24, 25, 33, 34, VOCAB - 1, 3, 3])
    for ranks in (1, 2, 3):
        looked_up, heads = torch.zeros(len(ids), hidden), []
        for rank in range(ranks):
            weights = stage.load(rank, ranks)
            before = stage.checkpoint.bytes_read
            looked_up += weights.embedding("table", VOCAB, hidden)(ids)
            heads.append(unpacked(weights.head("none", VOCAB, hidden, tied_to="table")))
            here = max(0, min(VOCAB, (rank + 1) * -(-VOCAB // ranks)) - rank * -(-VOCAB // ranks))
            assert stage.checkpoint.bytes_read - before == stage.bytes_of("table", Kind.OUT, here, VOCAB)
        assert torch.equal(looked_up, stage.weights["table"][ids])
        whole = torch.cat(heads)
        assert whole.shape[0] == -(-VOCAB // ranks) * ranks
        assert torch.equal(whole[:VOCAB], stage.weights["table"])
        assert not whole[VOCAB:].any()


def axes_of(scheme: Scheme, case: Case, folder: Path) -> list[Axis | int]:
    stage = Stage.build(scheme, case, folder / "whole", {"a": (case.rows, case.inner)})
    return [axis for dims in scheme.axes(stored_of(stage.checkpoint, "a")).values() for axis in dims]


def check_cuts(scheme: Scheme, case: Case, folder: Path) -> None:
    """Wherever the axes allow a cut, the part unpacks to that part of the weights; the finest cuts are fine enough."""
    stage = Stage.build(scheme, case, folder, {"a": (case.rows, case.inner)})
    stored = stored_of(stage.checkpoint, "a")
    layout = scheme.axes(stored)
    tensors = {suffix: stage.checkpoint.read(f"a.{suffix}") for suffix in layout}
    for kind, total in ((Kind.OUT, case.rows), (Kind.IN, case.inner)):
        allowed = [n for n in range(1, total) if all(_cuts(dims, kind, n, total) for dims in layout.values())]
        assert {total // 3, total // 2} <= set(allowed)
        for n in allowed:
            part = {k: t.contiguous() for k, t in narrow(tensors, layout, {kind: Span(0, n, total)}).items()}
            expected = stage.weights["a"].narrow(0 if kind is Kind.OUT else 1, 0, n)
            assert torch.equal(scheme.unpack(part, torch.float32), expected)


def _cuts(dims: Dims, kind: Kind, feature: int, total: int) -> bool:
    return all(a.at(feature, total) is not None for a in dims if isinstance(a, Axis) and a.kind is kind)


def check_experts(scheme: Scheme, case: Case, folder: Path) -> None:
    """Stacked experts can be cut by expert, output and input at once."""
    if not case.stacked:
        return
    stage = Stage.build(scheme, case, folder, {"experts": (4, 96, case.inner)})
    stored = stored_of(stage.checkpoint, "experts")
    assert scheme.matches(stored)
    assert scheme.shape(stored) == (4, 96, case.inner)
    third = case.inner // 3
    spans = {Kind.EXPERT: Span(1, 3, 4), Kind.OUT: Span(32, 64, 96), Kind.IN: Span(third, 2 * third, case.inner)}
    tensors = {suffix: stage.checkpoint.read(f"experts.{suffix}") for suffix in stored}
    cut = {k: t.contiguous() for k, t in narrow(tensors, scheme.axes(stored), spans).items()}
    assert torch.equal(scheme.unpack(cut, torch.float32), stage.weights["experts"][1:3, 32:64, third : 2 * third])


def check_running(scheme: Scheme, case: Case, folder: Path) -> None:
    """`apply` is x Wᵀ + b with the unpacked weights, prepared or not, to the same bits, beside another scheme too."""
    hidden, rows = case.hidden, case.rows
    stage = Stage.build(scheme, case, folder, {"a": (rows, hidden)})
    other = Dense()
    b = randn(40, hidden, seed=5).double()
    kernels = Kernels("cpu", "reference")
    layout = scheme.axes(stored_of(stage.checkpoint, "a"))
    packed = {suffix: stage.checkpoint.read(f"a.{suffix}") for suffix in layout}
    bias = randn(rows, seed=6)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        x = randn(7, hidden, seed=7).to(dtype)
        second = Segment(other, 40, {"weight": (Axis(Kind.OUT), Axis(Kind.IN))}, {"weight": b.float()})
        results = []
        for tensors, prepared in ((packed, False), (scheme.prepare(packed, layout, torch.float32, kernels), True)):
            first = Segment(scheme, rows, layout, tensors, bias, prepared)
            results.append(Linear([first, second, first], hidden, kernels)(x))
        assert torch.equal(*results)
        assert results[0].dtype == dtype
        assert torch.equal(results[0][:, :rows], results[0][:, rows + 40 :])
        expected = functional.linear(x.double(), torch.cat([stage.weights["a"].double(), b]))
        expected[:, :rows] += bias.double()
        worst = (results[0][:, : rows + 40].double() - expected).abs().max() / expected.abs().max()
        assert float(worst) < tolerance


Check = Callable[[Scheme, Case, Path], None]
CHECKS: Sequence[Check] = (
    check_packing,
    check_file,
    check_columns,
    check_rows,
    check_vocabulary,
    check_cuts,
    check_experts,
    check_running,
)


def test_every_file_of_the_folder_is_a_scheme_with_cases_or_a_named_helper() -> None:
    assert set(FILES) - HELPERS == set(schemes())
    for helper in HELPERS:
        assert not hasattr(importlib.import_module(f"llmx.schemes.{helper}"), "SCHEME")
    assert len({scheme.name for scheme in schemes().values()}) == len(schemes())
    for name, scheme in schemes().items():
        assert scheme.cases, f"{name} has no cases for this test"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize(("scheme", "case"), GRID)
def test_scheme(scheme: Scheme, case: Case, check: Check, tmp_path: Path) -> None:
    check(scheme, case, tmp_path)


@pytest.mark.parametrize(("scheme", "case"), [p for p in BLOCKS if p.values[1].error is not None])
def test_gguf_types_are_read_and_written_as_the_gguf_package_does(scheme: Scheme, case: Case) -> None:
    kind = gguf.GGMLQuantizationType[case.kind]
    weight = randn(200, 256) * torch.logspace(-6, 1, 200)[:, None]
    weight[3], weight[4, :32], weight[5] = 0, 7.5, -1
    packed = scheme.pack(weight, case.kind)["weight"]
    assert torch.equal(packed, torch.from_numpy(gguf.quantize(weight.numpy(), kind)))
    assert torch.equal(scheme.unpack({"weight": packed}, torch.float32), dequantized(packed, case.kind))


@pytest.mark.parametrize(("scheme", "case"), BLOCKS)
def test_any_bytes_unpack_as_the_gguf_package_unpacks_them(scheme: Scheme, case: Case) -> None:
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[case.kind]][1]
    raw = torch.randint(0, 256, (512, 4 * size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected, got = dequantized(raw, case.kind), scheme.unpack({"weight": raw}, torch.float32)
    known = expected.isfinite()  # random scales are sometimes infinite
    assert known.float().mean() > 0.9
    assert torch.equal(got[known].view(torch.int32), expected[known].view(torch.int32))
    assert torch.equal(got.isnan(), expected.isnan())


# --- the checks themselves: each planted fault must be caught -----------------------------------------------------


class SwappedAxes(Dense):
    def axes(self, stored: Mapping[str, Stored]) -> Layout:
        return {"weight": (Axis(Kind.EXPERT), Axis(Kind.IN), Axis(Kind.OUT))[-len(stored["weight"].shape) :]}


class WholeInputs(Q8_0):
    def axes(self, stored: Mapping[str, Stored]) -> Layout:
        return {"weight": (*super().axes(stored)["weight"][:-1], stored["weight"].read_shape[-1])}


class WholeOutputs(Dense):
    def axes(self, stored: Mapping[str, Stored]) -> Layout:
        dims: Dims = super().axes(stored)["weight"]
        return {"weight": (*dims[:-2], stored["weight"].shape[-2], dims[-1])}


class WrongStep(Q8_0):
    def axes(self, stored: Mapping[str, Stored]) -> Layout:
        return {"weight": (*super().axes(stored)["weight"][:-1], Axis(Kind.IN))}


class HalfBlocks(Q8_0):
    def axes(self, stored: Mapping[str, Stored]) -> Layout:
        return {"weight": (*super().axes(stored)["weight"][:-1], Axis(Kind.IN, 17, 16))}


class NoExperts(Dense):
    def axes(self, stored: Mapping[str, Stored]) -> Layout:
        return {"weight": (Axis(Kind.OUT), Axis(Kind.OUT), Axis(Kind.IN))[-len(stored["weight"].shape) :]}


class Zeros(Q8_0):
    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        return super().unpack_blocks(blocks) * 0


class Coarse(Q8_0):
    def unpack_blocks(self, blocks: Tensor) -> Tensor:
        return super().unpack_blocks(blocks).bfloat16().float()


class RoundsFirst(Dense):
    def prepare(self, tensors, layout, dtype, kernels):  # type: ignore[no-untyped-def]
        return super().prepare(tensors, layout, torch.bfloat16, kernels)


class DropsBias(Dense):
    def apply(self, x, segments, kernels):  # type: ignore[no-untyped-def]
        bare = [Segment(s.scheme, s.n_out, s.layout, s.tensors, None, s.prepared) for s in segments]
        return super().apply(x, bare, kernels)


class Greedy(Dense):
    def matches(self, stored: Mapping[str, Stored]) -> bool:
        return True


class Blind(Dense):
    def matches(self, stored: Mapping[str, Stored]) -> bool:
        return False


class WrongShape(Dense):
    def shape(self, stored: Mapping[str, Stored]) -> tuple[int, ...]:
        return stored["weight"].shape[::-1]


class CutsGroups(GPTQ):
    """Though a g_idx counts the groups from the first of all."""

    def axes(self, stored: Mapping[str, Stored]) -> Layout:
        layout = super().axes(stored)
        return layout | {n: (Axis(Kind.IN, 1, 32), layout[n][1]) for n in ("qzeros", "scales")}


class WholeScales(FP8):
    """All scales to every rank, whose rows then get those of others."""

    cases = FP8.cases[1:]  # with a scale for each output

    def __init__(self) -> None:
        super().__init__(method="compressed-tensors")

    def axes(self, stored: Mapping[str, Stored]) -> Layout:
        return {**super().axes(stored), "weight_scale": stored["weight_scale"].shape}


FAULTS = [
    CutsGroups,
    WholeScales,
    SwappedAxes,
    WholeInputs,
    WholeOutputs,
    WrongStep,
    HalfBlocks,
    NoExperts,
    Zeros,
    Coarse,
    RoundsFirst,
    DropsBias,
    Blind,
    WrongShape,
]


def caught(scheme: Scheme, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the checks that fail when the loader uses `scheme`."""
    monkeypatch.setattr(loading, "find", lambda where, stored, quantization: scheme)
    failed = []
    for check in CHECKS:
        try:
            check(scheme, scheme.cases[0], folder / check.__name__)
        except (AssertionError, UsageError, RuntimeError, IndexError):
            failed.append(check.__name__)
    return failed


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_scheme_is_caught(fault: type[Scheme], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert caught(fault(), tmp_path, monkeypatch)


@pytest.mark.parametrize("honest", [Dense, Q8_0, GPTQ, FP8])
def test_a_right_scheme_is_not(honest: type[Scheme], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not caught(honest(), tmp_path, monkeypatch)


def test_two_schemes_that_recognise_the_same_linear_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy, honest = Greedy(), Q8_0()
    greedy.name = "greedy"
    monkeypatch.setitem(globals(), "for_checkpoint", lambda quantization: (greedy, honest))
    with pytest.raises(AssertionError, match="exactly one"):
        check_file(honest, honest.cases[0], tmp_path)


def test_a_scheme_without_cases_or_in_no_file_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = SimpleNamespace(name="bare", cases=())
    monkeypatch.setitem(globals(), "FILES", [*FILES, "bare"])
    with pytest.raises(AssertionError):
        test_every_file_of_the_folder_is_a_scheme_with_cases_or_a_named_helper()
    monkeypatch.setitem(globals(), "schemes", lambda: {**schemes_now, "bare": bare})
    with pytest.raises(AssertionError, match="no cases"):
        test_every_file_of_the_folder_is_a_scheme_with_cases_or_a_named_helper()


schemes_now = dict(schemes())
