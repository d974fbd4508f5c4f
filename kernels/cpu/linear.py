"""Linear layers straight from packed weights, and the packing. `packed.h` says what lies where."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llmx.kernels.cpu import native
from llmx.kernels.cpu.convert import narrowed, wide
from llmx.kernels.cpu.memory import take

LANES = 16  # outputs in a block
SUPER, LINE = 256, 64  # inputs that share a d where groups have scales of a byte; bytes of a cache line
GROUP, ROUNDED_BYTES, ROW_BYTES = 32, 56, 33  # inputs that are rounded together; what is kept of them, and of a row
WHOLE = 3  # the first of the formats in whole numbers
FORMATS = {
    **{"F32": 0, "F16": 1, "BF16": 2},
    **{"q4": 3, "q4+m": 4, "q4*s-m": 5, "q4*f": 6, "q4*f-m": 7, "q5": 8, "q5+m": 9, "q5*s-m": 10, "q6*f": 11},
    **{"q8": 12, "q8*s": 13},
}
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def packed_bytes(layout: str, n_in: int) -> int:
    """Of a block of 16 outputs."""
    if layout in DTYPES.values():
        return n_in * LANES * (4 if layout == "F32" else 2)
    groups, (bunch, header) = n_in // GROUP, _bunch(layout)
    return -(-groups // bunch) * header + groups * _code_bytes(layout)


def _code_bytes(layout: str) -> int:
    """Of a group of 16 outputs."""
    return LANES * GROUP * int(layout[1]) // 8


def _bunch(layout: str) -> tuple[int, int]:
    """(groups in a bunch, bytes of what precedes its codes)"""
    kinds, (_, _, small) = 1 + layout.endswith("m"), layout.partition("*")
    if not small:
        return 2 // kinds, 2 * 2 * LANES
    units = SUPER // GROUP * (2 if small[0] == "f" else 1)
    return SUPER // GROUP, -(-kinds * (2 * LANES + units * LANES) // LINE) * LINE


def new_packed(layout: str, n_out: int, n_in: int) -> Tensor:
    """(blocks, bytes) uint8, zeros, for `pack_codes` or `pack_numbers`."""
    blocks, size = -(-n_out // LANES), packed_bytes(layout, n_in)
    return take(blocks * size).view(blocks, size)


def pack_numbers(packed: Tensor, weight: Tensor) -> None:
    """weight (n_out, n_in), float32, float16 or bfloat16 -> the blocks of the layout DTYPES[weight.dtype]."""
    blocks = _filled(weight).unflatten(0, (-1, LANES)).transpose(1, 2)  # (blocks, n_in, 16)
    packed.view(weight.dtype).view(blocks.shape).copy_(blocks)


def pack_codes(
    packed: Tensor,
    layout: str,
    codes: Tensor,
    d: Tensor,
    e: Tensor | None = None,
    scales: Tensor | None = None,
    minima: Tensor | None = None,
) -> None:
    """codes (n_out, n_in) int8 or uint8; d, e (n_out, units) float16; scales, minima (n_out, groups) bytes.

    A weight is (d * scale) * code - e * minimum; without scales d * code + e. A unit is 32 inputs, or 256 with scales.
    """
    bits = int(layout[1])
    if bits < 8 and not layout.endswith("m"):  # with a sign: moved up
        codes = codes.view(torch.int8) + (1 << bits - 1)
    dwords = _dwords(_filled(codes).view(torch.uint8).unflatten(1, (-1, 8, 4)), bits)
    vectors = dwords.unflatten(0, (-1, LANES)).permute(0, 2, 3, 1)  # (blocks, groups, vectors, 16)
    groups, (bunch, header) = vectors.shape[1], _bunch(layout)
    count = -(-groups // bunch)
    bunches = torch.zeros(len(vectors), count, header + bunch * _code_bytes(layout), dtype=torch.uint8)

    def put(at: int, part: Tensor, each: int) -> int:
        """part (blocks, n, ...), `each` in a bunch -> where it ends there"""
        filled = part.new_zeros(len(part), count * each, *part.shape[2:])
        filled[:, : part.shape[1]] = part
        data = filled.view(len(part), count, -1).view(torch.uint8)
        bunches[:, :, at : at + data.shape[2]] = data
        return at + data.shape[2]

    at = 0
    for half in (d, e):
        at = at if half is None else put(at, _lanes(half), bunch if scales is None else 1)
    for small in (scales, minima):
        at = at if small is None else put(at, _lanes(small), bunch * small.shape[1] // groups)
    assert -(-at // LINE) * LINE == header, "a part is missing"
    put(header, vectors, bunch)
    packed.copy_(bunches.flatten(1)[:, : packed.shape[1]])


def _dwords(codes: Tensor, bits: int) -> Tensor:
    """codes (n_out, groups, 8, 4) uint8 -> (n_out, groups, vectors) int32, as `packed.h` says."""
    parts = [codes]
    if bits < 8:
        parts = [codes[:, :, :4] & 15 | codes[:, :, 4:] << 4]
        high = codes >> 4
        if bits == 5:
            parts.append(_side_by_side(high & 1, 1))
        elif bits == 6:
            parts += [_side_by_side(half & 3, 2) for half in high.split(4, 2)]
    return torch.cat(parts, 2).flatten(2).contiguous().view(torch.int32)


def _side_by_side(high: Tensor, width: int) -> Tensor:
    """(n_out, groups, n, 4), numbers of `width` bits -> (n_out, groups, 1, 4), number j in bits j * width and up."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return (high << shifts).sum(2, keepdim=True, dtype=torch.uint8)


