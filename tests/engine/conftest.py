"""After every test of the engine the pools of all engines that it made are whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine.common import MADE


@pytest.fixture(autouse=True)
def _whole_pools() -> Iterator[None]:
    torch.set_num_threads(1)
    MADE.clear()
    yield
    for made in MADE:
        made.scheduler.blocks.check()
        assert made.whole, "blocks are still held"
        assert not made.scheduler.running, "something still runs"
        assert not made.scheduler.waiting, "something still waits"
