"""Who is compared, and how one turn of each row is measured: the same prompts and lengths, greedy, all processors."""

from __future__ import annotations

import json
import os
import statistics
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _common import ROOT

from peers.models import Model, Models
from peers.processes import HttpServer, Unavailable, Worker, output_of

PROMPT, SHORT, TOKENS, REQUESTS = 512, 16, 128, 32
REPEATS = {"prefill": 3, "decode": 3, "batch": 1, "http": 1}  # in a turn; the turn's figure is their median
CONTEXT = 1024  # of servers, for each request
HTTP_WARM_UP = 4
HOW = {
    "prefill": f"{PROMPT} prompt tokens / seconds to the first token",
    "decode": f"{TOKENS} / seconds from the first token to token {TOKENS + 1}, behind {SHORT} prompt tokens",
    "batch": f"{REQUESTS} requests of {PROMPT // 4} tokens at once: {TOKENS} output tokens of each / seconds in all",
    "http": "the same through HTTP: `llmx bench --url`, streams, output tokens / seconds from the first request to the "
    "last token",
}
Sample = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """What all contenders need to know. `draw(row, turn)`: prompts of random ids, a list for each repetition."""

    threads: int
    work: Path
    models: Models

    def log(self, name: str) -> Path:
        return self.work / f"{name.replace(' ', '-')}.log"


Prompts = Sequence[Sequence[Sequence[int]]]


def turn_of(values: Sequence[float], **more: Any) -> Sample:
    return {"value": statistics.median(values), "values": list(values), **more}


@dataclass
class Contender:
    """A column. Processes are started when a row first needs them. Unavailable from any of its methods: it can't."""

    name: str
    place: Place
    model: Model
    rows: tuple[str, ...] = ("prefill", "decode", "batch", "http")
    facts: dict[str, Any] = field(default_factory=dict)  # for the report
    _server: HttpServer | None = None

    def measure(self, row: str, prompts: Prompts) -> Sample:
        return self.http() if row == "http" else self.plain(row, prompts)

    def plain(self, row: str, prompts: Prompts) -> Sample:
        raise NotImplementedError

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        raise NotImplementedError

    def server_command(self) -> tuple[list[str], Mapping[str, str]]:
        raise NotImplementedError

    def server(self) -> HttpServer:
        if self._server is None:
            command, env = self.server_command()
            self.facts["server"] = " ".join(command)
            self._server = HttpServer(command, self.place.log(f"{self.name}-server"), env)
        return self._server

    def http(self) -> Sample:
        """One run of our own client; it shares the processors with the server, whoever's it is."""
        path = self.place.work / "client.json"
        size = (f"--input-len={PROMPT // 4}", f"--output-len={TOKENS}", f"--requests={REQUESTS}")
        command = [*llmx_command("bench"), *size, f"--concurrency={REQUESTS}", "--json", str(path)]
        server = self.server()
        with server.turn():
            more = ["--url", server.url, "--ignore-eos", f"--warmups={HTTP_WARM_UP}"]
            output_of([*command, *more], self.place.log("client"), environment())
        found = json.loads(path.read_text())["results"]["serving"]
        if (given := found["total_output_tokens"]) != REQUESTS * TOKENS:
            raise Unavailable(f"{REQUESTS * TOKENS} tokens were asked for; the server gave {given}: {found['errors']}")
        kept = ("mean_ttft_ms", "mean_tpot_ms", "p99_itl_ms")
        more_figures = {name: found.get(name) for name in kept} | {"client_bound": found["client"]["client_bound"]}
        return turn_of([found["output_throughput"]], **more_figures)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


@dataclass
class Engine(Contender):
    """One that worker.py knows, run by `python`."""

    engine: str = "llmx"
    python: str = sys.executable
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    dense: bool = False  # needs a folder of dense weights, not a GGUF
    _worker: Worker | None = None

    def path(self) -> Path:
        return self.place.models.dense(self.model) if self.dense else self.model.path

    def worker(self) -> Worker:
        if self._worker is None:
            options = {"model": str(self.path()), "threads": self.place.threads} | self.options
            self._worker = Worker(self.python, self.engine, options, self.place.log(self.name), self.env)
            self.facts |= self._worker.about
        return self._worker

    def plain(self, row: str, prompts: Prompts) -> Sample:
        ask = self.worker().ask
        if row == "prefill":
            return turn_of([PROMPT / ask(prompts=batch, tokens=1)["seconds"] for batch in prompts])
        if row == "batch":
            count = REQUESTS * TOKENS
            return turn_of([count / ask(prompts=batch, tokens=TOKENS)["seconds"] for batch in prompts])
        return turn_of([self._decode(batch) for batch in prompts])

    def _decode(self, prompts: Sequence[Sequence[int]]) -> float:
        found = self.worker().ask(prompts=prompts, tokens=TOKENS + 1)
        first = found["first"]
        if first is None:  # it doesn't show tokens as they come: the time of the first is another run's
            first = self.worker().ask(prompts=prompts, tokens=1)["seconds"]
        return float((TOKENS + 1 - found.get("early", 1)) / (found["seconds"] - first))

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        return list(self.worker().ask(prompts=[list(prompt)], tokens=tokens)["tokens"][0])

    def server_command(self) -> tuple[list[str], Mapping[str, str]]:
        if self.engine == "vllm":
            sizes = ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(REQUESTS), "--no-enable-prefix-caching"]
            command = [self.python, "-m", "vllm.entrypoints.cli.main", "serve", str(self.path())]
            address = ["--host", "127.0.0.1", "--port", "{port}"]
            return [*command, "--dtype", self.options["dtype"], *sizes, *address], self.env
        flags = [text for name, value in self.options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        sizes = ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(REQUESTS), "--memory-utilization", "0.1"]
        command = llmx_command("serve", str(self.model.path), "--port", "{port}", "--threads", str(self.place.threads))
        return [*command, *sizes, *flags], environment()

    def close(self) -> None:
        super().close()
        if self._worker is not None:
            self._worker.close()


