"""The other ranks of a tensor-parallel core: one process each, led step by step by rank 0."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from llmx.config import EngineConfig
from llmx.engine.channel import Process, signals_held
from llmx.engine.messages import Failed, Follow, Message, Present, Ready, Step
from llmx.errors import LlmxError, UsageError
from llmx.parallel.group import Ranks

GRACE = 3.0  # seconds in which whoever broke the group must have been found


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
            with signals_held():
                process = Process()
                self._processes.append(process)
            own = replace(self.config, device="cpu" if device.type == "cpu" else f"cuda:{first + rank}")
            process.send(Follow(own, rank, group.port))
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
        """LlmxError if one has ended."""
        if any(process.fate() is not None for process in self._processes):
            raise self.blame()

    def blame(self) -> LlmxError:
        """Why the ranks can't go on. Who broke the group may take a moment to end; who lost another one ends well."""
        until = time.monotonic() + GRACE
        while time.monotonic() < until:
            for rank, process in enumerate(self._processes, start=1):
                if (error := _failure(rank, process)) is not None:
                    return error
            time.sleep(0.02)
        return LlmxError("The tensor-parallel ranks lost each other; the engine can't go on.")

    def close(self) -> None:
        for process in self._processes:
            process.hang_up()
        for process in self._processes:
            process.close()
        self._processes.clear()

    def _all_say(self, kind: type[Message]) -> None:
        for process in self._processes:
            try:
                message, *_ = process.channel.receive(None)
            except (EOFError, OSError):
                raise self.blame() from None
            if isinstance(message, Failed):
                raise _as_error(message)
            assert isinstance(message, kind)


def _failure(rank: int, process: Process) -> LlmxError | None:
    """What a rank says it failed with, or how it ended if it failed without a word."""
    try:
        for message in process.channel.receive(0):
            if isinstance(message, Failed):
                return _as_error(message)
    except (EOFError, OSError):
        pass
    if not process.process.poll():
        return None
    return LlmxError(f"Tensor-parallel rank {rank} ended {process.fate()}; the engine can't go on.")


def _as_error(failed: Failed) -> LlmxError:
    kind = UsageError if failed.exit_code == UsageError.exit_code else LlmxError
    return kind(failed.message, failed.hint)
