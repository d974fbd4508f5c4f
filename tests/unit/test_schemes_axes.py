"""Axes of stored tensors: cuts, tails, padding and joining, on layouts like those of AWQ and of block-wise FP8."""

from __future__ import annotations

import pytest
import torch

from llmx.errors import UsageError
from llmx.formats.checkpoint import Stored
from llmx.kernels import Kernels
from llmx.schemes import base as schemes_base
from llmx.schemes import find
from llmx.schemes.base import Axis, Kind, Span, as_vocabulary, join, narrow, pad, ranges, row_axes
from llmx.schemes.dense import SCHEME as DENSE
from llmx.schemes.gguf_q4_1 import SCHEME as Q4_1

AWQ = {
    "qweight": (Axis(Kind.IN), Axis(Kind.OUT, 1, 8)),
    "scales": (Axis(Kind.IN, 1, 32), Axis(Kind.OUT)),
}
BLOCKS = {
    "weight": (Axis(Kind.OUT), Axis(Kind.IN)),
    "scale": (Axis(Kind.OUT, 1, 128, ceil=True), Axis(Kind.IN, 1, 128, ceil=True)),
}


def test_packed_and_grouped_axes_are_cut_in_their_own_steps() -> None:
    spans = {Kind.OUT: Span(16, 48, 64), Kind.IN: Span(32, 96, 128)}
    assert ranges("a", AWQ["qweight"], spans) == {0: (32, 96), 1: (2, 6)}
    assert ranges("a", AWQ["scales"], spans) == {0: (1, 3), 1: (16, 48)}
    assert ranges("a", AWQ["scales"], {Kind.OUT: Span(0, 8, 64)}) == {1: (0, 8)}


def test_a_cut_inside_a_stored_element_is_refused_with_the_numbers() -> None:
    with pytest.raises(UsageError, match=r"m\.q can't be cut to output features 12 to 24 of 64: .* stores 8") as caught:
        ranges("m.q", AWQ["qweight"], {Kind.OUT: Span(12, 24, 64)})
    assert caught.value.hint == "use a number of ranks that gives each a multiple of 8 features"


def test_a_block_is_not_cut_where_its_bytes_could_be() -> None:
    q8_0 = (Axis(Kind.OUT), Axis(Kind.IN, 34, 32))
    assert ranges("a", q8_0, {Kind.IN: Span(32, 96, 128)}) == {1: (34, 102)}
    with pytest.raises(UsageError, match="stores 32"):
        ranges("a", q8_0, {Kind.IN: Span(0, 16, 128)})


def test_only_the_last_element_of_an_axis_with_a_tail_may_be_short() -> None:
    dims = BLOCKS["scale"]
    assert ranges("a", dims, {Kind.IN: Span(0, 576, 576)}) == {1: (0, 5)}
    assert ranges("a", dims, {Kind.IN: Span(512, 576, 576)}) == {1: (4, 5)}
    with pytest.raises(UsageError, match="stores 128"):
        ranges("a", dims, {Kind.IN: Span(0, 64, 576)})
    with pytest.raises(UsageError, match="stores 128"):
        ranges("a", dims, {Kind.IN: Span(576, 640, 1024)})
    with pytest.raises(UsageError, match="stores 8"):
        ranges("a", AWQ["qweight"], {Kind.OUT: Span(0, 60, 60)})


def test_a_plain_number_is_an_axis_that_no_span_cuts() -> None:
    assert ranges("a", (2, Axis(Kind.OUT)), {Kind.OUT: Span(1, 3, 4), Kind.IN: Span(0, 1, 2)}) == {1: (1, 3)}


def test_a_vocabulary_reads_as_zeros_beyond_its_end() -> None:
    layout = as_vocabulary({"w": (Axis(Kind.OUT), Axis(Kind.IN))})
    assert layout["w"][0] == Axis(Kind.VOCAB)
    table = torch.arange(10.0).reshape(5, 2) + 1
    for low, high, real in ((0, 3, 3), (3, 6, 2), (6, 9, 0)):
        spans = {Kind.VOCAB: Span(low, high, 5)}
        part = pad(narrow({"w": table}, layout, spans)["w"], layout["w"], spans)
        assert part.shape == (3, 2)
        assert torch.equal(part[:real], table[low : low + real])
        assert not part[real:].any()


