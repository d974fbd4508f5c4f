"""Messages between processes: length-prefixed JSON over an inherited socket pair."""

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
from collections.abc import Iterator

from llmx.engine.messages import Message, decode, encode

HEADER = struct.Struct("<I")
LARGEST = 2**28  # bytes of what is sent in one piece
END_SECONDS = 0.5  # for a process to end
PR_SET_PDEATHSIG = 1  # of Linux' prctl


class Channel:
    """Length-prefixed messages over a socket."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._sending = threading.Lock()
        self._buffer = bytearray()

    def send(self, *messages: Message) -> None:
        """All in one piece: what the other end waits for, wakes it once."""
        data = encode(messages)
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
            assert length <= LARGEST, "it is longer than any that is sent"
            if len(self._buffer) - at - HEADER.size < length:
                break
            at += HEADER.size
            found += decode(bytes(self._buffer[at : at + length]))
            at += length
        del self._buffer[:at]
        return found


def end_with(end: socket.socket) -> None:
    """From a thread of its own: end this process when the other end closes, whatever it is in the middle of."""

    def wait() -> None:
        poll = select.poll()
        poll.register(end, 0)  # a hang-up is told in any case
        poll.poll()
        os._exit(0)

    threading.Thread(target=wait, name="llmx-other-end", daemon=True).start()


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent` ends, even one that is stopped and so can't notice it itself.

    Linux only; elsewhere nothing happens, and `end_with` has to do.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the kernel was told
            os._exit(0)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Signals whose handlers are Python functions wait until the context closes, and are handled then.

    A handler may raise between any two statements: after a process was started, and before anybody who would end it
    knows of it. Only the first thread handles signals; in others nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    held = [number for number, handler in before.items() if callable(handler)]
    for number in held:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number in held:
            signal.signal(number, before[number])
        for late in came:
            signal.raise_signal(late)


class Process:
    """Another process of this engine and the channel to it. It ends when this end closes, also if we are killed."""

    def __init__(self) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "llmx.engine.worker", str(theirs.fileno())]
            if threading.current_thread() is threading.main_thread():
                # What the kernel watches is the thread that started it, and other threads may end before we do.
                command.append(str(os.getpid()))
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            # A session of its own: Ctrl-C is for the front, which tells the others what to do.
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        self.channel = Channel(mine)

    def send(self, message: Message) -> None:
        """A dead process is noticed by `receive`, not here."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def fate(self) -> str | None:
        """How it ended; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        return f"by signal {-code}" if code < 0 else f"with exit code {code}"

    def hang_up(self) -> None:
        """Ends it, soon."""
        with contextlib.suppress(OSError):
            # Shut down, not only closed: a thread of ours may be writing to a process that doesn't read.
            self.channel.socket.shutdown(socket.SHUT_RDWR)
            self.channel.socket.close()

    def close(self) -> None:
        """Hang up, which ends it in a moment. If it does not, it is stopped or stuck, and no signal but one helps."""
        self.hang_up()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it now, whatever it does."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may still be busy with its memory
            self.process.wait(END_SECONDS)
