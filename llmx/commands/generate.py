"""`llmx generate`: continue a prompt, or answer it. Text goes to stdout as it comes, talk to stderr."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmx.commands import options as o
from llmx.commands.ready import model_facts, progress, ready
from llmx.commands.terminal import show
from llmx.core import Delta, Logprob, SamplingParams
from llmx.errors import UsageError

if TYPE_CHECKING:
    from llmx.llm import LLM, Stream
    from llmx.tokenizer import Tokenizer

_SAMPLING = {"rich_help_panel": "Sampling"}
INTERRUPTED = 130


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; `-` or none: standard input.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A directory, a .gguf file, or `demo`.", show_default=o.DEMO)
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put the prompt into the model's chat template, or continue it as it is.",
            show_default="--chat if the model has a template",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt; needs a template.")] = None,
    max_tokens: o.MaxTokens = 256,
    temperature: o.Temperature = 0.7,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = None,
    stop: o.Stop = None,
    n: Annotated[int, typer.Option("--n", help="How many texts.", **_SAMPLING)] = 1,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    presence_penalty: o.PresencePenalty = 0.0,
    frequency_penalty: o.FrequencyPenalty = 0.0,
    json_schema: o.JsonSchema = None,
    regex: o.Regex = None,
    grammar: o.GrammarFile = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: so many likeliest tokens beside each.", **_SAMPLING)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON report instead of the text.")] = False,
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
    """Continue a prompt, or answer it: chat if the model has a chat template and --raw is not given.

    One newline at the end of standard input is dropped. Several texts (--n) are separated by a blank line.
    """
    if logprobs is not None and not json:
        raise UsageError("--logprobs shows in the JSON report only.", hint="Add --json.")
    if system is not None and chat is False:
        raise UsageError("--system needs a chat template; --raw uses none.", hint="Leave one of the two out.")
    params = o.sampling_params(
        n=n,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop,
        max_tokens=max_tokens,
        logprobs=logprobs,
        seed=seed,
        grammar=o.text_grammar(json_schema, regex, grammar),
    )
    text = read_prompt(prompt)
    name, defaulted = o.choose_model(model)
    config = o.engine_config(
        name,
        dtype=dtype,
        device=device,
        kv_cache_dtype=kv_cache_dtype,
        activations=activations,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        memory_utilization=memory_utilization,
        threads=threads,
        tp=tp,
    )
    ready(name)
    from llmx.llm import LLM

    with progress(f"loading {name}") as tell:
        llm = LLM(config=config, progress=tell)
    with llm:
        script = Script(n, None if json else show)
        stream = begin(llm, text, chat, system, params)
        interrupted = follow(stream, script)
        typer.echo(script.summary(stream, params), err=True)
        if json:
            typer.echo(jsonlib.dumps(report(llm, stream, script, params, defaulted), ensure_ascii=False, indent=2))
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def read_prompt(prompt: str | None) -> str:
    """The argument, or standard input where it is `-` or absent. UsageError if nobody would ever type it."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise UsageError(
            "There is no prompt.", hint='Give one, as in: llmx generate "Once upon a time"; or pipe it in.'
        )
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"Standard input is not UTF-8 text: byte {error.start} can't be read.") from error
    return text.removesuffix("\n").removesuffix("\r")


def begin(llm: LLM, text: str, chat: bool | None, system: str | None, params: SamplingParams) -> Stream:
    """Open the stream, through the chat template if that is asked for, or if there is one and nothing was said."""
    if chat is None:
        chat = llm.tokenizer.template is not None or system is not None
    if not chat:
        return llm.open(text, params)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.open(llm.render([*messages, {"role": "user", "content": text}]), params)


def follow(stream: Stream, script: Script) -> bool:
    """Read the stream to its end, or to Ctrl-C; then True."""
    try:
        for delta in stream:
            script.add(delta)
    except KeyboardInterrupt:
        stream.abort()
        return True
    finally:
        script.end()
    return False


@dataclass
class Choice:
    """One of the texts, so far. Until it ends its finish reason is that of an interrupted one."""

    text: str = ""
    unseen: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str = "abort"
    stop_reason: int | str | None = None
    ended: bool = False