@dataclass
class LlamaCpp(Contender):
    """Its own tools for rates (they neither sample nor detokenise, and choose their tokens), its server for text."""

    folder: Path = Path()

    def _tool(self, name: str) -> str:
        path = self.folder / name
        if not path.exists():
            raise Unavailable(f"{path} is not there")
        return str(path)

    def plain(self, row: str, prompts: Prompts) -> Sample:
        threads = ["-m", str(self.model.path), "-t", str(self.place.threads)]
        log = self.place.log(self.name)
        if row == "batch":
            size = ["-npp", str(PROMPT // 4), "-ntg", str(TOKENS), "-npl", str(REQUESTS)]
            context = ["-c", str(REQUESTS * 2 * TOKENS)]
            command = [self._tool("llama-batched-bench"), *threads, *size, *context, "--output-format", "jsonl"]
            found = [json.loads(line) for line in output_of(command, log).splitlines() if line.startswith("{")]
            if not found or (found[-1]["pl"], found[-1]["tg"]) != (REQUESTS, TOKENS):
                raise Unavailable(f"llama-batched-bench measured something else: {found}")
            return turn_of([REQUESTS * TOKENS / found[-1]["t"]])
        size = ["-p", str(PROMPT), "-n", "0"] if row == "prefill" else ["-p", "0", "-n", str(TOKENS)]
        command = [self._tool("llama-bench"), *threads, *size, "-r", str(REPEATS[row]), "-o", "json"]
        found = json.loads(output_of(command, log))[0]
        self.facts |= {key: found.get(key) for key in ("build_commit", "build_number", "backends", "model_type")}
        return turn_of(found["samples_ts"])

    def greedy(self, prompt: Sequence[int], tokens: int) -> list[int]:
        body = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "cache_prompt": False}
        data = json.dumps(body | {"return_tokens": True, "ignore_eos": True}).encode()
        server = self.server()
        request = urllib.request.Request(f"{server.url}/completion", data, {"Content-Type": "application/json"})
        with server.turn(), urllib.request.urlopen(request, timeout=600) as answer:
            return list(json.load(answer)["tokens"])

    def server_command(self) -> tuple[list[str], Mapping[str, str]]:
        tool, requests = self._tool("llama-server"), str(REQUESTS)
        size = ["-np", requests, "-c", str(REQUESTS * CONTEXT // 2), "-t", str(self.place.threads)]
        # Without its store of earlier prompts, which it would fill for nothing here.
        return [tool, "-m", str(self.model.path), *size, "--cache-ram", "0", "--port", "{port}"], {}


def llmx_command(*words: str) -> list[str]:
    return [sys.executable, "-m", "llmx.cli", *words]


def environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path[1:])])}


def dense_dtype() -> str:
    """bfloat16 where the processor multiplies it, else float32."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(flags) else "float32"


def make_contenders(place: Place, model: Model, flags: Any) -> list[Contender]:
    """llmx first; then the peers whose folders or Pythons were named."""
    llmx = dict(option.split("=", 1) for option in flags.llmx_option)
    found: list[Contender] = [
        Engine(name, place, model, options={"kv_cache_dtype": kv} | llmx, env=environment())
        for name, kv in (("llmx", "bfloat16"), ("llmx int8 KV", "int8"))
    ]
    if flags.llama_cpp:
        found.append(LlamaCpp("llama.cpp", place, model, folder=flags.llama_cpp))
    rates = ("prefill", "decode", "batch")
    if flags.openvino:
        found.append(Engine("OpenVINO", place, model, rates, engine="openvino", python=flags.openvino))
    # The dense ones are of one precision, so one file of the same weights is enough.
    dtype = {"dtype": flags.dense_dtype or dense_dtype()}
    if flags.vllm and model.key == "q4_1":
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        env = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores, "PYTHONPATH": ""}
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_TARGET_DEVICE": "cpu"}
        vllm = Engine("vLLM", place, model, engine="vllm", python=flags.vllm, options=dtype, env=env, dense=True)
        found.append(vllm)
    if flags.transformers and model.key == "q4_1":
        hf = Engine("transformers", place, model, rates, engine="transformers", options=dtype, dense=True)
        hf.python = flags.transformers
        found.append(hf)
    return found
