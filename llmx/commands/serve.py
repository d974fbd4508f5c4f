"""`llmx serve`: OpenAI's API over a model, on this machine alone unless told otherwise."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path
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
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            hide_input=True,  # by --print-config too
            help="Key that clients must send; repeatable. Others on this machine can read a command line: better give "
            "it in the variable LLMX_API_KEY, or use --api-key-file.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            help="Keys, one a line; behind a key may come the paths that it is good for.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option("--allowed-origins", help="Web page that may use this; repeatable.", rich_help_panel=_SERVER),
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-hosts",
            help="Name by which clients may call this, as in the header Host; repeatable; *: any. Default: on loopback "
            "its own names, elsewhere any.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    share_prefix_cache: Annotated[
        bool,
        typer.Option(
            "--share-prefix-cache",
            help="Also between holders of different keys, who can then tell from the time what others have asked.",
            rich_help_panel=_SERVER,
        ),
    ] = False,
    queue_timeout: Annotated[
        float | None,
        typer.Option(
            "--queue-timeout",
            help="Seconds that a request may wait for its turn; then it gets 503. Default: for ever.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            "--request-timeout",
            help="Seconds that a request may take in all; then it gets 504. Default: for ever.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    max_num_queued_reqs: Annotated[
        int | None,
        typer.Option(
            "--max-num-queued-reqs",
            help="Most texts that wait for a free sequence; more are told to come back. Default: 4 × --max-num-seqs, "
            "at least 64.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    max_num_queued_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-queued-tokens",
            help="Most tokens of prompts that wait. Default: 4 KV caches full.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template",
            help="Jinja2 file, or the name of one of the model's own templates.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    tool_call_parser: Annotated[
        str,
        typer.Option(
            "--tool-call-parser",
            help="How the model writes tool calls: auto (as its chat template tells), off, hermes, llama3_json, "
            "mistral, granite or phi4_mini.",
            rich_help_panel=_SERVER,
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        typer.Option(
            "--reasoning-parser",
            help="What stands around the model's thoughts: auto (as its chat template tells), off, think or mistral.",
            rich_help_panel=_SERVER,
        ),
    ] = "auto",
    generation_config: Annotated[
        str,
        typer.Option(
            "--generation-config",
            help="auto: requests that don't say otherwise sample as the model's generation_config.json says; none: "
            "they don't.",
            rich_help_panel=_SERVER,
        ),
    ] = "auto",
    override_generation_config: Annotated[
        str | None,
        typer.Option(
            "--override-generation-config",
            help="JSON, such as '{\"temperature\": 0.7}': goes before the file, and requests before it.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    kv_cache_dtype: o.KvCacheDtype = "auto",
    activations: o.Activations = "auto",
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
    from llmx.server import keys
    from llmx.server.defaults import Defaults
    from llmx.server.settings import ServerSettings

    settings = ServerSettings(
        host,
        port,
        (served_model_name,) if served_model_name is not None else (),
        drain_seconds,
        log_requests=log_requests,
        keys=keys.read(api_key or (), api_key_file),
        origins=tuple(allowed_origins or ()),
        queued_requests=max_num_queued_reqs,
        queued_tokens=max_num_queued_tokens,
        queue_seconds=queue_timeout,
        request_seconds=request_timeout,
        allowed_hosts=tuple(allowed_hosts or ()),
        share_cache=share_prefix_cache,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
    )
    sampling = Defaults(generation_config, override_generation_config)
    name, _ = o.choose_model(model)
    config = o.engine_config(
        name,
        dtype=dtype,
        device=device,
        kv_cache_dtype=kv_cache_dtype,
        activations=activations,
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
    from llmx.server.opening import opening

    # Until the server has its own handler, being terminated still has to unwind: the engine's process must go too.
    signal.signal(signal.SIGTERM, _terminated)
    with bind(settings.host, settings.port) as listener:
        with opening(listener):
            settings = replace(settings, defaults=sampling.of(ready(name)))
            from llmx.llm import LLM
            from llmx.server.run import serve

            with progress(f"loading {name}") as tell:
                llm = LLM(name, config=config, spawn=True, progress=tell, chat_template=chat_template)
        with llm:
            raise typer.Exit(serve(llm, settings, listener))
