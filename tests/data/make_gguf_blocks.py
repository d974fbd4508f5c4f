"""Writes gguf_blocks.json: three stored blocks of each GGUF type, and their weights as the gguf package computes them.

Bytes are random but for the scales: ordinary ones; a zero and the smallest there is; the largest, negative.
Run by hand, when a type is added: python tests/data/make_gguf_blocks.py
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path

import gguf
import numpy as np

HALVES = {  # bytes where float16 scales lie: one, or two
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
SCALES = ((0.0123, -0.0456), (-0.0, 2.0**-24), (-65504.0, 65504.0))
BYTES = {  # the first bytes of types whose scales are no float16
    "MXFP4": (bytes([120]), bytes([0]), bytes([250])),
    "NVFP4": (bytes([0x38, 0x07, 0x4B, 0x22]), bytes([0x00, 0x01, 0x08, 0x7F]), bytes([0x7E, 0x7D, 0x70, 0x6F])),
}


def blocks_of(kind: str, seed: int) -> np.ndarray:
    """uint8 (3, bytes of a block)."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = np.random.default_rng(seed).integers(0, 256, (3, size), dtype=np.uint8)
    for block, scales, head in zip(blocks, SCALES, BYTES.get(kind, (b"",) * 3), strict=True):
        block[: len(head)] = list(head)
        for at, scale in zip(HALVES.get(kind, ()), scales, strict=False):
            block[at : at + 2] = np.array([scale], dtype="<f2").view(np.uint8)
        if kind == "IQ1_M":  # four bits of its scale lie in the high half of every second of the last eight bytes
            bits = int(np.array([scales[0]], dtype="<f2").view("<u2")[0])
            block[49::2] = [byte & 15 | (bits >> 4 * i & 15) << 4 for i, byte in enumerate(block[49::2].tolist())]
    return blocks


def main() -> None:
    entries = []
    for seed, kind in enumerate((*HALVES, "IQ1_M", *BYTES)):
        blocks = blocks_of(kind, seed)
        weights = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
        assert np.isfinite(weights).all(), kind
        packed = base64.b85encode(zlib.compress(weights.astype("<f4").tobytes(), 9)).decode()
        entries.append(f'"{kind}": {json.dumps({"blocks": [b.tobytes().hex() for b in blocks], "weights": packed})}')
    Path(__file__).with_name("gguf_blocks.json").write_text("{\n" + ",\n".join(entries) + "\n}\n")


if __name__ == "__main__":
    main()
