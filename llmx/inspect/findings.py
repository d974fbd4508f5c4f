"""What `llmx inspect` can find wrong with a checkpoint: one sentence about one tensor, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEVELS = ("warning", "error")
CHECKS = {
    "files": "the files can be read: headers, offsets, shards, the index",
    "config": "what the config says can be understood, and is said once",
    "packing": "the tensors of a linear fit each other and the config: shapes, dtypes, bits, groups, blocks",
    "groups": "inputs are whole groups, and g_idx names each group as often as it has inputs",
    "zeros": "zero points are stored as the format's version and the config say",
    "scales": "no scale is negative or absurd, and few are zero",
    "values": "all numbers are finite, and no tensor is all zeros",
    "tensors": "all that the model's constructor asks for is there, in its shape, and nothing else",
    "tied": "a tied head is stored once, an untied one is there",
    "vllm": "vLLM 0.32 loads it",
}


@dataclass(frozen=True)
class Finding:
    """level: "error", it is wrong or can't be read; "warning", it is odd, or other engines will not load it. kind: what
    is the same in findings of one sort. tensor: the tensor, linear or file at fault."""

    level: str
    check: str
    kind: str
    tensor: str
    message: str
    hint: str = ""


def at_least(findings: Iterable[Finding], level: str) -> int:
    """How many are of this level or a worse one."""
    worst = LEVELS[LEVELS.index(level) :]
    return sum(finding.level in worst for finding in findings)


def sorts(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings of one sort together, errors first, else in the order in which they were found."""
    found: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        found.setdefault((finding.level, finding.check, finding.kind), []).append(finding)
    return sorted(found.values(), key=lambda same: -LEVELS.index(same[0].level))
