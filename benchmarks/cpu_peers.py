"""llmx, llama.cpp, OpenVINO GenAI, vLLM and transformers on this machine, in turns: a table in JSON and Markdown.

usage: python benchmarks/cpu_peers.py [--llama-cpp BIN] [--openvino PYTHON] [--vllm PYTHON] [--transformers PYTHON]

BIN is the folder with llama-bench, llama-batched-bench, llama-server and llama-quantize; a PYTHON is the interpreter of
an environment that has the package. Each round measures each row of each contender once, in an order that rotates;
contenders' processes are stopped while it is another's turn. A peer whose median after two rounds is below half of the
best peer's is left out of that row from then on (not over HTTP): it can't become the best, and takes the most time.
Figures are medians over rounds, ratios medians of quotients within rounds. Before each round the machine's state is
probed, and at the beginning each contender's greedy text is held against llmx's.

Texts may part where two tokens are almost equally likely (the margin is shown), or where a peer changes the weights: an
integer zero point can't hold Q4_1's minima. Each measurement must give as many tokens as were asked for.

The JSON is written after every measurement; the same command continues it. Exit code 3 where llmx was not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _common import commit, say, versions
from peers.contenders import (
    HOW,
    PROMPT,
    REPEATS,
    REQUESTS,
    SHORT,
    Contender,
    Engine,
    Place,
    Prompts,
    make_contenders,
)
from peers.machine import Machine
from peers.models import ROWS, Model, Models
from peers.processes import Unavailable
from peers.table import markdown, summaries

from llmx.bench.workload import random_prompt
from llmx.report import write_whole

MODELS = ("q4_1", "q4_0", "gemma", "1b-q4_k_m", "1b-q4_0")
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old man who",
    "Water boils at 100 degrees Celsius at sea level. At higher altitudes, the boiling point",
)
CHECKED = 24  # greedy tokens of each text
EARLY, HOPELESS = 2, 0.5


class State:
    """What has been found, on the disk after each change. Continues what is there if it is of the same settings."""

    def __init__(self, path: Path, settings: dict[str, Any], machine: Machine) -> None:
        self.path = path
        self.found: dict[str, Any] = {
            "command": "cpu_peers",
            "script": shlex.join(["python", *sys.argv]),
            "started": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "commit": commit(),
            "versions": versions("llmx", "torch", "numpy", "gguf"),
            "machine": machine.about(),
            "settings": settings,
            "how": {row: HOW[row] for row in settings["rows"]},
            "probes": [],
            "models": {},
        }
        if path.exists():
            old = json.loads(path.read_text())
            if old["settings"] != settings:
                raise SystemExit(f"{path} is of other settings: {old['script']}\nGive another --json, or remove it.")
            say(f"continuing {path}")
            self.found = old

    def model(self, model: Model, rows: list[str]) -> dict[str, Any]:
        facts = {"title": model.title, "file": model.path.name, "made": model.made, "bytes": model.path.stat().st_size}
        empty: dict[str, Any] = {"rows": {row: {} for row in rows}, "checks": {}, "missing": {}, "contenders": {}}
        one: dict[str, Any] = self.found["models"].setdefault(model.key, facts | empty)
        return one

    def save(self) -> None:
        write_whole(self.path, json.dumps(self.found | {"summary": summaries(self.found)}, indent=1) + "\n")
        write_whole(self.path.with_suffix(".md"), markdown(self.found))


class Comparison:
    """All contenders on one model."""

    def __init__(self, flags: argparse.Namespace, place: Place, model: Model, state: State, machine: Machine) -> None:
        self.flags, self.model, self.state, self.machine = flags, model, state, machine
        self.rows = [row for row in flags.rows if row in model.rows]
        self.one = state.model(model, self.rows)
        self.contenders = make_contenders(place, model, flags)
        self.ids: list[int] = []

    @property
    def llmx(self) -> Engine:
        first = self.contenders[0]
        assert isinstance(first, Engine)
        return first

    def run(self) -> None:
        with ExitStack() as stack:
            for contender in self.contenders:
                stack.callback(contender.close)
            worker = self.llmx.worker()
            self.ids = worker.ask(vocabulary=True)["ids"]
            self.one["pass_bytes"] = worker.about["pass_bytes"]
            for contender in self.contenders[1:]:
                if contender.name not in self.one["checks"]:
                    with self.missing(contender.name):
                        self.one["checks"][contender.name] = self.check(contender)
                    self.state.save()
            for turn in range(self.flags.rounds):
                self.round(turn)

    @contextlib.contextmanager
    def missing(self, name: str) -> Iterator[None]:
        """What can't be measured is noted, and the others go on."""
        try:
            yield
        except Unavailable as why:
            say(f"  {name}: {why}")
            self.one["missing"][name] = str(why)

    def check(self, contender: Contender) -> dict[str, Any]:
        """The contender's greedy text against llmx's: where it parts, and by how much llmx preferred its own token."""
        say(f"{self.model.title}, {contender.name}: starting, and checking its text")
        worker, prompts = self.llmx.worker(), []
        for prompt in worker.ask(encode=TEXTS)["ids"]:
            ranked = [dict(one) for one in worker.ask(ranked=prompt, tokens=CHECKED)["ranked"]]
            ours, theirs = [next(iter(one)) for one in ranked], contender.greedy(prompt, CHECKED)
            found: dict[str, Any] = {"ours": ours, "theirs": theirs}
            parts = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
            if parts:
                scores = ranked[parts[0]]
                found |= {"parts_at": parts[0], "margin": None}
                if theirs[parts[0]] in scores:
                    found["margin"] = scores[ours[parts[0]]] - scores[theirs[parts[0]]]
            prompts.append(found)
        return {"tokens": CHECKED, "prompts": prompts}

    def round(self, turn: int) -> None:
        began, key = time.monotonic(), {"model": self.model.key, "round": turn}
        probe: dict[str, Any] | None = None
        for row in self.rows:
            found = self.one["rows"][row]
            prompts = self.draw(row, turn)
            shift = turn % len(self.contenders)
            for contender in [*self.contenders[shift:], *self.contenders[:shift]]:
                name, samples = contender.name, found.setdefault(contender.name, [])
                there = any(sample["round"] == turn for sample in samples)
                if there or row not in contender.rows or name in self.one["missing"] or self.hopeless(row, name):
                    continue
                if probe is None:
                    probe = key | self.machine.probe()
                    self.state.found["probes"].append(probe)
                with self.missing(name):
                    sample = contender.measure(row, prompts)
                    samples.append({"round": turn, **sample})
                    say(f"{self.model.title}, round {turn + 1}, {row}, {name}: {sample['value']:.1f} tokens/s")
                self.one["contenders"][name] = contender.facts
                self.state.save()
        say(f"{self.model.title}: round {turn + 1} took {time.monotonic() - began:.0f} s")

    def draw(self, row: str, turn: int) -> Prompts:
        """The same random ids for all, new ones in each turn."""
        count, length = {"prefill": (1, PROMPT), "decode": (1, SHORT)}.get(row, (REQUESTS, PROMPT // 4))
        named = [[f"{row}/{turn}/{i}/{j}" for j in range(count)] for i in range(REPEATS[row])]
        return [[list(random_prompt(self.ids, length, name)) for name in batch] for batch in named]

    def hopeless(self, row: str, name: str) -> bool:
        """Whether a peer has shown that it isn't the row's best."""
        medians = {
            other: statistics.median(sample["value"] for sample in samples)
            for other, samples in self.one["rows"][row].items()
            if len(samples) >= EARLY and not other.startswith("llmx")
        }
        return row != "http" and name in medians and medians[name] < HOPELESS * max(medians.values())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, metavar="BIN")
    for peer in ("openvino", "vllm", "transformers"):
        parser.add_argument(f"--{peer}", metavar="PYTHON")
    parser.add_argument("--models", default="q4_1", help=f"some of {','.join(MODELS)}")
    parser.add_argument("--rows", default=",".join(ROWS), help="some of %(default)s")
    parser.add_argument("--gemma", type=Path, help="a GGUF of Gemma 3 270M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dense-dtype", choices=("bfloat16", "float32"), help="of vLLM and transformers; default: "
                        "bfloat16 where the processor multiplies it")  # fmt: skip
    parser.add_argument("--llmx-option", action="append", default=[], metavar="NAME=VALUE", help="of EngineConfig and "
                        "of `llmx serve`, such as activations=int8; repeatable")  # fmt: skip
    parser.add_argument("--work", type=Path, default=Path("build/cpu-peers"), help="for models that are made, and logs")
    parser.add_argument("--json", type=Path, default=Path("build/cpu-peers.json"), help="Markdown is written beside it")
    flags = parser.parse_args()
    for name, known in (("models", MODELS), ("rows", ROWS)):
        setattr(flags, name, getattr(flags, name).split(","))
        if unknown := [word for word in getattr(flags, name) if word not in known]:
            parser.error(f"--{name}: there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return flags


def settings_of(flags: argparse.Namespace) -> dict[str, Any]:
    """What must be the same for a run to be continued; --rounds and --models may grow."""
    kept = ("llama_cpp", "openvino", "vllm", "transformers", "rows", "dense_dtype", "llmx_option")
    return {name: str(value) if isinstance(value := getattr(flags, name), Path) else value for name in kept}


def main() -> int:
    flags = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # processes that are stopped must not be left behind
    flags.work.mkdir(parents=True, exist_ok=True)
    machine = Machine()
    state = State(flags.json, settings_of(flags), machine)
    models = Models(flags.work.absolute(), flags.gemma, flags.llama_cpp)
    place = Place(machine.threads, flags.work.absolute(), models)
    began = time.monotonic()
    for key in flags.models:
        try:
            Comparison(flags, place, models.open(key), state, machine).run()
        except Unavailable as why:
            say(f"{key}: {why}")
        except KeyboardInterrupt:
            say("interrupted; the same command continues")
            return 130
        finally:
            state.save()
    say(f"{time.monotonic() - began:.0f} s in all; {flags.json.with_suffix('.md')}")
    print(markdown(state.found))
    return 3 if any("llmx" in one["missing"] for one in state.found["models"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
