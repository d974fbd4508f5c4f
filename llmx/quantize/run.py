"""A whole `llmx quantize`: checks, calibration text, blocks, files, and what the report says."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from llmx.config import EngineConfig
from llmx.errors import UsageError
from llmx.evals.protocol import DEFAULT_CTX, LLAMA
from llmx.formats.fields import Fields
from llmx.formats.hub import Located, locate
from llmx.formats.quantization import read
from llmx.quantize import backends, calibration, room
from llmx.quantize.backends import Backend
from llmx.quantize.driver import Run, Source, default_path, fingerprint, open_source, quantization_config
from llmx.quantize.estimate import estimate
from llmx.quantize.memory import given_back
from llmx.quantize.options import HEAD, Options, group_for
from llmx.quantize.output import Output, check_free, check_name

Say = Callable[[str], None]
WORST = 5
EVAL_WINDOWS, EVAL_SEED = 8, 1_000_000

DEFINITIONS = {
    "layers.error": "squared output error over the calibration tokens, as a part of the outputs' squares; of fp8: of "
    "the weights themselves",
    "layers.nearest": "the same, of plain round-to-nearest",
    "block_errors": "norm of (quantized block's outputs - source block's) / norm of what the source block adds, from "
    "the same inputs",
    "head_error": "norm of (quantized head's logits - source's) / norm of these, from the same states",
    "vllm_ranks": "number of tensor-parallel ranks -> why vLLM 0.32 will not load the result on so many; null: it will",
    "states": "the calibration text's hidden states between two blocks: ram, or disk, a file in the unfinished folder",
    "peak_rss_bytes": "largest resident memory of the process, mapped files too",
    "bits_per_weight": "of the quantized linears, scales and zeros counted",
}


@dataclass(frozen=True)
class Wanted:
    """group: None for the largest that fits. calib: a file, or None for the model's own text. backend: somebody else's
    quantizer. states: of room.PLACES."""

    options: Options
    group: int | None
    out: Path | None
    calib: str | None
    samples: int
    length: int
    seed: int
    resume: bool
    force: bool
    dry_run: bool
    measure: bool = False
    backend: Backend | None = None
    states: str = "auto"


@dataclass(frozen=True)
class Made:
    """path: the folder, or that a dry run would make."""

    path: Path
    results: dict[str, Any]


def quantize(name: str, located: Located, wanted: Wanted, say: Say) -> Made:
    """UsageError before anything long if it can't be done."""
    began = time.monotonic()
    if wanted.backend is not None and located.kind != "hf":
        raise UsageError(f"--backend {wanted.backend.name} reads Hugging Face folders, and {name} is a GGUF file.")
    source = open_source(located)
    if source.packed is not None:
        say(
            f"Note: {name} is quantized already ({source.packed}): what that lost stays lost, and its rounding is now "
            "rounded again; from the model as it was before, the same bits lose less."
        )
    options = settled(source, wanted, say)
    path = wanted.out or default_path(located, options)
    check_name(path, located.path)
    longest = source.opened.config.max_position
    if wanted.length > longest:
        raise UsageError(f"--seq-len {wanted.length} is more than the {longest} positions that {name} has.")
    texts = calibration.Calibration(())
    if not wanted.dry_run:
        check_free(path, resume=wanted.resume, force=wanted.force)
        if options.calibrates and wanted.calib is not None:
            texts = calibration.read(wanted.calib, located, wanted.samples, wanted.length, say)
    tokens = (texts.tokens or wanted.samples * wanted.length) if options.calibrates else 0
    states = room.place(wanted.states, 0 if wanted.backend else tokens, source.opened.config.hidden)
    facts: dict[str, Any] = {
        "options": asdict(options),
        "source_packed": source.packed,
        "states": states.facts(),
        "estimate": estimate(source, options, tokens, states),
        "vllm_ranks": vllm_ranks(source, options),
    }
    if wanted.dry_run:
        return Made(path, facts)
    room.check_disk(path, facts["estimate"]["bytes"], states)
    if options.calibrates and wanted.calib is None:
        say("drawing calibration text from the model itself")
        texts = calibration.write(located, name, wanted.samples, wanted.length, wanted.seed, say)
    if wanted.backend is not None:
        return _by_backend(wanted.backend, name, source, replace(wanted, options=options), texts, path, facts, say)
    for line in _states_line(facts["states"]):
        say(line)
    facts |= _by_ourselves(source, options, wanted, texts, path, on_disk=states.place == "disk", say=say)
    if wanted.measure:
        facts["eval"] = measure(name, path, wanted.seed, longest, say)
    return Made(path, facts | {"seconds": time.monotonic() - began})


