"""Where the core runs: in this process, or in one of its own. Without torch: the front of a server needs none."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from llmx.config import EngineConfig, EngineInfo
from llmx.engine.channel import Process, signals_held
from llmx.engine.messages import Failed, Message, Progress, Ready, Start
from llmx.errors import LlmxError, UsageError

if TYPE_CHECKING:
    from llmx.engine.service import Core


class Client(Protocol):
    """A core to talk to. `send` may be called from any thread, `receive` from one only."""

    info: EngineInfo

    def send(self, message: Message) -> None: ...

    def receive(self, timeout: float) -> list[Message]:
        """What the core says next, within `timeout` seconds. A core that died says `Failed`."""
        ...

    def close(self) -> None: ...

    def kill(self) -> None:
        """End a core of its own process now, whatever it is in the middle of."""
        ...


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
        else:
            self.core.check()
        return said

    def close(self) -> None:
        self.core.close()

    def kill(self) -> None:
        """It ends with this process."""


class Spawned:
    """The core in a process of its own, so that nothing here takes the interpreter lock from its steps.

    It reads between two steps, and a long prompt is more than a socket holds: so a thread writes, and no sender waits.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """meanwhile: what there is to do here while the core loads there; if it fails, so does this."""
        self._outbox: SimpleQueue[Message | None] = SimpleQueue()
        with contextlib.ExitStack() as stack:
            with signals_held():
                self._core = Process()
                stack.callback(self.close)
            self.process = self._core.process
            threading.Thread(target=self._write, name="llmx-outbox", daemon=True).start()
            self.send(Start(config))
            meanwhile()
            self.info = self._wait_ready(progress)
            stack.pop_all()  # nothing failed: it stays

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
        self._outbox.put(message)

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            self._core.send(message)

    def receive(self, timeout: float) -> list[Message]:
        try:
            return self._core.channel.receive(timeout)
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
            how = self._core.fate() or "its connection"
            return [Failed(f"The engine process ended {how}.", "its last words are above; --debug shows more")]

    def close(self) -> None:
        self._outbox.put(None)
        self._core.close()

    def kill(self) -> None:
        self._core.kill()
