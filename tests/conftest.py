"""What all tests share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: children must not inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["HF_HUB_OFFLINE"] = "1"  # the oracles never look for a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not Path("/dev/nvidiactl").exists():  # before anything imports triton, which reads it once
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def demo() -> Path:
    """The demo model's GGUF; a test that needs it is skipped where nobody has pulled it: tests are offline."""
    from llmx.errors import LlmxError
    from llmx.formats.hub import locate

    try:
        return locate("demo").path
    except LlmxError as error:
        pytest.skip(f"{error.message} Run `llmx pull demo` to include this test.")
