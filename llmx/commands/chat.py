"""`llmx chat`: a conversation in the terminal, with a model loaded here or with a server."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from llmx.commands import options as o
from llmx.commands.conversation import Conversation, Local, Speaker, converse
from llmx.commands.ready import progress, ready
from llmx.commands.settings import given
from llmx.commands.terminal import Lines
from llmx.errors import UsageError


def chat(
    ctx: typer.Context,
    model: o.Model = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            help="Talk to this server of OpenAI's API instead of loading a model; MODEL is then the name it serves. "
            "Its key, if it wants one, is in LLMX_API_KEY or OPENAI_API_KEY.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    max_tokens: o.MaxTokens = 0,
    temperature: o.Temperature = 0.7,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = None,
    stop: o.Stop = None,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    presence_penalty: o.PresencePenalty = 0.0,
    frequency_penalty: o.FrequencyPenalty = 0.0,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    kv_cache_dtype: o.KvCacheDtype = "auto",
    activations: o.Activations = "auto",
    max_model_len: o.MaxModelLen = None,
    max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    memory_utilization: o.MemoryUtilization = 0.9,
    threads: o.Threads = None,
    tp: o.TensorParallel = 1,
) -> None:
    """Talk with a model; /help says how. Answers go to stdout. Where nobody types, each line of stdin is a turn.

    With --url only the sampling flags that are set somewhere are sent: the rest is for the server to choose.
    """
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "stop": stop,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }
    engine: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "kv_cache_dtype": kv_cache_dtype,
        "activations": activations,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
        "memory_utilization": memory_utilization,
        "threads": threads,
        "tp": tp,
    }
    params = o.sampling_params(**sampling)
    if url is not None:
        from llmx.commands.remote import Remote

        for name in engine:
            if given(ctx, name) == "command line":
                raise UsageError(f"--{name.replace('_', '-')} is for a model loaded here; with --url there is none.")
        asked = {name: value for name, value in sampling.items() if given(ctx, name)}
        if not max_tokens:
            asked.pop("max_tokens", None)
        talk(Remote(url, model, asked), system)
        return
    name, _ = o.choose_model(model)
    config = o.engine_config(name, **engine)
    ready(name)
    from llmx.llm import LLM

    with progress(f"loading {name}") as tell:
        llm = LLM(config=config, progress=tell)
    with llm:
        if llm.tokenizer.template is None:
            raise UsageError(f"{name} has no chat template.", "`llmx generate` continues a text with it.")
        talk(Local(llm, params), system)


def talk(speaker: Speaker, system: str | None) -> None:
    from llmx.formats.hub import cache_dir

    lines = Lines(cache_dir() / "chat_history")
    if lines.interactive and sys.stderr.isatty():
        typer.echo(f"{speaker.name}. /help lists the commands, /exit or Ctrl-D leaves.", err=True)
    converse(Conversation(speaker, system), lines)
