"""What the handlers share: the engine, the model's public names, and the generations in flight."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from llmx.core import SamplingParams
from llmx.errors import LlmxError, RequestError
from llmx.server.generation import Generation
from llmx.server.sampling import SamplingFields
from llmx.server.settings import ServerSettings

if TYPE_CHECKING:
    from llmx.llm import LLM

log = logging.getLogger("llmx.server")
MOST_CHOICES = 1024  # prompts x n of one request
MOST_NOTED = 256  # unknown fields that are remembered as logged


class Service:
    """One per application. `names[0]` is what answers call the model; every other name is accepted too."""

    def __init__(self, llm: LLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.tokenizer = llm.tokenizer  # UsageError for a model without one
        self.settings = settings
        named = llm.info.model
        self.public = settings.served_names or (PurePath(named).name or named,)
        self.names = (*self.public, named)
        self.created = int(time.time())
        self.live: set[Generation] = set()
        self._noted: set[str] = set()

    @property
    def model(self) -> str:
        return self.public[0]

    @property
    def failed(self) -> str | None:
        """Why no request can run any more, or None."""
        return self.llm.failed or (None if self.llm.alive() else "The engine has stopped.")

    def note_unknown(self, body: SamplingFields) -> None:
        """Fields that nobody here knows are ignored, and named in the log once."""
        for name in body.unknown:
            if name not in self._noted and len(self._noted) < MOST_NOTED:
                self._noted.add(name)
                log.warning("Ignored a request field that this server doesn't know: %.100r", name)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise RequestError(
                f"The model {name[:200]!r} does not exist; this server has {self.model!r}.",
                param="model",
                code="model_not_found",
                status=404,
            )

    async def open(
        self, kind: str, prompts: Sequence[Sequence[int]], params: SamplingParams, salt: bytes
    ) -> Generation:
        """Starts a request; `kind` begins its id. RequestError where it can't run, LlmxError where nothing can."""
        count = len(prompts) * params.n
        if count > MOST_CHOICES:
            raise RequestError(
                f"{len(prompts)} prompts × n = {params.n} are more than {MOST_CHOICES} texts.", param="n"
            )
        if reason := self.failed:
            raise LlmxError(reason)
        id = f"{kind}-{uuid.uuid4().hex}"
        # In a thread: a long prompt on its way to the engine's process may have to wait until that has read some.
        return await asyncio.to_thread(Generation, self.llm, prompts, params, salt, self.live, id)

    def fail_all(self, message: str) -> None:
        """Ends everything in flight with an error."""
        for generation in tuple(self.live):
            generation.fail(LlmxError(message))

    def card(self, name: str) -> dict[str, Any]:
        """One entry of /v1/models."""
        info = self.llm.info
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "llmx",
            "root": info.model,
            "max_model_len": info.max_model_len,
        }