def _by_ourselves(
    source: Source, options: Options, wanted: Wanted, texts: calibration.Calibration, path: Path, *, on_disk: bool,
    say: Say,
) -> dict[str, Any]:  # fmt: skip
    """The folder `path`, and what the report says of it."""
    mark = fingerprint(source, options, texts.texts, wanted.seed)
    output = Output(path, len(source.units), mark, resume=wanted.resume, force=wanted.force)
    run = Run(source, options, texts.texts, output, say, on_disk=on_disk)
    with given_back():
        run.quantize()
        files = run.finish()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    layers = [layer for note in run.notes for layer in note["layers"]]
    return files | {
        "path": str(path), "calibration": texts.about, "layers": layers, "blocks_resumed": run.resumed,
        "fell_back": [layer["name"] for layer in layers if layer["fell_back"]],
        "worse_than_nearest": [layer["name"] for layer in layers if layer["worse"]], "peak_rss_bytes": peak,
    }  # fmt: skip


def _by_backend(
    backend: Backend, name: str, source: Source, wanted: Wanted, texts: calibration.Calibration, path: Path,
    facts: dict[str, Any], say: Say,
) -> Made:  # fmt: skip
    """Somebody else's quantizer makes the folder; the result is always measured."""
    began, dtype = time.monotonic(), str(source.dtype).removeprefix("torch.")
    backends.quantize(backend, source.located, wanted.options, dtype, texts.texts, path, say, force=wanted.force)
    longest = source.opened.config.max_position
    facts |= {"backend": backend.name, "calibration": texts.about, "path": str(path)}
    facts |= {"seconds": time.monotonic() - began, "eval": measure(name, path, wanted.seed, longest, say)}
    backends.check_loss(facts["eval"], path)
    return Made(path, facts)


def vllm_ranks(source: Source, options: Options) -> dict[str, str | None]:
    """Number of tensor-parallel ranks -> why vLLM will not load the result on so many; None where it will."""
    from llmx.inspect import ranks
    from llmx.inspect.asked import units_of

    settings = read(Fields(quantization_config(source, options), "config.json"))
    packed = {unit.name for unit in source.mine(options)}
    found = ranks.vllm_ranks(units_of(source.opened), source.opened.config, settings, packed)
    return {str(size): why for size, why in found.items()}


def measure(name: str, path: Path, seed: int, longest: int, say: Say) -> dict[str, Any]:
    """What `llmx eval PATH --reference NAME` says, on text of the source's own, drawn with another seed.

    Both models compute with activations that are not rounded.
    """
    from llmx.evals.run import Findings, Model, evaluate, make_plan, open_tokenizer

    def model(of: str) -> Model:
        located = locate(of)
        return Model(EngineConfig(model=of, activations="bf16"), located, open_tokenizer(located))

    plan = make_plan(LLAMA, min(DEFAULT_CTX[LLAMA], longest), EVAL_WINDOWS, seed + EVAL_SEED, None, None, None, True)
    found = Findings(plan)
    evaluate(model(str(path)), model(name), found, say)
    return {key: value for key, value in found.results().items() if key != "reference"}


