"""The other ranks of a tensor-parallel core: one process each, led step by step by rank 0."""

from __future__ import annotations

from dataclasses import replace

import torch

from llmx.config import EngineConfig
from llmx.engine.channel import Process
from llmx.engine.messages import Failed, Follow, Message, Ready, Step
from llmx.errors import LlmxError, UsageError
from llmx.parallel.group import Ranks


class Followers:
    """Ranks 1 and up. Scheduling follows from what was added and aborted, so they are told no more before each step."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._processes: list[Process] = []

    def join(self, device: torch.device) -> Ranks:
        """Start them and form the group; returns as rank 0."""
        size = self.config.tensor_parallel_size
        if device.type == "cuda" and torch.cuda.device_count() < size:
            raise UsageError(f"--tp {size} needs as many CUDA devices; there are {torch.cuda.device_count()}.")
        group = Ranks(0, size, device)
        for rank in range(1, size):
            process = Process()
            self._processes.append(process)
            own = replace(self.config, device="cpu" if device.type == "cpu" else f"cuda:{rank}")
            process.channel.send(Follow(own, rank, group.port))
        group.join()
        return group

    def wait_ready(self) -> None:
        """Until each has loaded its share. Raises what one of them failed with."""
        for rank, process in enumerate(self._processes, start=1):
            try:
                (message,) = process.channel.receive(None)
            except (EOFError, OSError):
                raise self._gone(rank, process) from None
            if isinstance(message, Failed):
                raise (UsageError if message.exit_code == UsageError.exit_code else LlmxError)(
                    message.message, message.hint
                )
            assert isinstance(message, Ready)

    def step(self, messages: tuple[Message, ...]) -> None:
        """Let each take these messages and make the step that rank 0 makes now."""
        self.check()
        for process in self._processes:
            process.send(Step(messages))

    def check(self) -> None:
        """LlmxError if one has ended."""
        for rank, process in enumerate(self._processes, start=1):
            if process.fate() is not None:
                raise self._gone(rank, process)

    def close(self) -> None:
        for process in self._processes:
            process.close()

    def _gone(self, rank: int, process: Process) -> LlmxError:
        return LlmxError(
            f"Tensor-parallel rank {rank} ended {process.fate() or 'its connection'}; the engine can't go on."
        )