def _filled(rows: Tensor) -> Tensor:
    """With rows of zeros up to a whole block."""
    missing = -rows.shape[0] % LANES
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows


def _lanes(part: Tensor) -> Tensor:
    """(n_out, n) -> (blocks, n, 16)"""
    blocks: Tensor = _filled(part).unflatten(0, (-1, LANES))
    return blocks.transpose(1, 2)


Packed = tuple[str, Tensor, int, Tensor | None]  # layout, blocks, n_out, bias (n_out,) float32 or None


def linear_packed(x: Tensor, segments: Sequence[Packed], activations: str = "bf16") -> Tensor:
    """x (rows, n_in) -> (rows, sum of n_out) in x.dtype; accumulated in float32, rounded once.

    Each output is one chain of fused multiply-adds over the inputs in order, whatever the rows, tiles and threads.
    activations "int8" and "int8-pow2": weights in whole numbers are multiplied with the row as `round_rows` of
    `reference.linear` rounds it to 8 bits, without and with `powers`.
    """
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    rows, n_in = x.shape
    x32 = wide(x)
    total = sum(n_out for _, _, n_out, _ in segments)
    out = torch.empty(rows, total, dtype=torch.float32)
    at, threads = out.data_ptr(), torch.get_num_threads()
    rounded, given, powers = None, x32.data_ptr(), int(activations == "int8-pow2")
    for layout, packed, n_out, bias in segments if rows else ():
        number, added = FORMATS[layout], 0 if bias is None else bias.data_ptr()
        what = (packed.data_ptr(), packed.shape[1], n_out, number, added)
        if activations != "bf16" and number >= WHOLE:
            if rounded is None:
                rounded = torch.empty(rows * (n_in // GROUP * ROUNDED_BYTES + ROW_BYTES), dtype=torch.uint8)
            library.linear_int8(at, total, given, rounded.data_ptr(), rows, n_in, *what, powers, threads)
            given = 0  # it is rounded now
        else:
            library.linear_packed(at, total, x32.data_ptr(), rows, n_in, *what, threads)
        at += 4 * n_out
    return narrowed(out, x.dtype)


def unpack_linear(packed: Tensor, layout: str, n_out: int, n_in: int) -> Tensor:
    """The weights, (n_out, n_in) float32, bit for bit as the scheme that was packed defines them."""
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    out = torch.empty(n_out, n_in, dtype=torch.float32)
    library.unpack_linear(out.data_ptr(), packed.data_ptr(), packed.shape[1], n_in, n_out, FORMATS[layout])
    return out