def settled(source: Source, wanted: Wanted, say: Say) -> Options:
    """The options with a group size. UsageError for linears that the format can't hold."""
    options = wanted.options
    mine = source.mine(options)
    if not mine:
        raise UsageError(f"--ignore {options.ignore!r} leaves no linear to quantize.")
    if options.ignore is not None and not any(map(options.ignores, [HEAD, *(unit.name for unit in source.every)])):
        say(f"Note: --ignore {options.ignore!r} fits none of the {len(source.every)} linears.")
    if not options.grids:
        return options
    group = group_for(wanted.group, [(unit.name, unit.n_in) for unit in mine])
    if wanted.group is None:
        say(f"group size {group}")
    together = 32 if options.bits == 3 else 32 // options.bits if options.bits in (2, 4, 8) else 1
    if options.form != "compressed-tensors":
        bad = [f"{unit.name} ({unit.n_out} outputs)" for unit in mine if unit.n_out % together]
        if bad:
            head = bad[0].startswith(f"{HEAD} ")
            raise UsageError(
                f"The format {options.form} stores {together} outputs together, which does not fit {', '.join(bad[:6])}"
                f"{f' and {len(bad) - 6} more' if len(bad) > 6 else ''}.",
                hint="leave --quantize-lm-head out" if head else "leave them out with --ignore",
            )
    return replace(options, group=group)


def lines(made: Made) -> list[str]:
    """What a person reads at the end."""
    results = made.results
    sizes = results["estimate"]
    if "backend" in results:
        return [f"made by {results['backend']} in {results['seconds']:,.0f} s", _eval_line(results["eval"]),
                *_rank_lines(results["vllm_ranks"])]  # fmt: skip
    if "layers" not in results:
        return [
            f"{made.path}: {sizes['linears']} linears at {sizes['bits_per_weight']:.2f} bits a weight, about "
            f"{sizes['bytes'] / 1e6:,.0f} MB ({sizes['source_bytes'] / 1e6:,.0f} MB now)",
            f"about {sizes['memory_bytes'] / 1e6:,.0f} MB of memory and {sizes['seconds']:,.0f} s",
            *_states_line(results["states"]),
            *_rank_lines(results["vllm_ranks"]),
        ]
    layers = results["layers"]
    said = [
        f"{results['bytes'] / 1e6:,.0f} MB ({results['source_bytes'] / 1e6:,.0f} MB before), "
        f"{sizes['bits_per_weight']:.2f} bits a quantized weight, {results['seconds']:,.0f} s"
    ]
    known = [layer for layer in layers if layer["error"] is not None]
    if known:
        error, nearest = (sum(layer[key] for layer in known) / len(known) for key in ("error", "nearest"))
        worst = max(known, key=lambda layer: layer["error"])
        said.append(
            f"mean relative error {error:.3e}, round-to-nearest {nearest:.3e}; "
            f"worst {worst['name']} {worst['error']:.3e}"
        )
    if "eval" in results:
        said.append(_eval_line(results["eval"]))
    if results["fell_back"]:
        said.append(f"{len(results['fell_back'])} layers fell back to round-to-nearest: "
                    f"{', '.join(results['fell_back'][:WORST])}")  # fmt: skip
    if results["worse_than_nearest"]:
        said.append(f"{len(results['worse_than_nearest'])} layers are worse than round-to-nearest: "
                    f"{', '.join(results['worse_than_nearest'][:WORST])}")  # fmt: skip
    return [*said, *_rank_lines(results["vllm_ranks"])]


def _eval_line(found: Mapping[str, Any]) -> str:
    return (
        f"perplexity {found['perplexity']['mean']:.2f} ({found['reference_perplexity']['mean']:.2f} before), "
        f"KL divergence {found['kld']['mean']:.4f}, same likeliest token {found['same_top']['share']:.1%}"
    )


def _states_line(found: Mapping[str, Any]) -> list[str]:
    return [] if found["place"] is None else [str(room.States(**found))]


def _rank_lines(ranks: Mapping[str, str | None]) -> Iterator[str]:
    """Warnings: which numbers of ranks vLLM will not load the result on, each reason once."""
    reasons: dict[str, list[str]] = {}
    for size, why in ranks.items():
        if why is not None:
            reasons.setdefault(why.replace(f"over {size} ranks", "over them"), []).append(size)
    for why, sizes in reasons.items():
        yield f"warning: vLLM 0.32 will not load it with --tensor-parallel-size {' or '.join(sizes)}: {why}"
