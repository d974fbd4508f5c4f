"""Where the core runs: in this process, or in one of its own behind an inherited socket pair."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from llmx.config import EngineConfig, EngineInfo
from llmx.engine.messages import Failed, Message, Progress, Ready, Start, Stop, decode, encode
from llmx.engine.service import Core
from llmx.errors import LlmxError, UsageError

HEADER = struct.Struct("<I")
LARGEST = 2**28  # bytes of one message


class Client(Protocol):
    """A core to talk to. `send` may be called from any thread, `receive` from one only."""

    info: EngineInfo

    def send(self, message: Message) -> None: ...

    def receive(self, timeout: float) -> list[Message]:
        """What the core says next, within `timeout` seconds. A core that died says `Failed`."""
        ...

    def close(self) -> None: ...


class InProcess:
    """The core in this process; it steps inside `receive`."""

    def __init__(self, core: Core) -> None:
        self.core, self.info = core, core.info
        self._inbox: deque[Message] = deque()
        self._arrived = threading.Event()

    def send(self, message: Message) -> None:
        self._inbox.append(message)
        self._arrived.set()

    def receive(self, timeout: float) -> list[Message]:
        if not self.core.busy and not self._inbox:
            self._arrived.wait(timeout)
        self._arrived.clear()
        said: list[Message] = []
        while self._inbox:
            said += self.core.handle(self._inbox.popleft())
        if self.core.busy:
            said += self.core.step()
        return said

    def close(self) -> None:
        pass


class Channel:
    """Length-prefixed messages over a socket."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._sending = threading.Lock()
        self._buffer = bytearray()

    def send(self, message: Message) -> None:
        data = encode(message)
        with self._sending:
            self.socket.sendall(HEADER.pack(len(data)) + data)

    def receive(self, timeout: float | None) -> list[Message]:
        """What has arrived, waiting at most `timeout` seconds (None: for ever) for the first. EOFError at the end."""
        found = self._parse()
        while not found:
            ready, _, _ = select.select([self.socket], [], [], timeout)
            if not ready:
                return []
            data = self.socket.recv(1 << 18)
            if not data:
                raise EOFError
            self._buffer += data
            found = self._parse()
        return found

    def _parse(self) -> list[Message]:
        found: list[Message] = []
        at = 0
        while len(self._buffer) - at >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer, at)
            assert length <= LARGEST, "a message is longer than any that is sent"
            if len(self._buffer) - at - HEADER.size < length:
                break
            at += HEADER.size
            found.append(decode(bytes(self._buffer[at : at + length])))
            at += length
        del self._buffer[:at]
        return found


class Spawned:
    """The core in a process of its own, so that nothing here takes the interpreter lock from its steps.

    It ends when this end of the socket closes, also if this process is killed.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "llmx.engine.launch", str(theirs.fileno())]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            # A session of its own: Ctrl-C is for the front, which tells the core what to do.
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        self._channel = Channel(mine)
        try:
            self._channel.send(Start(config))
            self.info = self._wait_ready(progress)
        except BaseException:
            self.close()
            raise

    def _wait_ready(self, progress: Callable[[int, int], None] | None) -> EngineInfo:
        while True:
            for message in self.receive(1.0):
                match message:
                    case Progress(done, total):
                        if progress:
                            progress(done, total)
                    case Ready(info):
                        return info
                    case Failed(text, hint, exit_code):
                        raise (UsageError if exit_code == UsageError.exit_code else LlmxError)(text, hint)

    def send(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # a dead core is noticed by `receive`
            self._channel.send(message)

    def receive(self, timeout: float) -> list[Message]:
        try:
            return self._channel.receive(timeout)
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            code = self.process.poll()
            how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
            return [Failed(f"The engine process ended {how}.", "its last words are above; --debug shows more")]

    def close(self) -> None:
        """Ask it to end, then make it."""
        self.send(Stop())
        with contextlib.suppress(OSError):
            self._channel.socket.close()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self.process.send_signal(number)
            try:
                self.process.wait(3.0)
                return
            except subprocess.TimeoutExpired:
                continue


def serve_core(channel: Channel) -> None:
    """The core's own process: load what `Start` names, then step until the front says stop or goes away."""
    last = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last
        if done == total or time.monotonic() - last > 0.1:
            last = time.monotonic()
            channel.send(Progress(done, total))

    try:
        start, *_ = channel.receive(None)  # `Stop` may have come along; then the end of the channel follows
        assert isinstance(start, Start)
        core = Core.load(start.config, progress)
        channel.send(Ready(core.info))
        while True:
            for message in channel.receive(0 if core.busy else None):
                if isinstance(message, Stop):
                    return
                for answer in core.handle(message):
                    channel.send(answer)
            if core.busy:
                for said in core.step():
                    channel.send(said)
    except LlmxError as error:
        channel.send(Failed(error.message, error.hint, error.exit_code))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        channel.send(Failed(f"The engine failed: {type(error).__name__}: {error}", "this is a bug; please report it"))
        raise


if __name__ == "__main__":
    serve_core(Channel(socket.socket(fileno=int(sys.argv[1]))))
