"""How much memory `llmx quantize` takes, on a random model of about 2 GB that it makes first.

`RssAnon` of its process (what it allocates; mapped files, which the system can drop, are not in it) is read a hundred
times a second. From the largest that the same imports take is subtracted. Exit code 3 where that is above two of the
model's blocks as they are stored, plus the calibration texts' hidden states (float32), plus 200 MB.

    python benchmarks/quantize_memory.py --tokenizer DIR --calib TEXT --work DIR --gptq
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from _common import publish, say

from llmx.formats.safetensors import write_shard
from llmx.report import Report

EXTRA = 200e6
IMPORTS = "import llmx.quantize.run, llmx.models.llama, llmx.commands.quantize; print('ready', flush=True); input()"
DEFINITIONS = {
    "peak_bytes": "largest RssAnon, less that of the imports alone",
    "allowed_bytes": "two blocks, the hidden states and 200 MB",
}


def anonymous(pid: int) -> int:
    """RssAnon in bytes; 0 when the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def make(folder: Path, tokenizer: Path, hidden: int, inner: int, layers: int) -> int:
    """A Llama in bfloat16, and the bytes of a block; norms of 1, weights that keep sizes as they are."""
    vocab = max(json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"].values()) + 1
    heads = hidden // 64
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads // 4, "head_dim": 64, "vocab_size": vocab, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "rope_theta": 10000.0, "tie_word_embeddings": True, "dtype": "bfloat16",
    }  # fmt: skip
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden // 4, hidden),
        "self_attn.v_proj": (hidden // 4, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    block = 2 * sum(rows * columns for rows, columns in shapes.values())
    if (folder / "model.safetensors.index.json").exists():
        return block
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    ones, placed = torch.ones(hidden, dtype=torch.bfloat16), {}

    def shard(number: int, tensors: dict[str, torch.Tensor]) -> None:
        name = f"model-{number:05d}.safetensors"
        write_shard(folder / name, tensors)
        placed.update(dict.fromkeys(tensors, name))

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns) * columns**-0.5).bfloat16()

    for index in range(layers):
        front = f"model.layers.{index}."
        tensors = {f"{front}{name}.weight": drawn(*shape) for name, shape in shapes.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        shard(index + 1, tensors | {f"{front}{name}.weight": ones.clone() for name in norms})
    shard(layers + 1, {"model.embed_tokens.weight": drawn(vocab, hidden), "model.norm.weight": ones.clone()})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return block


def after_imports() -> int:
    process = subprocess.Popen([sys.executable, "-c", IMPORTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    found = anonymous(process.pid)
    process.communicate(b"\n")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, type=Path, help="a model's folder, for its tokenizer")
    parser.add_argument("--calib", required=True, type=Path)
    parser.add_argument("--work", required=True, type=Path)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--json", type=Path, default=None)
    flags, method = parser.parse_known_args()
    model, out = flags.work / "random-2gb", flags.work / "quantized"
    block = make(model, flags.tokenizer, flags.hidden, flags.inner, flags.layers)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    before = after_imports()
    say(f"{size / 1e9:.2f} GB in blocks of {block / 1e6:.0f} MB; {before / 1e6:.0f} MB after the imports")
    given = ["--samples", str(flags.samples), "--seq-len", str(flags.length), "--calib", str(flags.calib)]
    command = [sys.executable, "-m", "llmx.cli", "quantize", str(model), "-o", str(out), "--force", *given, *method]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous(process.pid))
        time.sleep(0.01)
    if process.returncode:
        raise SystemExit(f"llmx quantize ended with {process.returncode}")
    states = flags.samples * flags.length * flags.hidden * 4
    allowed = 2 * block + states + EXTRA
    results = {
        "model_bytes": size, "block_bytes": block, "hidden_states_bytes": states, "after_imports_bytes": before,
        "peak_bytes": peak - before, "allowed_bytes": allowed, "options": method,
    }  # fmt: skip
    publish(Report("quantize_memory", results, definitions=DEFINITIONS, seeds={"weights": 0}), flags.json)
    say(f"{(peak - before) / 1e6:.0f} MB above the imports; {allowed / 1e6:.0f} MB are allowed")
    return 3 if peak - before > allowed else 0


if __name__ == "__main__":
    sys.exit(main())
