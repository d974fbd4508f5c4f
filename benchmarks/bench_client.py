"""Is our bench client right? It measures a server whose times are known, at several concurrencies; each error must be
at most 2 %. With --vllm VENV, `vllm bench serve` of that environment asks the same server for the same, and both must
agree within 3 %. The truth is what the server wrote down itself: its own delays are no error of a client. Runs of the
two take turns, --repeats times; what is judged are medians over them. Exit code 3 if something is further off.

The server's times are by default the limits of MLPerf Inference 6.1 for Llama 3.1 8B, interactive: a TTFT of 500 ms and
30 ms for each further token. A client that sends 32 requests at one moment takes some milliseconds for it, whatever
the server does; where answers come in less time than real models need, that is all one sees.

    python benchmarks/bench_client.py --json client.json
    python benchmarks/bench_client.py --vllm ~/vllm-venv        # a virtual environment with vllm[bench]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _common import ROOT, publish, say

from llmx.report import Report

MOST_ERROR, MOST_DIFFERENCE = 0.02, 0.03
FIGURES = ("mean_ttft_ms", "mean_itl_ms", "mean_e2el_ms", "output_throughput")
SAME_BY_BOTH = ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "mean_e2el_ms")  # of the same requests, in any order
DEFINITIONS = {
    "error": "a client's figure / the same from the clock readings that the server took as it wrote - 1",
    "difference": "our client's figure / that of `vllm bench serve` in the same turn - 1",
    "truth": "TTFT: first token written - request received; ITL: between writes; E2E: last token written - received;"
    " throughput: tokens / (last write - first request received)",
    "sending_ms": "mean of (when the server had the request - when the client's clock for it began)",
    "reading_ms": "mean of (when the client had the first token - when the server wrote it)",
    "median": "over the turns, of each figure by itself; the turns are in `turns`",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=8, help="for each that is in flight at once")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each client")
    parser.add_argument("--ttft-ms", type=float, default=500.0)
    parser.add_argument("--itl-ms", type=float, default=30.0)
    # Of mixed lengths, so that requests don't all come at the same moment and wait for each other in the mock.
    parser.add_argument("--output-len", type=int, default=64, help="mean; they are of half to three halves of it")
    parser.add_argument("--vllm", type=Path, default=None, help="a virtual environment that has vllm[bench]")
    parser.add_argument("--tokenizer", default="gpt2", help="for vllm, which wants one: a name or a folder")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


@contextmanager
def server(flags: argparse.Namespace, log: Path) -> Iterator[str]:
    """The mock in a process of its own, where it takes no time from a client; its readings go into `log`."""
    command = [sys.executable, str(ROOT / "tests" / "mock_openai.py"), "--ttft-ms", str(flags.ttft_ms)]
    command += ["--itl-ms", str(flags.itl_ms), "--log", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


def dataset(flags: argparse.Namespace, count: int, path: Path) -> Path:
    """What both clients ask: a file in the form that both read."""
    rng = random.Random(0)
    low, high = max(2, flags.output_len // 2), max(2, flags.output_len * 3 // 2)
    rows = [{"prompt": f"Question {i}: why?", "output_tokens": rng.randint(low, high)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ours(flags: argparse.Namespace, url: str, concurrency: int, data: Path, path: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "llmx.cli", "bench", "--url", url, "--concurrency", str(concurrency)]
    command += ["--requests", str(flags.requests * concurrency), "--dataset", str(data), "--ignore-eos"]
    command += ["--save-detailed", "--json", str(path)]
    subprocess.run(command, check=True, capture_output=True, env=environment())
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def vllms(flags: argparse.Namespace, url: str, concurrency: int, data: Path, path: Path) -> dict[str, Any]:
    """The same by `vllm bench serve`: the same file, the same number at once, as many warm-ups."""
    command = [str(flags.vllm / "bin" / "vllm"), "bench", "serve", "--backend", "openai", "--base-url", url]
    command += ["--endpoint", "/v1/completions", "--model", "mock", "--tokenizer", flags.tokenizer]
    command += ["--dataset-name", "custom", "--dataset-path", str(data), "--custom-output-len", "-1"]
    command += ["--skip-chat-template", "--num-prompts", str(flags.requests * concurrency), "--temperature", "0"]
    command += ["--max-concurrency", str(concurrency), "--num-warmups", str(max(8, 2 * concurrency)), "--ignore-eos"]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--save-detailed"]
    command += ["--result-dir", str(path.parent), "--result-filename", path.name]
    no_device = os.environ | {"VLLM_TARGET_DEVICE": "cpu"}  # its client needs none, and else looks for one
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=no_device)
    if done.returncode:
        raise SystemExit(
            f"vllm bench serve ended with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def truth(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of what the server wrote down of a client's requests, by its own clock."""
    written = [entry["written"] for entry in entries]
    gaps = [after - before for times in written for before, after in itertools.pairwise(times)]
    tpots = [(times[-1] - times[0]) / (len(times) - 1) for times in written]
    seconds = max(times[-1] for times in written) - min(entry["received"] for entry in entries)
    return {
        "mean_ttft_ms": 1e3 * statistics.fmean(entry["written"][0] - entry["received"] for entry in entries),
        "mean_tpot_ms": 1e3 * statistics.fmean(tpots),
        "mean_itl_ms": 1e3 * statistics.fmean(gaps),
        "mean_e2el_ms": 1e3 * statistics.fmean(entry["written"][-1] - entry["received"] for entry in entries),
        "output_throughput": sum(map(len, written)) / seconds,
    }


