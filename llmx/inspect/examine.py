"""All of `llmx inspect`: what is stored, what is wrong with it, and how many ranks can share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llmx.formats.hub import Located
from llmx.formats.quantized import by_module, sign
from llmx.inspect.contents import Contents, open_contents
from llmx.inspect.declared import declared
from llmx.inspect.findings import Finding

Stats = dict[str, dict[str, float | int | None]]


@dataclass
class Examined:
    """ranks: engine -> number of tensor-parallel ranks -> why not, None where they fit. unchecked: what could not be
    looked at, and why. architecture: as the config names it."""

    contents: Contents
    findings: list[Finding]
    stats: Stats = field(default_factory=dict)
    ranks: dict[str, dict[int, str | None]] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)
    architecture: str | None = None


def examine(
    located: Located,
    *,
    quick: bool = False,
    stats: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Examined:
    """quick: from the headers alone, without torch. progress: of the bytes that are read."""
    contents = open_contents(located)
    found = Examined(contents, [*contents.findings, *declared(contents)])
    if quick:
        found.unchecked.append("numbers, what the model asks for, and ranks: --quick reads headers only")
        return found
    _ask(found)
    from llmx.inspect.values import look

    values = look(contents, stats=stats, progress=progress)
    found.findings += values.findings
    found.stats = values.stats
    return found


def _ask(found: Examined) -> None:
    """What the model's constructor has to say, where there is one and there are tensors."""
    from llmx.inspect.asked import ask
    from llmx.inspect.ranks import vllm_ranks

    contents = found.contents
    if not contents.checkpoint.names():
        found.unchecked.append("everything in the files that can't be read")
        return
    asked = ask(contents)
    if asked.opened is not None:
        found.architecture = asked.opened.architecture
    if asked.opened is None or not asked.ranks:
        found.unchecked.append(f"missing and left-over tensors, and ranks: {asked.why}")
    found.findings += [one for one in asked.findings if contents.readable or one.kind != "missing"]
    if not contents.readable:
        found.unchecked.append("whether tensors are missing: not all files can be read")
    if not asked.ranks or asked.opened is None:
        return
    found.ranks["llmx"] = asked.ranks
    if contents.located.kind == "hf":
        packed = {module for module, linear in by_module(contents.checkpoint).items() if sign(linear) is not None}
        ranks = vllm_ranks(asked.units, asked.opened.config, contents.quantization, packed - contents.broken)
        found.ranks["vLLM"] = ranks
        ragged = any(one.kind == "ragged" for one in found.findings)
        if (why := ranks[1]) is not None and not ragged:
            found.findings.append(Finding("warning", "vllm", "one rank", "config.json",
                                          f"vLLM 0.32 does not load it, even on one rank: {why}.",
                                          "Quantise with groups or blocks that divide it."))  # fmt: skip
