"""A signal between two statements: no engine process outlives whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmx.config import EngineConfig
from llmx.engine import channel
from llmx.engine.launch import Spawned


@pytest.mark.skipif(sys.platform != "linux", reason="stops the process before it has asked to end with its parent")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_right_after_the_start_ends_even_a_stopped_engine(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[subprocess.Popen[Any]] = []

    class Interrupted(subprocess.Popen[Any]):
        """Stopped as soon as it runs, and its starter gets a signal before it has the object in hand."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            started.append(self)
            os.kill(self.pid, signal.SIGSTOP)
            signal.raise_signal(number)

    def unwind(*_: object) -> None:
        sys.exit(7)

    monkeypatch.setattr(channel.subprocess, "Popen", Interrupted)
    before = signal.signal(number, unwind)
    try:
        with pytest.raises(SystemExit) as caught:
            Spawned(EngineConfig(str(tmp_path)))
        assert signal.getsignal(number) is unwind
    finally:
        signal.signal(number, before)
    assert caught.value.code == 7
    (process,) = started
    assert process.returncode == -signal.SIGKILL