class Script:
    """What came so far, and when. `show` gets the first text as it comes, each next one once those before it ended."""

    def __init__(self, n: int, show: Callable[[str], None] | None) -> None:
        self.choices = [Choice() for _ in range(n)]
        self.begun = time.perf_counter()
        self.arrivals: list[tuple[float, int]] = []  # (clock, tokens)
        self._show = show or (lambda _: None)
        self._at = 0

    def add(self, delta: Delta) -> None:
        choice = self.choices[delta.index]
        choice.text += delta.text
        choice.unseen += delta.text
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs or ()
        if delta.token_ids:
            self.arrivals.append((time.perf_counter(), len(delta.token_ids)))
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason, choice.ended = delta.finish_reason, delta.stop_reason, True
        self._advance()

    def _advance(self) -> None:
        while True:
            choice = self.choices[self._at]
            if choice.unseen:
                self._show(choice.unseen)
                choice.unseen = ""
            if not choice.ended or self._at + 1 == len(self.choices):
                return
            self._show("\n\n")
            self._at += 1

    def end(self) -> None:
        """Show what is left, then a newline."""
        for at, choice in enumerate(self.choices[self._at :]):
            self._show(("\n\n" if at and choice.unseen else "") + choice.unseen)
        self._show("\n")

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    def timings(self) -> dict[str, float | None]:
        """Seconds from the prompt's submission, and tokens per second between the first and the last arrival."""
        if not self.arrivals:
            return {"ttft_seconds": None, "total_seconds": None, "tokens_per_second": None}
        (first, count), (last, _) = self.arrivals[0], self.arrivals[-1]
        rate = (self.tokens - count) / (last - first) if last > first else None
        return {"ttft_seconds": first - self.begun, "total_seconds": last - self.begun, "tokens_per_second": rate}

    def summary(self, stream: Stream, params: SamplingParams) -> str:
        """The line of figures that ends every run."""
        timings, parts = self.timings(), [f"{len(stream.prompt_token_ids)} prompt tokens"]
        if stream.cached_tokens:
            parts[0] += f" ({stream.cached_tokens} cached)"
        if timings["ttft_seconds"] is not None:
            parts.append(f"first token after {timings['ttft_seconds']:.2f} s")
        rate = timings["tokens_per_second"]
        parts.append(f"{self.tokens} tokens" + (f" at {rate:.1f} tokens/s" if rate else ""))
        parts.append("finished by " + ", ".join(dict.fromkeys(choice.finish_reason for choice in self.choices)))
        return "; ".join(parts) + (f"; seed {params.seed}" if params.temperature else "")


def report(llm: LLM, stream: Stream, script: Script, params: SamplingParams, defaulted: bool) -> dict[str, Any]:
    """The report's JSON."""
    from llmx.report import Report

    prompt, tokens = len(stream.prompt_token_ids), script.tokens
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    return Report(
        "generate",
        model=model_facts(llm.info),
        model_defaulted=defaulted,
        kernels=dict(llm.info.kernels),
        seeds={"sampling": params.seed or 0},
        definitions={
            "timings.ttft_seconds": "arrival of the first token - submission",
            "timings.tokens_per_second": "tokens after the first arrival / seconds to the last, all texts together",
        },
        results={
            "choices": [_choice(i, choice, llm.tokenizer) for i, choice in enumerate(script.choices)],
            "prompt_token_ids": list(stream.prompt_token_ids),
            "usage": usage | {"cached_tokens": stream.cached_tokens},
            "timings": script.timings() | {"load_seconds": llm.info.load_seconds},
        },
    ).to_dict()


def _choice(index: int, choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
    def named(token: int, value: float) -> dict[str, Any]:
        return {"token_id": token, "token": tokenizer.token(token), "logprob": value}

    logprobs = [
        named(one.token, one.value) | {"top": [named(token, value) for token, value in one.top]}
        for one in choice.logprobs
    ]
    return {
        "index": index,
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "logprobs": logprobs or None,
    }