def against_the_truth(
    found: Mapping[str, Any], log: Path, requests: int, names: Sequence[str]
) -> dict[str, dict[str, float]]:  # fmt: skip
    """One client's figures, and where its TTFT is from: client and server read one clock (CLOCK_MONOTONIC)."""
    entries = [json.loads(line) for line in log.read_text().splitlines()][-requests:]
    real, began = truth(entries), statistics.fmean(found["start_times"])
    first = statistics.fmean(map(sum, zip(found["start_times"], found["ttfts"], strict=True)))
    return {
        "figures": {name: found[name] for name in names},
        "truth": real,
        "error": {name: found[name] / real[name] - 1 for name in names},
        "lag": {
            "sending_ms": 1e3 * (statistics.fmean(entry["received"] for entry in entries) - began),
            "reading_ms": 1e3 * (first - statistics.fmean(entry["written"][0] for entry in entries)),
        },
    }


def turn(flags: argparse.Namespace, folder: Path, url: str, log: Path, concurrency: int, number: int) -> dict[str, Any]:
    """Both clients once; which of them is first changes from turn to turn."""
    requests = flags.requests * concurrency
    data, found = dataset(flags, requests, folder / "asked.jsonl"), {}
    clients = ["llmx"] + (["vllm"] if flags.vllm is not None else [])
    for client in clients if number % 2 == 0 else reversed(clients):
        path = folder / f"{client}.json"
        path.unlink(missing_ok=True)
        run, names = (ours, FIGURES + SAME_BY_BOTH) if client == "llmx" else (vllms, SAME_BY_BOTH)
        figures = run(flags, url, concurrency, data, path)
        found[client] = against_the_truth(figures, log, requests, tuple(dict.fromkeys(names)))
        if client == "llmx":
            found[client]["client"] = figures["results"]["serving"]["client"]
    if "vllm" in found:
        mine, theirs = (found[client]["figures"] for client in clients)
        found["difference"] = {name: mine[name] / theirs[name] - 1 for name in SAME_BY_BOTH}
    return found


def compare(flags: argparse.Namespace, folder: Path, concurrency: int) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    log = folder / f"log{concurrency}"
    with server(flags, log) as url:
        for number in range(flags.repeats):
            turns.append(turn(flags, folder, url, log, concurrency, number))
            say(f"{concurrency} at once, turn {number + 1} of {flags.repeats}: {shown(turns[-1])}")
    result: dict[str, Any] = {"median": medians(turns), "turns": turns}
    say(f"{concurrency} at once, median: {shown(result['median'])}")
    return result


def medians(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each number by its place, over all turns."""
    found: dict[str, Any] = {}
    for key, first in turns[0].items():
        values = [one[key] for one in turns]
        if isinstance(first, Mapping):
            found[key] = medians(values)
        elif isinstance(first, float):
            found[key] = statistics.median(values)
    return found


def shown(found: Mapping[str, Any]) -> str:
    parts = {f"error of {client}": found[client]["error"] for client in ("llmx", "vllm") if client in found}
    parts |= {"difference": found["difference"]} if "difference" in found else {}
    return "; ".join(
        f"{what}: " + ", ".join(f"{name} {100 * value:+.2f} %" for name, value in one.items())
        for what, one in parts.items()
    )


def judged(results: Mapping[str, Any]) -> list[str]:
    """What is beyond its bound, a line each: our errors, and the differences."""
    wrong = []
    for label, one in results.items():
        of_ours = {name: one["median"]["llmx"]["error"][name] for name in FIGURES}
        for what, values, bound in (
            ("error", of_ours, MOST_ERROR),
            ("difference", one["median"].get("difference", {}), MOST_DIFFERENCE),
        ):
            wrong += [
                f"{label}: {what} of {name} is {100 * value:+.2f} %, the bound is {100 * bound:g} %"
                for name, value in values.items()
                if abs(value) > bound
            ]
    return wrong


def main() -> None:
    flags = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        results = {f"c{n}": compare(flags, Path(scratch), n) for n in flags.concurrency}
    wrong = judged(results)
    report = Report("bench_client", results | {"wrong": wrong}, definitions=DEFINITIONS)
    publish(report, flags.json, ("httpx",))
    for line in wrong:
        say(line)
    sys.exit(3 if wrong else 0)


if __name__ == "__main__":
    main()
