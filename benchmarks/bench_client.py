"""Is our bench client right? It measures a server whose times are known, at several concurrencies; each error must be
at most 2 %. With --vllm VENV, `vllm bench serve` of that environment measures the same server, and both must agree
within 3 %. The truth is what the server wrote down itself: its own delays are no error of the client. Exit code 3 if
something is further off.

    python benchmarks/bench_client.py --json client.json
    python benchmarks/bench_client.py --vllm ~/vllm-venv        # a virtual environment with vllm installed
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _common import ROOT, publish, say

from llmx.report import Report

MOST_ERROR, MOST_DIFFERENCE = 0.02, 0.03
FIGURES = ("mean_ttft_ms", "mean_itl_ms", "mean_e2el_ms", "output_throughput")
SAME_BY_BOTH = ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms")  # the others follow the lengths, which each draws itself
DEFINITIONS = {
    "error": "our client's figure / the same from the clock readings that the server took as it wrote - 1",
    "difference": "our client's figure / that of `vllm bench serve` on the same server - 1",
    "truth": "TTFT: first token written - request received; ITL: between writes; E2E: last token written - received;"
    " throughput: tokens / (last write - first request received)",
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=8, help="for each that is in flight at once")
    parser.add_argument("--ttft-ms", type=float, default=100.0)
    parser.add_argument("--itl-ms", type=float, default=20.0)
    # Of mixed lengths, so that requests don't all come at the same moment and wait for each other in the mock.
    parser.add_argument("--output-len", type=int, default=64, help="mean; they are of half to three halves of it")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--vllm", type=Path, default=None, help="a virtual environment that has vllm")
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


def ours(flags: argparse.Namespace, url: str, concurrency: int, path: Path) -> dict[str, Any]:
    lengths = f"{flags.output_len // 2}:{flags.output_len * 3 // 2}"
    command = [sys.executable, "-m", "llmx.cli", "bench", "--url", url, "--concurrency", str(concurrency)]
    command += ["--requests", str(flags.requests * concurrency), "--output-len", lengths]
    command += ["--input-len", str(flags.input_len), "--json", str(path)]
    subprocess.run(command, check=True, capture_output=True, env=environment())
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def vllms(flags: argparse.Namespace, url: str, concurrency: int, path: Path) -> dict[str, Any]:
    """The same by `vllm bench serve`: same lengths, same number at once, as many warm-ups."""
    command = [str(flags.vllm / "bin" / "vllm"), "bench", "serve", "--backend", "openai", "--base-url", url]
    command += ["--endpoint", "/v1/completions", "--model", "mock", "--tokenizer", flags.tokenizer]
    command += ["--dataset-name", "random", "--random-input-len", str(flags.input_len), "--temperature", "0"]
    command += ["--random-range-ratio", "0.5"]
    command += ["--random-output-len", str(flags.output_len), "--num-prompts", str(flags.requests * concurrency)]
    command += ["--max-concurrency", str(concurrency), "--num-warmups", str(max(8, 2 * concurrency))]
    command += [
        "--ignore-eos",
        "--percentile-metrics",
        "ttft,tpot,itl,e2el",
        "--save-result",
        "--result-dir",
        str(path.parent),
        "--result-filename",
        path.name,
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"vllm bench serve failed:\n{(done.stdout + done.stderr)[-3000:]}")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def truth(log: Path, requests: int) -> dict[str, float]:
    """Of the last `requests` requests, by the server's own clock."""
    lines = [json.loads(line) for line in log.read_text().splitlines()][-requests:]
    written = [line["written"] for line in lines]
    gaps = [after - before for times in written for before, after in itertools.pairwise(times)]
    seconds = max(times[-1] for times in written) - min(line["received"] for line in lines)
    return {
        "mean_ttft_ms": 1e3 * statistics.fmean(line["written"][0] - line["received"] for line in lines),
        "mean_itl_ms": 1e3 * statistics.fmean(gaps),
        "mean_e2el_ms": 1e3 * statistics.fmean(line["written"][-1] - line["received"] for line in lines),
        "output_throughput": sum(map(len, written)) / seconds,
    }


def compare(flags: argparse.Namespace, folder: Path, concurrency: int) -> dict[str, Any]:
    log, requests = folder / "log", flags.requests * concurrency
    with server(flags, log) as url:
        mine = ours(flags, url, concurrency, folder / "ours.json")
        real = truth(log, requests)
        result: dict[str, Any] = {
            "figures": {name: mine[name] for name in FIGURES},
            "truth": real,
            "error": {name: mine[name] / real[name] - 1 for name in FIGURES},
            "client": mine["results"]["serving"]["client"],
        }
        if flags.vllm is not None:
            theirs = vllms(flags, url, concurrency, folder / "vllm.json")
            result["vllm"] = {name: theirs[name] for name in SAME_BY_BOTH}
            result["difference"] = {name: mine[name] / theirs[name] - 1 for name in SAME_BY_BOTH}
    for what in ("error", "difference"):
        if what in result:
            shown = ", ".join(f"{name} {100 * value:+.2f} %" for name, value in result[what].items())
            say(f"{concurrency} at once: {what} {shown}")
    return result


def main() -> None:
    flags = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        results = {f"c{n}": compare(flags, Path(scratch), n) for n in flags.concurrency}
    bounds = {"error": MOST_ERROR, "difference": MOST_DIFFERENCE}
    wrong = [
        f"{label}: {what} of {name} is {100 * value:+.2f} %, the bound is {100 * bounds[what]:g} %"
        for label, one in results.items()
        for what in bounds
        for name, value in one.get(what, {}).items()
        if abs(value) > bounds[what]
    ]
    report = Report("bench_client", results | {"wrong": wrong}, definitions=DEFINITIONS)
    publish(report, flags.json, ("httpx",))
    for line in wrong:
        say(line)
    sys.exit(3 if wrong else 0)


if __name__ == "__main__":
    main()
