"""The other ranks of a tensor-parallel core: one process each, led step by step by rank 0."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from llmx.config import EngineConfig
from llmx.engine.channel import Process
from llmx.engine.messages import Failed, Follow, Message, Present, Ready, Step
from llmx.errors import LlmxError, UsageError
from llmx.parallel.group import Ranks

GRACE = 1.0  # seconds for a rank that is going to be gone


class Followers:
    """Ranks 1 and up. Scheduling follows from what was added and aborted, so they are told no more before each step."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._processes: list[Process] = []

    def join(self, device: torch.device) -> Ranks:
        """Start them and form the group; returns as rank 0. Raises what one of them failed with."""
        size, first = self.config.tensor_parallel_size, device.index or 0
        if device.type == "cuda" and torch.cuda.device_count() < first + size:
            there = torch.cuda.device_count() - first
            raise UsageError(f"--tp {size} needs as many CUDA devices; from {device} on there are {there}.")
        group = Ranks(0, size, device)
        for rank in range(1, size):
            process = Process()
            self._processes.append(process)
            own = replace(self.config, device="cpu" if device.type == "cpu" else f"cuda:{first + rank}")
            process.channel.send(Follow(own, rank, group.port))
        self._all_say(Present)  # waits here, where Ctrl-C and a death are noticed
        group.join()
        return group

    def wait_ready(self) -> None:
        """Until each has loaded its share. Raises what one of them failed with."""
        self._all_say(Ready)

    def step(self, messages: tuple[Message, ...]) -> None:
        """Let each take these messages and make the step that rank 0 makes now."""
        for process in self._processes:
            process.send(Step(messages))

    def check(self) -> None:
        """LlmxError if one has ended, which none does by itself."""
        if ended := [(rank, process) for rank, process in self._ranks() if process.fate() is not None]:
            raise self._why(*min(ended, key=lambda one: one[1].process.returncode == 0))

    def blame(self) -> LlmxError:
        """Why the group broke. Ranks that lost another one end well; the one that went first may take a moment."""
        until = time.monotonic() + GRACE
        while time.monotonic() < until and not any(p.fate() and p.process.returncode for _, p in self._ranks()):
            time.sleep(0.02)
        try:
            self.check()
        except LlmxError as error:
            return error
        return LlmxError("The tensor-parallel ranks lost each other; the engine can't go on.")

    def close(self) -> None:
        for process in self._processes:
            process.hang_up()
        for process in self._processes:
            process.close()

    def _ranks(self) -> Iterator[tuple[int, Process]]:
        return enumerate(self._processes, start=1)

    def _all_say(self, kind: type[Message]) -> None:
        for process in self._processes:
            try:
                message, *_ = process.channel.receive(None)
            except (EOFError, OSError):
                raise self.blame() from None
            if isinstance(message, Failed):
                raise _as_error(message)
            assert isinstance(message, kind)

    def _why(self, rank: int, process: Process) -> LlmxError:
        """What the rank said before it ended, if it did."""
        try:
            for message in process.channel.receive(0):
                if isinstance(message, Failed):
                    return _as_error(message)
        except (EOFError, OSError):
            pass
        return LlmxError(f"Tensor-parallel rank {rank} ended {process.fate()}; the engine can't go on.")


def _as_error(failed: Failed) -> LlmxError:
    kind = UsageError if failed.exit_code == UsageError.exit_code else LlmxError
    return kind(failed.message, failed.hint)
