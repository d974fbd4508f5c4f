"""How much may be in flight: what the engine runs at once, and a bounded queue behind it."""

from __future__ import annotations

import math
import time
from collections import deque

from llmx.errors import RequestError

LEAST_WAIT, MOST_WAIT = 1, 60  # seconds of Retry-After
DRAINED_WAIT = 5


class Overloaded(RequestError):
    """Not now. `retry_after`: seconds."""

    def __init__(self, message: str, code: str, status: int, retry_after: int) -> None:
        super().__init__(message, code=code, status=status)
        self.retry_after = retry_after


class Admission:
    """Counts texts (prompts × n) that have not ended, and prompt tokens that the engine still has to compute.

    seats: texts that the engine runs at once. waiting, tokens: bounds of what may wait behind them. A request that
    finds nobody waiting is taken whatever its size, so none is too large for ever. Used from the event loop alone.
    """

    def __init__(self, seats: int, waiting: int, tokens: int) -> None:
        self.seats, self.most_waiting, self.most_tokens = seats, waiting, tokens
        self.texts = self.tokens = 0
        self.draining = False
        self._ends: deque[float] = deque(maxlen=128)

    def enter(self) -> Place:
        """A place for a request of which nothing is known yet. Overloaded if there is none."""
        self.check()
        return Place(self)

    def check(self) -> None:
        """Overloaded if a request that came now would be turned away."""
        self.check_draining()
        if self.texts >= self.seats + self.most_waiting:
            raise self.full(f"{self.texts - self.seats} texts are waiting already")
        if self.tokens >= self.most_tokens:
            raise self.full(f"prompts of {self.tokens} tokens are waiting already")

    def check_draining(self) -> None:
        """Overloaded if the server was told to stop."""
        if self.draining:
            raise Overloaded("The server is shutting down.", "shutting_down", 503, DRAINED_WAIT)

    def waited(self, seconds: float) -> Overloaded:
        """What a request gets that has waited so long."""
        return Overloaded(
            f"The request waited over {seconds:g} s for its turn.", "queue_timeout", 503, self.retry_after()
        )

    def full(self, why: str) -> Overloaded:
        return Overloaded(f"The queue is full: {why}.", "queue_full", 429, self.retry_after())

    def retry_after(self) -> int:
        """Seconds in which what waits now will have moved up, by the pace at which texts ended lately."""
        if len(self._ends) < 2:
            return LEAST_WAIT
        pace = (len(self._ends) - 1) / max(1e-3, time.monotonic() - self._ends[0])
        return max(LEAST_WAIT, min(MOST_WAIT, math.ceil((self.texts - self.seats) / pace)))

    def text_ended(self) -> None:
        self.texts -= 1
        self._ends.append(time.monotonic())


class Place:
    """One request's part of what is in flight. A context manager: on the way out it gives back what is left of it."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.texts, self.tokens = 1, 0
        admission.texts += 1

    def grow(self, texts: int, tokens: int) -> None:
        """Now that the request is known. Overloaded if there is no room for all of it."""
        admission = self.admission
        others = admission.texts - self.texts
        if others > admission.seats and others + texts > admission.seats + admission.most_waiting:
            raise admission.full(f"{others - admission.seats} texts are waiting, and {texts} more are too many")
        if admission.tokens and admission.tokens + tokens > admission.most_tokens:
            raise admission.full(f"prompts of {admission.tokens} tokens are waiting, and {tokens} more are too many")
        admission.texts += texts - self.texts
        admission.tokens += tokens
        self.texts, self.tokens = texts, tokens

    def begun(self, tokens: int) -> None:
        """The engine has computed a prompt of so many tokens."""
        self.tokens -= tokens
        self.admission.tokens -= tokens

    def ended(self) -> None:
        """One text has."""
        self.texts -= 1
        self.admission.text_ended()

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.begun(self.tokens)
        self.admission.texts -= self.texts
        self.texts = 0
