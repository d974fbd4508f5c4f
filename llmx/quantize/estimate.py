"""What a run will take, from the sizes of the linears alone."""

from __future__ import annotations

import time
from typing import Any

import torch

from llmx.quantize.driver import Source
from llmx.quantize.options import Options
from llmx.quantize.room import States
from llmx.quantize.source import Unit

BESIDE = 100_000_000  # bytes: the tokenizer, rows that are worked on, the libraries' buffers


def estimate(source: Source, options: Options, tokens: int, states: States) -> dict[str, Any]:
    """Bytes of the files and of memory, bits a quantized weight, and roughly seconds. tokens: of calibration."""
    checkpoint = source.opened.checkpoint
    mine = source.mine(options)
    weights = sum(unit.n_out * unit.n_in for unit in mine)
    packed = sum(_bytes(unit, options, source.dtype.itemsize) for unit in mine)
    before = sum(checkpoint.stored(name).nbytes for name in checkpoint.names())
    block = max((sum(u.n_out * u.n_in for u in units) for units in source.units), default=0)
    memory = 6 * block
    if (
        options.grids
    ):  # the largest of what is there by turns: a finished block unpacked, or what its codes are made from
        hessians = max((sum({u.n_in: u.n_in**2 for u in units}.values()) for units in source.units), default=0)
        factor = max((u.n_in**2 for u in mine), default=0) if options.method == "gptq" else 0
        memory = max(4 * block, 2 * hessians + 4 * factor + block * options.bits // 8) + BESIDE
    return {
        "linears": len(mine), "weights": weights, "source_bytes": source.bytes,
        "bytes": before - weights * source.dtype.itemsize + packed,
        "bits_per_weight": 8 * packed / max(1, weights), "memory_bytes": memory + states.in_memory,
        "seconds": _seconds(source, options, tokens),
    }  # fmt: skip


def _bytes(unit: Unit, options: Options, itemsize: int) -> float:
    count = unit.n_out * unit.n_in
    if options.grids:
        groups = count // options.group
        return count * options.bits / 8 + groups * (2 + options.bits / 8)
    if options.method == "fp8" and options.fp8_mode != "dynamic":
        scales = -(-unit.n_out // 128) * -(-unit.n_in // 128) if options.fp8_mode == "block" else 2
        return count + scales * 4
    return count + unit.n_out * itemsize


def _seconds(source: Source, options: Options, tokens: int) -> float:
    """By this machine's own speed of products: two passes through each block, and the Hessians."""
    a = torch.ones(768, 768)
    a @ a
    began = time.monotonic()
    a @ a
    speed = 2 * 768**3 / max(time.monotonic() - began, 1e-6)
    products = sum(4.0 * unit.n_out * unit.n_in * tokens for unit in source.every)
    if options.grids:
        products += sum(tokens * width**2 for units in source.units for width in {unit.n_in for unit in units})
        tries = 42 if options.method == "awq" else 6
        products += sum(2.0 * tries * unit.n_out * unit.n_in**2 for unit in source.every)
    return 1.5 * products / speed
