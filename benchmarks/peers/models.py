"""The files that are compared: the demo model, what is made of it, and random ones too large for a cache.

Everything made lies in one folder and is used again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from peers.processes import Unavailable

ROWS = ("prefill", "decode", "batch", "http")
ALL, SINGLE, DECODE = ROWS, ("prefill", "decode"), ("decode",)
HIDDEN, FFN, LAYERS, HEADS, KV_HEADS = 2048, 8192, 16, 32, 8  # Llama 3.2 1B's, with the demo's vocabulary
STD = 0.02
DENSE = """
import sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, name, out = sys.argv[1:]
dense = {"gguf_file": name, "dtype": torch.bfloat16}
if hasattr(transformers, "GgufConfig"):  # versions without it always unpack
    dense["quantization_config"] = transformers.GgufConfig(dequantize=True)
AutoModelForCausalLM.from_pretrained(folder, **dense).save_pretrained(out)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
"""


@dataclass(frozen=True)
class Model:
    """`rows`: those that are measured. `made`: how the file came about."""

    key: str
    title: str
    rows: tuple[str, ...]
    path: Path
    made: str


class Models:
    """By key; made in `folder` when they are asked for."""

    def __init__(self, folder: Path, gemma: Path | None, llama_cpp: Path | None) -> None:
        self.folder, self.gemma, self.llama_cpp = folder, gemma, llama_cpp
        self.makers: dict[str, Callable[[], Model]] = {
            "q4_1": self._demo,
            "q4_0": self._q4_0,
            "gemma": self._gemma,
            "1b-q4_k_m": lambda: self._random("Q4_K_M"),
            "1b-q4_0": lambda: self._random("Q4_0"),
        }

    def open(self, key: str) -> Model:
        """Unavailable where it takes something that isn't there."""
        return self.makers[key]()

    def _demo(self) -> Model:
        from llmx.formats.hub import DEMO, pull

        return Model("q4_1", "SmolLM2-135M Q4_1", ALL, pull(DEMO).path, "llmx pull demo")

    def _q4_0(self) -> Model:
        if self.llama_cpp is None:
            raise Unavailable("llama-quantize makes it: give --llama-cpp")
        source, path = self._demo().path, self.folder / "SmolLM2-135M-Instruct.Q4_0.gguf"
        flags = ["--allow-requantize", "--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0"]
        if not path.exists():
            command = [str(self.llama_cpp / "llama-quantize"), *flags, str(source), str(path.with_suffix(".tmp"))]
            subprocess.run([*command, "Q4_0"], check=True, capture_output=True)
            path.with_suffix(".tmp").rename(path)
        rows = ("prefill", "decode", "batch")
        return Model("q4_0", "SmolLM2-135M Q4_0", rows, path, f"llama-quantize {' '.join(flags)} of the Q4_1 file")

    def _gemma(self) -> Model:
        if self.gemma is None:
            raise Unavailable("give its GGUF with --gemma")
        return Model("gemma", f"Gemma 3 270M ({self.gemma.stem})", SINGLE, self.gemma, "given")

    def _random(self, kind: str) -> Model:
        path = self.folder / f"random-1b.{kind}.gguf"
        if not path.exists():
            write_random(path, kind, self._demo().path)
        return Model(f"1b-{kind.lower()}", f"1B-shaped, random, {kind}", DECODE, path, "random blocks, by this script")

    def dense(self, model: Model) -> Path:
        """The same weights as a folder in bfloat16, by transformers in this Python. Unavailable if it can't."""
        path = self.folder / f"{model.path.stem}.bf16"
        if not (path / "config.json").exists():
            command = [sys.executable, "-c", DENSE, str(model.path.parent), model.path.name, str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise Unavailable(f"no dense folder of {model.path.name}: {done.stderr.strip().splitlines()[-1][:300]}")
        return path


def write_random(path: Path, kind: str, vocabulary: Path) -> None:
    """A Llama of 1.1e9 parameters whose stored blocks are random, N(0, 0.02)-like and finite; kinds of tensors as
    llama-quantize chooses them. The vocabulary is another GGUF's."""
    import gguf

    source = gguf.GGUFReader(vocabulary)
    temporary = path.with_suffix(".tmp")
    writer = gguf.GGUFWriter(temporary, "llama")
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            of, *inner = field.types
            writer.add_key_value(name, field.contents(), of, inner[-1] if inner else None)
    size = len(source.fields["tokenizer.ggml.tokens"].contents())
    writer.add_vocab_size(size)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    _tensors(writer, kind, size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.rename(path)


def _tensors(writer: object, kind: str, vocab: int) -> None:
    import gguf
    import numpy as np

    assert isinstance(writer, gguf.GGUFWriter)
    draw = np.random.default_rng(0)
    types = gguf.GGMLQuantizationType
    plain, better = (types.Q4_0, types.Q4_0) if kind == "Q4_0" else (types.Q4_K, types.Q6_K)

    def matrix(name: str, n_out: int, n_in: int, of: gguf.GGMLQuantizationType) -> None:
        writer.add_tensor(f"{name}.weight", _blocks(draw, of, n_out, n_in), raw_dtype=of)

    def ones(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))

    matrix("token_embd", vocab, HIDDEN, plain)
    matrix("output", vocab, HIDDEN, types.Q6_K)
    ones("output_norm")
    kv = HIDDEN // HEADS * KV_HEADS
    for i in range(LAYERS):
        more = i < LAYERS // 8 or i >= 7 * LAYERS // 8 or (i - LAYERS // 8) % 3 == 2  # llama.cpp's use_more_bits
        value = better if more else plain
        ones(f"blk.{i}.attn_norm")
        ones(f"blk.{i}.ffn_norm")
        matrix(f"blk.{i}.attn_q", HIDDEN, HIDDEN, plain)
        matrix(f"blk.{i}.attn_k", kv, HIDDEN, plain)
        matrix(f"blk.{i}.attn_v", kv, HIDDEN, value)
        matrix(f"blk.{i}.attn_output", HIDDEN, HIDDEN, plain)
        matrix(f"blk.{i}.ffn_gate", FFN, HIDDEN, plain)
        matrix(f"blk.{i}.ffn_up", FFN, HIDDEN, plain)
        matrix(f"blk.{i}.ffn_down", HIDDEN, FFN, value)


def _blocks(draw: object, kind: object, n_out: int, n_in: int) -> object:
    """(n_out, bytes of a row) uint8: random codes with constant scales that give weights a deviation of STD."""
    import gguf
    import numpy as np

    assert isinstance(draw, np.random.Generator)
    types = gguf.GGMLQuantizationType
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (n_out * n_in // elements, size), np.uint8)

    def put(at: int, value: float) -> None:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)

    if kind == types.Q4_0:  # f16 scale, 16 bytes of nibbles: -8..7
        put(0, STD / 4.6)
    elif kind == types.Q4_K:  # f16 scale, f16 of minima, 12 bytes of 6-bit scales and minima (here 32), 128 of nibbles
        put(0, STD / 4.6 / 32)
        put(2, STD / 4.6 / 32 * 7.5)
        blocks[:, 4:12], blocks[:, 12:16] = 0xA0, 0
    else:  # Q6_K: 192 bytes of codes -32..31, 16 of int8 scales, f16 scale
        assert kind == types.Q6_K
        blocks[:, 192:208] = 16
        put(208, STD / 18.5 / 16)
    return blocks.reshape(n_out, -1)
