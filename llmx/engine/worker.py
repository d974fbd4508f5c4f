"""The main program of an engine process: a whole core, or one further rank of it.

torch is imported in functions: its import takes seconds, in which the other end may close already.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from typing import TYPE_CHECKING

from llmx.config import EngineConfig, EngineInfo
from llmx.engine.channel import Channel, end_with, end_with_parent
from llmx.engine.messages import Failed, Follow, Present, Progress, Ready, Start, Step
from llmx.errors import LlmxError
from llmx.formats.gguf import forget_metadata

if TYPE_CHECKING:
    import torch

    from llmx.parallel.group import Group

IDLE_SECONDS = 1.0  # between looks at the other ranks
NICENESS = 5


def main(channel: Channel) -> None:
    """Do what the first message says until the other end goes away."""
    end_with(channel.socket)
    try:
        first, *_ = channel.receive(None)
        match first:
            case Start(config):
                serve(channel, config)
            case Follow(config, rank, port):
                follow(channel, config, rank, port)
    except LlmxError as error:
        tell(channel, Failed(error.message, error.hint, error.exit_code))
        sys.exit(error.exit_code)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        from llmx.engine.memory import out_of_memory

        if (known := out_of_memory(error, "loading or computing")) is not None:  # on a rank other than the first
            tell(channel, Failed(known.message, known.hint, known.exit_code))
            sys.exit(known.exit_code)
        hint = "this is a bug; please report it"
        tell(channel, Failed(f"The engine failed: {type(error).__name__}: {error}", hint))
        raise


def tell(channel: Channel, failed: Failed) -> None:
    """Last words, if anybody is there to hear them."""
    with contextlib.suppress(OSError):
        channel.send(failed)


def serve(channel: Channel, config: EngineConfig) -> None:
    """A core: answer messages and step."""
    from llmx.engine.service import Core

    last = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last
        if done == total or time.monotonic() - last > 0.1:
            last = time.monotonic()
            channel.send(Progress(done, total))

    core = Core.load(config, progress)
    forget_metadata()
    try:
        yield_to_front(core.info)
        channel.send(Ready(core.info))
        while True:
            for message in channel.receive(0 if core.busy else IDLE_SECONDS):
                for answer in core.handle(message):
                    channel.send(answer)
            core.check()
            if core.busy and (said := core.step()):
                channel.send(*said)
    finally:
        core.close()


def yield_to_front(info: EngineInfo) -> None:
    """On a CPU, let whoever talks to clients go first where both want to run.

    The front needs the processor often and briefly, the threads that compute always: at equal priority it waits behind
    them for whole time slices, and answers and refusals come late. On an idle machine this costs the engine nothing.
    """
    if (
        info.device.startswith("cpu") and sys.platform == "linux"
    ):  # where priorities are the threads', not the process's
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has just ended
                os.setpriority(os.PRIO_PROCESS, int(thread), niceness)


def follow(channel: Channel, config: EngineConfig, rank: int, port: int) -> None:
    """A further rank: take the messages that rank 0 took, and make its steps."""
    from llmx.engine.build import build_engine
    from llmx.engine.service import Core
    from llmx.parallel.group import Lost, Ranks

    def join(device: torch.device) -> Group:
        group = Ranks(rank, config.tensor_parallel_size, device, port)
        channel.send(Present())
        group.join()
        return group

    try:
        core = Core(*build_engine(config, join=join))
        yield_to_front(core.info)
        channel.send(Ready(core.info))
        while True:
            for step in channel.receive(None):
                assert isinstance(step, Step)
                for message in step.messages:
                    core.handle(message)
                core.step()
    except Lost:
        return  # another rank ended before this one, and rank 0 sees which


if __name__ == "__main__":
    if sys.argv[2:]:
        end_with_parent(int(sys.argv[2]))
    main(Channel(socket.socket(fileno=int(sys.argv[1]))))
