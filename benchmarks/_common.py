"""What the benchmark scripts share: the command, the commit, the versions, and one report on stdout or in a file."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from llmx.report import Report

ROOT = Path(__file__).resolve().parent.parent


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def commit() -> str | None:
    """The tree's commit, with a + when it has changes; None outside a repository."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "") if head.returncode == 0 else None


def timed(command: list[str], log: Path) -> dict[str, Any]:
    """Runs it to its end: seconds, CPU seconds, peak memory; RuntimeError with its last words if it fails."""
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{' '.join(command[:4])} ...: {log.read_text()[-800:]}")
    return {
        "seconds": time.monotonic() - began,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
    }


def versions(*packages: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def publish(report: Report, path: Path | None, packages: tuple[str, ...] = ("torch", "transformers")) -> None:
    """The report as JSON: to `path`, else to stdout. It says how to run the script again."""
    document: Mapping[str, Any] = report.to_dict() | {
        "script": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "versions": versions(*packages),
    }
    text = json.dumps(document, indent=2, ensure_ascii=False)
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n", encoding="utf-8")
        print(path)
