"""`llmx quantize` killed with SIGKILL at random points and resumed: the same bytes, and no finished block done again.

First one run that nobody kills, whose time bounds the moments at which the others are killed; then for each kill a run
from nothing, killed, and resumed to its end. Exit code 3 if a folder's hash differs, or a resumed run did not take over
each block whose note was on the disk when its predecessor died.

    python benchmarks/quantize_killed.py --source DIR --calib TEXT --work DIR -- --gptq --samples 4 --seq-len 128
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _common import publish, say

from llmx.report import Report

DEFINITIONS = {
    "kills.after": "seconds from the start of the process to SIGKILL",
    "kills.finished": "blocks whose notes were on the disk then",
    "kills.resumed": "blocks that the resumed run took over; None: the killed run had ended before",
}


def tree(folder: Path) -> str:
    """A hash of all names and bytes in a folder."""
    total = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        total.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True, type=Path)
    parser.add_argument("--calib", required=True, type=Path)
    parser.add_argument("--work", required=True, type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("options", nargs="+", help="of llmx quantize, behind --")
    flags = parser.parse_args()
    flags.work.mkdir(parents=True, exist_ok=True)
    wanted, out, report = flags.work / "wanted", flags.work / "out", flags.work / "report.json"
    partial = out.with_name(out.name + ".partial")
    blocks = json.loads((flags.source / "config.json").read_text())["num_hidden_layers"]  # one more note: the rest

    def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
        given = ["--calib", str(flags.calib), "-o", str(folder), "--json", str(report), *flags.options, *more]
        command = [sys.executable, "-m", "llmx.cli", "quantize", str(flags.source), *given]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def finish(folder: Path, *more: str) -> dict[str, Any]:
        if code := start(folder, *more).wait():
            raise SystemExit(f"llmx quantize ended with {code}")
        found: dict[str, Any] = json.loads(report.read_text())["results"]
        return found

    began = time.monotonic()
    finish(wanted, "--force")
    whole, bytes_of = time.monotonic() - began, tree(wanted)
    dice, kills, wrong = random.Random(flags.seed), [], 0
    for number in range(flags.kills):
        for folder in (out, partial):
            shutil.rmtree(folder, ignore_errors=True)
        after = dice.uniform(0, whole)
        process = start(out)
        time.sleep(after)
        process.kill()
        process.wait()
        finished = sum(int(note.stem) < blocks for note in partial.glob(".unfinished/[0-9]*.json"))
        resumed = None if out.exists() else finish(out, "--resume")["blocks_resumed"]
        same = tree(out) == bytes_of
        good = same and resumed in (None, finished)
        wrong += not good
        kills.append({"after": after, "finished": finished, "resumed": resumed, "same": same})
        say(f"kill {number + 1} after {after:.1f} s: {finished} blocks done, {resumed} taken over, same bytes: {same}")
    results = {"seconds": whole, "hash": bytes_of, "kills": kills, "wrong": wrong}
    publish(Report("quantize_killed", results, definitions=DEFINITIONS, seeds={"kills": flags.seed}), flags.json)
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
