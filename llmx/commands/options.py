"""Options that commands share, under llmx's names and vLLM's long ones, and what they mean as an EngineConfig."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from llmx.config import EngineConfig
from llmx.core import SamplingParams
from llmx.errors import UsageError

DEMO = "demo"

_ENGINE = "Engine"
_OUTPUT = "Output"
_SAMPLING = "Sampling"
_STRUCTURE = "Form of the text"

Model = Annotated[
    str | None,
    typer.Argument(
        help="A directory with config.json, a .gguf file, a name of the Hugging Face Hub (org/name, or org/name:Q4_K_M "
        "for GGUF), or `demo`.",
        show_default=DEMO,
        metavar="[MODEL]",
    ),
]
Dtype = Annotated[
    str, typer.Option("--dtype", help="Arithmetic: auto, float32, bfloat16 or float16.", rich_help_panel=_ENGINE)
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.", rich_help_panel=_ENGINE)]
KvCacheDtype = Annotated[
    str, typer.Option("--kv-cache-dtype", help="What the KV cache stores; auto: as --dtype.", rich_help_panel=_ENGINE)
]
Activations = Annotated[
    str,
    typer.Option(
        "--activations",
        help="What weights of 4 to 8 bits are multiplied with: int8 (rounded in groups of 32), int8-pow2 (with scales "
        "that are powers of two: faster with AVX-512, about twice the error) or bf16 (not rounded); "
        "auto: int8 on the CPU.",
        rich_help_panel=_ENGINE,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        "--max-model-len", "--model-len", help="Most tokens of prompt and output together.", rich_help_panel=_ENGINE
    ),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option("--max-num-seqs", "--concurrency-limit", help="Most sequences in one step.", rich_help_panel=_ENGINE),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    typer.Option("--max-num-batched-tokens", help="Most tokens computed in one step.", rich_help_panel=_ENGINE),
]
MemoryUtilization = Annotated[
    float,
    typer.Option(
        "--memory-utilization",
        "--gpu-memory-utilization",
        help="Share of the device's memory (on CPU: of the available memory) for weights and KV cache.",
        rich_help_panel=_ENGINE,
    ),
]
BlockSize = Annotated[int, typer.Option("--block-size", help="Tokens in a KV block.", rich_help_panel=_ENGINE)]
PrefixCaching = Annotated[
    bool,
    typer.Option(
        "--prefix-caching/--no-prefix-caching",
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Keep the KV of shared beginnings of prompts.",
        rich_help_panel=_ENGINE,
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", help="CPU threads; default: as many as may run.", rich_help_panel=_ENGINE)
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tp",
        "--tensor-parallel-size",
        help="Processes that share the model, each with a part of every layer (on CUDA: one device each).",
        rich_help_panel=_ENGINE,
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Makes sampling repeatable; default: a fresh one.", rich_help_panel=_ENGINE)
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", help="Most tokens to give; 0: as many as fit.", rich_help_panel=_SAMPLING)
]
Temperature = Annotated[
    float, typer.Option("--temperature", help="0: always the likeliest token.", rich_help_panel=_SAMPLING)
]
TopK = Annotated[
    int, typer.Option("--top-k", help="Draw from the k likeliest tokens; 0: all.", rich_help_panel=_SAMPLING)
]
TopP = Annotated[
    float, typer.Option("--top-p", help="Draw from the likeliest of this total share.", rich_help_panel=_SAMPLING)
]
MinP = Annotated[
    float, typer.Option("--min-p", help="Least share of the likeliest token's.", rich_help_panel=_SAMPLING)
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="End before this text; repeatable.", rich_help_panel=_SAMPLING)
]
RepetitionPenalty = Annotated[
    float, typer.Option("--repetition-penalty", help="Above 1: repeats get rarer.", rich_help_panel=_SAMPLING)
]
PresencePenalty = Annotated[
    float,
    typer.Option("--presence-penalty", help="-2 to 2: against tokens given before.", rich_help_panel=_SAMPLING),
]
FrequencyPenalty = Annotated[
    float, typer.Option("--frequency-penalty", help="-2 to 2: the same, each time.", rich_help_panel=_SAMPLING)
]
ServedModelName = Annotated[
    str | None, typer.Option("--served-model-name", help="The name that the API shows; default: MODEL.")
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        "--json-schema", help="The text is JSON that fits this schema: a file, or JSON.", rich_help_panel=_STRUCTURE
    ),
]
Regex = Annotated[
    str | None,
    typer.Option("--regex", help="The text as a whole matches this expression.", rich_help_panel=_STRUCTURE),
]
GrammarFile = Annotated[
    Path | None,
    typer.Option(
        "--grammar", help="The text follows the grammar in this file: Lark, or GBNF.", rich_help_panel=_STRUCTURE
    ),
]


def writable(path: Path | None) -> Path | None:
    """Before a long run, not after it."""
    if path is not None and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise typer.BadParameter(f"{path} can't be written.")
    return path


Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="PATH", callback=writable, help="Write the report there.", rich_help_panel=_OUTPUT),
]


def choose_model(model: str | None) -> tuple[str, bool]:
    """The model's name and whether it was assumed; in that case one line on stderr says so."""
    if model is not None:
        return model, False
    typer.echo(f"No model given: using `{DEMO}` (SmolLM2-135M-Instruct, Q4_1).", err=True)
    return DEMO, True


def engine_config(model: str, **flags: Any) -> EngineConfig:
    """The flags above by their parameter names, as an EngineConfig. UsageError for a value that can't be.

    A `seed` of None is the default of EngineConfig: it seeds what the engine itself draws, not the requests.
    """
    if flags.get("seed", 0) is None:
        del flags["seed"]
    if "tp" in flags:
        flags["tensor_parallel_size"] = flags.pop("tp")
    return EngineConfig(model=model, **flags)


def text_grammar(json_schema: str | None, regex: str | None, grammar: Path | None) -> str | None:
    """What --json-schema, --regex or --grammar ask of the text, tried out. UsageError where it can't be."""
    from llmx import grammar as g

    given = {"--json-schema": json_schema, "--regex": regex, "--grammar": grammar}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise UsageError(f"{names[0]} and {names[1]} exclude each other.", hint="Leave one of the two out.")
    if json_schema is not None:
        text = json_schema if json_schema.lstrip().startswith("{") else _read(Path(json_schema), names[0])
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError):
            raise UsageError(
                "--json-schema is no JSON.", hint="Give a file, or an object: '{\"type\": ...}'."
            ) from None
        made = g.from_json_schema(schema, param=names[0])
    elif regex is not None:
        made = g.regex(regex, param=names[0])
    elif grammar is not None:
        return g.from_grammar(_read(grammar, names[0]), param=names[0])
    else:
        return None
    g.validate(made, param=names[0])
    return made


def _read(file: Path, flag: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag}: {file} can't be read: {error.strerror}.") from None
    except ValueError:
        raise UsageError(f"{flag}: {file} is no UTF-8 text.") from None


def sampling_params(*, max_tokens: int, stop: list[str] | None, seed: int | None, **flags: Any) -> SamplingParams:
    """The sampling flags by their parameter names. RequestError for a value that can't be. No seed: a fresh one."""
    return SamplingParams(
        max_tokens=max_tokens or None,
        stop=tuple(stop or ()),
        seed=random.SystemRandom().getrandbits(31) if seed is None else seed,
        **flags,
    )


def is_terminal() -> bool:
    """Whether a person watches stderr: then progress bars, else plain lines."""
    return sys.stderr.isatty()
