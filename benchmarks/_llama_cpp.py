"""llama.cpp's command-line tools as peers: where they are, how they run, what they print, and files made for them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

EXACT = ("-ctk", "f32", "-ctv", "f32", "-fa", "off")  # keys and values as they are
LLMX = (sys.executable, "-c", "import sys; sys.argv[0] = 'llmx'; from llmx.cli import main; main()")


class Failed(Exception):
    """A program that ended with another exit code than 0; the end of what it said."""


def run(command: Sequence[str]) -> tuple[float, str]:
    """Seconds, and what was said."""
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise Failed(f"{command[0]} ended with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")
    return seconds, done.stdout + done.stderr


def tool(folder: Path, name: str) -> str:
    path = folder / name
    if not path.is_file():
        raise SystemExit(f"{path} is missing; build it: cmake --build BUILD --target {name}")
    return str(path)


@contextmanager
def llama_server(binary: str, model: str, threads: int, *more: str) -> Iterator[str]:
    """The server on a free loopback port; its URL once it is healthy."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    command = [binary, "-m", model, *address, "-c", "2048", "-t", str(threads), "-np", "1", *more]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise SystemExit(f"{binary} ended with exit code {process.returncode}")
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def save_logits(program: str, model: Path, text: Path, out: Path, ctx: int, chunks: int, threads: int) -> None:
    """By llama-perplexity."""
    sizes = ("-c", str(ctx), "--chunks", str(chunks), "-t", str(threads))
    run([program, "-m", str(model), "-f", str(text), *sizes, "--save-all-logits", str(out), *EXACT])


def kl_divergence(program: str, model: Path, logits: Path, ctx: int, threads: int) -> float:
    """The mean that llama-perplexity prints."""
    against = ("--kl-divergence", "--kl-divergence-base", str(logits))
    _, said = run([program, "-m", str(model), "-c", str(ctx), "-t", str(threads), *against, *EXACT])
    found = re.search(r"Mean    KLD:\s*(-?[\d.]+(?:e[+-]?\d+)?|nan|-nan)", said)
    if found is None:
        raise Failed(f"{program} said no KL divergence:\n{said[-2000:]}")
    return float(found[1])


def as_f32(model: str | Path, path: str | Path, rounded: bool = False) -> str:
    """The same GGUF with every weight as the F32 number that it stands for, or that it becomes in Q4_0 blocks."""
    import gguf

    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[-1] if inner else None)
    q4_0 = gguf.GGMLQuantizationType.Q4_0
    for tensor in reader.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32")
        if rounded and weights.ndim == 2 and weights.shape[1] % 32 == 0 and tensor.name != "token_embd.weight":
            weights = gguf.dequantize(gguf.quantize(weights, q4_0), q4_0)
        writer.add_tensor(tensor.name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)
