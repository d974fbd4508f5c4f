"""How many threads: as many as the processors that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from llmx import device

CASES = {
    "nothing": ("", {}, 12),
    "no limit": ("0::/a", {"cpu.max": "max 100000", "a/cpu.max": "max 100000"}, 12),
    "version 2": ("0::/a", {"a/cpu.max": "300000 100000"}, 3),
    "a part of a processor counts as one": ("0::/a", {"a/cpu.max": "250000 100000"}, 3),
    "less than one": ("0::/a", {"a/cpu.max": "1000 100000"}, 1),
    "an outer group is tighter": ("0::/a/b", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "700000 100000"}, 2),
    "an inner group is tighter": ("0::/a/b", {"a/cpu.max": "700000 100000", "a/b/cpu.max": "50000 25000"}, 2),
    "a container that sees an outer path": ("0::/../host/path", {"cpu.max": "500000 100000"}, 5),
    "version 1": ("4:memory:/m\n3:cpu,cpuacct:/x\n", {
        "cpu,cpuacct/x/cpu.cfs_quota_us": "400000\n", "cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }, 4),
    "version 1 beside 2": ("3:cpu:/x\n0::/y", {
        "cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000", "unified/y/cpu.max": "600000 100000",
    }, 6),
    "not numbers": ("0::/a", {"a/cpu.max": "lots"}, 12),
    "no period": ("0::/a", {"a/cpu.max": "100000 0"}, 12),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_quotas_of_control_groups_bound_the_threads(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_process, files, threads = CASES[case]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12), raising=False)
    monkeypatch.setattr(device, "CGROUP", tmp_path / "groups")
    monkeypatch.setattr(device, "PROCESS_GROUPS", tmp_path / "of_process")
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    if of_process:
        (tmp_path / "of_process").write_text(of_process)
    assert device.thread_count() == threads
    assert device.thread_count(ranks=2) == max(1, threads // 2), "ranks on one machine share it"


def test_affinity_bounds_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5}, raising=False)
    assert device.thread_count() == 1


def test_what_is_asked_for_wins() -> None:
    assert device.use_threads(3, ranks=2) == torch.get_num_threads() == 3
    assert device.use_threads() == torch.get_num_threads() == device.thread_count()
