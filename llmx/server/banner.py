"""What the server says once it listens: where, with what model, how much fits, which kernels, and a line to paste."""

from __future__ import annotations

import json
import shlex
import socket
from collections import defaultdict

from llmx.config import EngineInfo
from llmx.server.service import Service

EVERYWHERE = ("0.0.0.0", "::")


def start_lines(service: Service, listener: socket.socket) -> list[str]:
    """The lines, in order."""
    info, url = service.llm.info, base_url(listener)
    lines = [
        f"llmx serves {', '.join(service.public)} at {url}/v1",
        f"  model    {_model(info)}",
        f"  fits     {_fits(info)}",
        f"  kernels  {_kernels(info)}",
    ]
    if service.defaults:
        shown = ", ".join(f"{name} {value:g}" for name, value in service.defaults.items())
        lines.insert(2, f"  samples  {shown}, unless a request says otherwise")
    if listener.getsockname()[0] not in ("127.0.0.1", "::1") and not service.settings.keys:
        lines.append("  warning  whoever reaches this address can use the model: there is no key")
    return [*lines, f"Try: {curl(service, url)}"]


def base_url(listener: socket.socket) -> str:
    """http://address:port, as a client on this machine can use it."""
    host, port = listener.getsockname()[:2]
    if host in EVERYWHERE:
        host = "127.0.0.1" if host == EVERYWHERE[0] else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def curl(service: Service, url: str) -> str:
    """A chat if the model has a template, else a completion."""
    if service.tokenizer.template is not None:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 32}
    else:
        path, body = "completions", {"prompt": "Once upon a time", "max_tokens": 32}
    data = shlex.quote(json.dumps({"model": service.model, **body}))
    key = ' -H "Authorization: Bearer $LLMX_API_KEY"' if service.settings.keys else ""
    return f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {data}"


def _model(info: EngineInfo) -> str:
    threads = f" ({info.threads} threads)" if info.device.startswith("cpu") else ""
    return (
        f"{info.architecture}, {info.parameters / 1e6:,.0f} M parameters, {_bytes(info.weight_bytes)} of weights "
        f"({', '.join(info.schemes)}), {info.dtype} on {info.device}{threads}, loaded in {info.load_seconds:.1f} s"
    )


def _fits(info: EngineInfo) -> str:
    tokens = info.num_blocks * info.block_size
    together = min(info.max_num_seqs, tokens // info.max_model_len)
    return (
        f"context {info.max_model_len:,} tokens × {info.max_num_seqs} sequences; KV cache {tokens:,} tokens "
        f"({_bytes(info.kv_cache_bytes)}, {info.kv_cache_dtype}): {together} at full context"
    )


def _kernels(info: EngineInfo) -> str:
    """`reference` alone where every op is that, else the ops behind each implementation."""
    ops = defaultdict(list)
    for op, implementation in info.kernels:
        ops[implementation].append(op)
    if len(ops) == 1:
        return next(iter(ops))
    return "; ".join(f"{implementation}: {', '.join(names)}" for implementation, names in sorted(ops.items()))


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
