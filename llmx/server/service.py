"""What the handlers share: the engine, the model's public names, and the generations in flight."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from llmx.config import Metrics
from llmx.core import SamplingParams
from llmx.errors import LlmxError, RequestError
from llmx.server.admission import Admission, Overloaded, Place
from llmx.server.dialect import Dialect
from llmx.server.generation import Generation, unless_gone
from llmx.server.keys import Key
from llmx.server.sampling import SamplingFields
from llmx.server.settings import ServerSettings
from llmx.server.traffic import Traffic

if TYPE_CHECKING:
    from llmx.llm import LLM

log = logging.getLogger("llmx.server")
PLACE, KEY = "llmx.place", "llmx.key"  # where the request's place and key are in the ASGI scope
QUEUE_PER_SEAT, LEAST_QUEUE = 4, 64  # texts that may wait, by default, per text that runs
CACHES_QUEUED = 4  # and how many KV caches their prompts may fill
DESK, MOST_TOKENS = 64, 2**62  # tokenizing at once
MEASURE_SECONDS = 2.0
PROBE, PROBE_PARAMS = (0,), SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
PROBE_SECONDS, PROBE_POLL = 10.0, 0.05
FREE_CHARACTERS = 64 * 1024
INLINE_TOKENS, INLINE_TEXTS = 4096, 16
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
        self.defaults = settings.defaults
        self.dialect = Dialect(self.tokenizer, settings.tool_call_parser, settings.reasoning_parser)
        self.live: set[Generation] = set()
        info = llm.info
        waiting = max(LEAST_QUEUE, QUEUE_PER_SEAT * info.max_num_seqs)
        self.admission = Admission(
            info.max_num_seqs,
            waiting if settings.queued_requests is None else settings.queued_requests,
            CACHES_QUEUED * info.num_blocks * info.block_size
            if settings.queued_tokens is None
            else settings.queued_tokens,
        )
        self.desk = Admission(0, DESK, MOST_TOKENS)
        self.traffic = Traffic(self.model, info, llm.config.prefix_caching)
        self._measuring: asyncio.Task[Metrics] | None = None
        self._measured: Metrics | None = None
        self._probing: asyncio.Task[None] | None = None
        self._noted: set[str] = set()

    @property
    def model(self) -> str:
        return self.public[0]

    @property
    def failed(self) -> str | None:
        """Why no request can run any more, or None."""
        return self.llm.failed or (None if self.llm.alive() else "The engine has stopped.")

    def check_up(self) -> None:
        """LlmxError if the engine has failed, Overloaded once the server was told to stop."""
        if reason := self.failed:
            raise LlmxError(reason)
        self.admission.check_draining()

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""
        return bool(self.live or self.admission.texts)

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

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. RequestError for one that can't be few enough, before time goes into counting them."""
        self.check_length(text)
        return self.tokenizer.encode(text)

    def render(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[int]:
        """Token ids of a chat, by the model's template. RequestError."""
        self.check_length("".join(message["content"] for message in messages))
        return self.llm.render(messages, **arguments)

    def check_length(self, text: str) -> None:
        if len(text) <= FREE_CHARACTERS:
            return
        context = self.llm.info.max_model_len
        least = len(text.encode("utf-8", "replace")) // self._longest_token
        if least > context:
            raise RequestError(
                f"The prompt has at least {least} tokens; the context of {context} must hold it and at least one more.",
                param="prompt",
                code="context_length_exceeded",
            )

    @cached_property
    def _longest_token(self) -> int:
        """In bytes."""
        return max(1, *(len(self.tokenizer.piece(token)) for token in range(self.tokenizer.vocab_size)))

    async def open(
        self,
        request: Request,
        kind: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        salt: bytes,
        *,
        prompt_only: bool = False,
    ) -> Generation:
        """Starts a request; `kind` begins its id. RequestError where it can't run, LlmxError where nothing can.

        With a time-out for the queue, or a grammar, which the engine may refuse, it returns when the request has left
        the queue, so that a stream too can be refused.
        """
        count = len(prompts) * params.n
        if count > MOST_CHOICES:
            raise RequestError(
                f"{len(prompts)} prompts × n = {params.n} are more than {MOST_CHOICES} texts.", param="n"
            )
        if reason := self.failed:
            raise LlmxError(reason)
        place: Place = request.scope[PLACE]
        tokens = sum(map(len, prompts))
        try:
            place.grow(count, tokens)
        except Overloaded as error:
            self.traffic.rejected.add(code=str(error.code))
            raise
        make = partial(
            Generation,
            self.llm,
            prompts,
            params,
            id=f"{kind}-{uuid.uuid4().hex}",
            salt=self._salt(request.scope[KEY]) + salt,
            prompt_only=prompt_only,
            place=place,
            traffic=self.traffic,
            live=self.live,
        )
        # Long prompts take a while to look through; for short ones the way to a thread and back takes longer.
        # Whether a grammar is a good one may take seconds to find out.
        short = tokens <= INLINE_TOKENS and count <= INLINE_TEXTS and params.grammar is None
        generation = make() if short else await asyncio.to_thread(make)
        generation.begin()
        if self.settings.queue_seconds is not None or params.grammar is not None:
            try:
                await unless_gone(request.receive, generation.left_queue())
            except BaseException:
                generation.__exit__()
                raise
        return generation

    def _salt(self, key: Key | None) -> bytes:
        """What keeps the holders of different keys apart in the prefix cache."""
        apart = len({one.digest for one in self.settings.keys}) > 1 and not self.settings.share_cache
        return key.salt if key is not None and apart else b""

    def expire(self) -> None:
        """Ends the requests that have waited, or run, for longer than they may."""
        now, waits, runs = time.monotonic(), self.settings.queue_seconds, self.settings.request_seconds
        for generation in tuple(self.live):
            took = now - generation.opened
            if waits is not None and generation.waiting and took > waits:
                self.traffic.rejected.add(code="queue_timeout")
                generation.fail(self.admission.waited(waits))
            elif runs is not None and took > runs:
                said = f"The request took over {runs:g} s, the most that this server allows."
                generation.fail(RequestError(said, status=504, code="request_timeout"))

    async def probe(self) -> None:
        """Returns once the engine has given a token: to a request made for that, or to any other in the meantime.
        LlmxError if there is none for `PROBE_SECONDS`. However many ask, one request is made."""
        if self._probing is None:
            self._probing = asyncio.create_task(self._probe())
        asked = self._probing
        try:
            await asyncio.shield(asked)
        finally:
            if asked.done() and self._probing is asked:
                self._probing = None

    async def _probe(self) -> None:
        before = self.traffic.deltas
        # A salt of its own: nothing is taken from the prefix cache, and nothing left there.
        stream = self.llm.open(PROBE, PROBE_PARAMS, id=f"probe-{uuid.uuid4().hex}", salt=uuid.uuid4().bytes)
        token = asyncio.ensure_future(anext(aiter(stream)))
        deadline = time.monotonic() + PROBE_SECONDS
        try:
            while not token.done() and self.traffic.deltas == before:
                if time.monotonic() > deadline:
                    raise LlmxError(f"The engine has given no token for {PROBE_SECONDS:g} s.")
                await asyncio.wait((token,), timeout=PROBE_POLL)
            if token.done():
                token.result()
        finally:
            stream.abort()
            token.cancel()
            await asyncio.gather(token, return_exceptions=True)

    async def measure(self) -> Metrics | None:
        """The engine's counters, at most one question at a time; the last known where it is too busy to answer."""
        if self._measuring is None:
            self._measuring = asyncio.create_task(asyncio.to_thread(self.llm.metrics, MEASURE_SECONDS))
        asked = self._measuring
        try:
            self._measured = await asyncio.shield(asked)
        except LlmxError:
            log.debug("The engine did not answer.")
        finally:
            if asked.done() and self._measuring is asked:
                self._measuring = None
        return self._measured

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
