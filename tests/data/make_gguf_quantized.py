"""Writes gguf_quantized.json: what ggml's quantisers make of the rows in `rows`, with and without importance.

Run by hand with llama.cpp's shared library: python tests/data/make_gguf_quantized.py .../libggml-base.so
It calls ggml_quantize_chunk, as llama-quantize does for each piece of a tensor.
"""

from __future__ import annotations

import base64
import ctypes
import json
import random
import sys
from pathlib import Path

import torch

KINDS = {  # -> (ggml's number of the type, weights in a block, its bytes)
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ4_NL": (20, 32, 18),
    "IQ4_XS": (23, 256, 136),
}


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (1, 512): ordinary weights, a few large ones, a run of zeros, one of tiny ones; importance (512,)."""
    draw = random.Random(8)
    weights = [draw.gauss(0, 0.05) for _ in range(512)]
    weights[40], weights[300] = 0.9, -0.7
    weights[96:128] = [0.0] * 32
    weights[320:336] = [1e-7 * w for w in weights[320:336]]
    return torch.tensor([weights]), torch.tensor([draw.random() ** 4 for _ in range(512)])


def main() -> None:
    quantize = ctypes.CDLL(sys.argv[1]).ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    weights, importance = rows()
    found = {}
    for kind, (number, size, block_bytes) in KINDS.items():
        for name, given in (("plain", None), ("importance", importance.data_ptr())):
            out = torch.zeros(512 // size * block_bytes, dtype=torch.uint8)
            assert quantize(number, weights.data_ptr(), out.data_ptr(), 0, 1, 512, given) == len(out)
            found.setdefault(kind, {})[name] = base64.b85encode(bytes(out.tolist())).decode()
    Path(__file__).with_name("gguf_quantized.json").write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    main()