def test_linears_join_where_the_first_ends_on_a_stored_element() -> None:
    def stored(n_out: int) -> dict[str, torch.Tensor]:
        return {"weight": torch.randn(n_out, 256), "scale": torch.randn(-(-n_out // 128), 2)}

    first, second = stored(256), stored(64)
    joined = join(BLOCKS, first, 256, second)
    assert joined is not None
    assert torch.equal(joined["weight"], torch.cat([first["weight"], second["weight"]]))
    assert torch.equal(joined["scale"], torch.cat([first["scale"], second["scale"]]))
    assert join(BLOCKS, second, 64, first) is None


def test_linears_with_different_widths_dtypes_or_shared_scales_do_not_join() -> None:
    layout = {"weight": (Axis(Kind.OUT), Axis(Kind.IN)), "scale": ()}
    a = {"weight": torch.zeros(2, 4), "scale": torch.tensor(1.0)}
    assert join(layout, a, 2, {"weight": torch.ones(3, 4), "scale": torch.tensor(1.0)}) is not None
    assert join(layout, a, 2, {"weight": torch.ones(3, 4), "scale": torch.tensor(2.0)}) is None
    assert join(layout, a, 2, {"weight": torch.ones(3, 4).half(), "scale": torch.tensor(1.0)}) is None
    assert join(layout, a, 2, {"weight": torch.ones(3, 5), "scale": torch.tensor(1.0)}) is None


def test_only_layouts_with_a_row_for_each_output_are_read_by_row() -> None:
    assert row_axes({"a": (Axis(Kind.IN), Axis(Kind.OUT))}) == {"a": 1}
    assert row_axes(as_vocabulary({"a": (3, Axis(Kind.OUT))})) == {"a": 1}
    assert row_axes(AWQ) is None
    assert row_axes({"a": (Axis(Kind.EXPERT), Axis(Kind.OUT), Axis(Kind.IN))}) is None


@pytest.mark.parametrize(("scheme", "kind"), [(DENSE, "BF16"), (Q4_1, "Q4_1")])
def test_large_linears_are_unpacked_some_rows_at_a_time(scheme, kind, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = scheme.pack(torch.randn(37, 64), kind)
    layout = scheme.axes({"weight": Stored("w", kind, (37, 64), packed["weight"].nbytes)})
    whole = scheme.unpack(packed, torch.float32)
    rows = []

    def counted(tensors, dtype):
        rows.append(tensors["weight"].shape[0])
        return type(scheme).unpack(scheme, tensors, dtype)

    monkeypatch.setattr(schemes_base, "CHUNK", 10 * 64)
    monkeypatch.setattr(scheme, "unpack", counted)
    assert torch.equal(
        scheme.prepare(packed, layout, torch.float32, Kernels("cpu", forced="reference"))["weight"], whole
    )
    assert rows == [1, 10, 10, 10, 7]  # the first to see how wide they are


def test_a_linear_in_no_scheme_is_refused_with_what_is_stored_and_what_could_be() -> None:
    stored = {"qweight": Stored("m.qweight", "I32", (8, 8), 256), "scales": Stored("m.scales", "F16", (1, 8), 16)}
    with pytest.raises(UsageError, match=r"m is stored as qweight \(I32\), scales \(F16\)") as caught:
        find("m", stored)
    assert "Q4_1" in str(caught.value.hint)
    with pytest.raises(UsageError, match="Q8_K"):
        find("m", {"weight": Stored("m.weight", "Q8_K", (8, 256), 8 * 292)})


def test_inputs_that_are_no_whole_blocks_do_not_pack() -> None:
    with pytest.raises(UsageError, match="32 inputs together, so 48 do not fit"):
        Q4_1.pack(torch.zeros(4, 48), "Q4_1")
