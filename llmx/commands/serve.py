"""`llmx serve`: OpenAI's API over a model, on this machine alone unless told otherwise."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from llmx.commands import options as o
from llmx.commands.ready import progress, ready

_SERVER = "Server"


def _terminated(*_: object) -> None:
    sys.exit(0)


def serve(
    model: o.Model = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0: any free one.", rich_help_panel=_SERVER)] = 8000,
    served_model_name: o.ServedModelName = None,
    drain_seconds: Annotated[
        float,
        typer.Option("--drain-seconds", help="How long requests may go on when stopped.", rich_help_panel=_SERVER),
    ] = 30.0,
    log_requests: Annotated[
        bool, typer.Option("--log-requests", help="One line per request on stderr.", rich_help_panel=_SERVER)
    ] = False,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    kv_cache_dtype: o.KvCacheDtype = "auto",
    max_model_len: o.MaxModelLen = None,
    max_num_seqs: o.MaxNumSeqs = None,
    max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    memory_utilization: o.MemoryUtilization = 0.9,
    block_size: o.BlockSize = 16,
    prefix_caching: o.PrefixCaching = True,
    threads: o.Threads = None,
    tp: o.TensorParallel = 1,
    seed: o.Seed = None,
) -> None:
    """Serve /v1/completions and /v1/chat/completions, plain and streamed. Stop it with Ctrl-C."""
    from llmx.server.settings import ServerSettings

    names = (served_model_name,) if served_model_name is not None else ()
    settings = ServerSettings(host, port, names, drain_seconds, log_requests=log_requests)
    name, _ = o.choose_model(model)
    config = o.engine_config(
        name,
        dtype=dtype,
        device=device,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        memory_utilization=memory_utilization,
        block_size=block_size,
        prefix_caching=prefix_caching,
        threads=threads,
        tp=tp,
        seed=seed,
    )
    from llmx.server.listen import bind

    # Until the server has its own handler, being terminated still has to unwind: the engine's process must go too.
    signal.signal(signal.SIGTERM, _terminated)
    with bind(settings.host, settings.port) as listener:
        ready(name)
        from llmx.llm import LLM
        from llmx.server.run import serve

        with progress(f"loading {name}") as tell:
            llm = LLM(name, config=config, spawn=True, progress=tell)
        with llm:
            raise typer.Exit(serve(llm, settings, listener))
