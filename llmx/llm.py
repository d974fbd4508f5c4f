"""`LLM`: an engine core and a tokenizer, for people who script; and the streams that the server is built on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import secrets
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from llmx.config import EngineConfig, EngineInfo, Metrics
from llmx.core import Completion, Delta, Logprob, Output, Request, SamplingParams
from llmx.detokenizer import Detokenizer
from llmx.device import yield_while_waiting
from llmx.engine.launch import Client, InProcess, Spawned
from llmx.engine.messages import Abort, Add, Ask, Failed, Measured, Message, Refused, Tokens
from llmx.errors import LlmxError, RequestError, UsageError
from llmx.formats.gguf import forget_metadata
from llmx.formats.hub import DEMO, Located, pull
from llmx.grammar import validate
from llmx.tokenizer import Tokenizer, load_tokenizer
from llmx.tokenizer.chosen import choose_template

Prompt = str | Sequence[int]
POLL_SECONDS = 0.2


Asleep = dict[asyncio.AbstractEventLoop, list[Callable[[], None]]]


def wake(asleep: Asleep) -> None:
    """From another thread. A loop is interrupted once for all that a step said: each time costs it a system call."""
    for loop, readers in asleep.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            loop.call_soon_threadsafe(_call, readers)


def _call(readers: list[Callable[[], None]]) -> None:
    for reader in readers:
        reader()


class Mailbox:
    """Messages from the pump's thread to whoever reads: a thread, a coroutine, or a callback on its event loop."""

    def __init__(self) -> None:
        self._items: deque[tuple[Stream, Message]] = deque()
        self._ready = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event: asyncio.Event | None = None
        self._reader: Callable[[], None] | None = None

    def put(self, stream: Stream, message: Message, asleep: Asleep) -> None:
        """asleep: takes what is to be called on an event loop because of this, for `wake`."""
        with self._ready:
            self._items.append((stream, message))
            self._ready.notify()
            if self._loop is not None and self._reader is not None:
                asleep.setdefault(self._loop, []).append(self._reader)

    def follow(self, reader: Callable[[], None]) -> None:
        """From an event loop: `reader` is called on it when something has come, and now."""
        with self._ready:
            self._loop, self._reader = asyncio.get_running_loop(), reader
        reader()

    def empty(self) -> list[tuple[Stream, Message]]:
        """All that is there."""
        with self._ready:
            items = list(self._items)
            self._items.clear()
        return items

    def get(self) -> tuple[Stream, Message]:
        with self._ready:
            while not self._items:
                self._ready.wait()
            return self._items.popleft()

    async def get_async(self) -> tuple[Stream, Message]:
        while True:
            with self._ready:
                if self._items:
                    return self._items.popleft()
                if self._event is None:
                    self._loop, self._event = asyncio.get_running_loop(), asyncio.Event()
                    self._reader = self._event.set
                self._event.clear()
            await self._event.wait()


class Choice:
    """One of a stream's `n` texts, on its way."""

    def __init__(self, detokenizer: Detokenizer | None) -> None:
        self.detokenizer = detokenizer
        self.tokens: list[int] = []
        self.logprobs: list[Logprob] = []
        self.shown = 0  # tokens that a delta has told of
        self.text: list[str] = []
        self.finish: str | None = None
        self.stop_reason: int | str | None = None


class Stream:
    """The deltas of one request: iterate plainly or with `async for`, or `follow` it; it ends after every choice has
    finished.

    `cached_tokens`, `started` (when it left the queue, by time.monotonic()) and `prompt_logprobs` are known from the
    first delta on. LlmxError if the engine fails on the way.
    Leaving early is the caller's to say: `abort()`, `aclose()`, or use it as a context manager.
    """

    def __init__(self, llm: LLM, request: Request, prompt: str | None, mailbox: Mailbox) -> None:
        self.id, self.prompt, self.prompt_token_ids = request.id, prompt, request.prompt
        self.params = request.params
        self.cached_tokens = 0
        self.started = 0.0
        self._llm, self._mailbox = llm, mailbox
        self._scores: dict[int, Logprob] = {}
        tokenizer = llm.maybe_tokenizer
        self._choices = [
            Choice(None if tokenizer is None else Detokenizer(tokenizer, request.prompt, request.params))
            for _ in range(request.params.n)
        ]
        self._deltas: deque[Delta] = deque()
        self._followed = False  # to its end

    @property
    def done(self) -> bool:
        return all(choice.finish for choice in self._choices)

    @property
    def prompt_logprobs(self) -> tuple[Logprob | None, ...] | None:
        """By position, None for the first token; None if they weren't asked for."""
        if self.params.prompt_logprobs is None:
            return None
        return tuple(self._scores.get(i) for i in range(len(self.prompt_token_ids)))

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while not self._deltas:
            if self.done:
                raise StopIteration
            self.take(self._mailbox.get()[1])
        return self._deltas.popleft()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self.done:
                raise StopAsyncIteration
            self.take((await self._mailbox.get_async())[1])
        return self._deltas.popleft()

    def follow(self, hear: Callable[[Delta | Exception | None], None]) -> None:
        """Instead of iterating, from an event loop: `hear` gets each delta as it comes, then None, or what failed.

        For who serves many streams: a task that waits for each costs more than what it has to say.
        """
        self._mailbox.follow(partial(self._pass_on, hear))

    def _pass_on(self, hear: Callable[[Delta | Exception | None], None]) -> None:
        for _, message in self._mailbox.empty():
            if self._followed:
                return
            try:
                self.take(message)
                while self._deltas:
                    hear(self._deltas.popleft())
                self._followed = self.done
            except Exception as error:
                self._followed = True
                hear(error)
            else:
                if self._followed:
                    hear(None)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    async def aclose(self) -> None:
        self.abort()

    def abort(self) -> None:
        """End what has not ended; nothing more comes of it."""
        if not self.done:
            self._llm.send(Abort(self.id))
            for choice in self._choices:
                choice.finish = choice.finish or "abort"
            asleep = Asleep()
            self._mailbox.put(self, Abort(self.id), asleep)
            wake(asleep)  # whoever waits for more
        self._llm.forget(self)

    def output(self) -> Output:
        """All that came, as one value."""
        completions = tuple(
            Completion(
                i,
                "".join(c.text),
                tuple(c.tokens),
                c.finish or "abort",
                c.stop_reason,
                tuple(c.logprobs) if self.params.logprobs is not None else None,
            )
            for i, c in enumerate(self._choices)
        )
        return Output(
            self.id, self.prompt, self.prompt_token_ids, completions, self.prompt_logprobs, self.cached_tokens
        )

    def take(self, message: Message) -> None:
        """One message of the core about this request."""
        match message:
            case Tokens():
                self._scores.update(message.prompt_logprobs)
                self.cached_tokens, self.started = message.cached, message.started
                if self._choices[message.choice].finish is None:
                    self._grow(message)
            case Refused(_, text, param, code, status):
                self._give_up()
                raise RequestError(text, param=param, code=code, status=status)
            case Failed(text, hint, _):
                self._give_up()
                raise LlmxError(text, hint)

    def _give_up(self) -> None:
        for choice in self._choices:
            choice.finish = choice.finish or "abort"
        self._llm.forget(self)

    def _grow(self, message: Tokens) -> None:
        """Tokens become text up to a stop string; what lies behind it was never said."""
        choice = self._choices[message.choice]
        text, used = "", 0
        for token in message.tokens:
            used += 1
            if choice.detokenizer is not None:
                text += choice.detokenizer.push(token)
                if choice.detokenizer.stopped is not None:
                    break
        choice.tokens += message.tokens[:used]
        choice.logprobs += (message.logprobs or ())[:used]
        stopped = choice.detokenizer.stopped if choice.detokenizer is not None else None
        if stopped is not None:
            choice.finish, choice.stop_reason = "stop", stopped
            if message.finish is None:
                self._llm.send(Abort(self.id, message.choice))
        elif message.finish is not None:
            if choice.detokenizer is not None:
                text += choice.detokenizer.finish()
                if choice.detokenizer.stopped is not None:  # the last character completed a stop string
                    stopped = choice.detokenizer.stopped
            choice.finish = "stop" if stopped is not None else message.finish
            choice.stop_reason = stopped if stopped is not None else message.stopped_by
        self._say(message.choice, choice, text)

    def _say(self, index: int, choice: Choice, text: str) -> None:
        complete = len(choice.tokens)
        if choice.finish is None and choice.detokenizer is not None:
            complete = choice.detokenizer.completed
        choice.text.append(text)
        if text or choice.finish is not None or complete > choice.shown:
            span = slice(choice.shown, complete)
            choice.shown = complete
            scored = tuple(choice.logprobs[span]) if self.params.logprobs is not None else None
            tokens = tuple(choice.tokens[span])
            self._deltas.append(Delta(index, text, tokens, choice.finish, choice.stop_reason, scored))
        if self.done:
            self._llm.forget(self)


class LLM:
    """A loaded model.

        with LLM("demo") as llm:
            for output in llm.generate(["The sea is"], SamplingParams(max_tokens=20)):
                print(output.outputs[0].text)

    model: a Hugging Face directory, a `.gguf` file, or "demo" (fetched if need be). Other keywords are EngineConfig's.
    spawn: the engine core runs in a process of its own (what `llmx serve` does). progress(done, total) is called with
    bytes while a model is fetched and loaded. chat_template: a file of Jinja2, or the name of one of the model's own
    templates; default: the model's "default". UsageError if the model or the configuration can't be used.
    """

    def __init__(
        self,
        model: str = DEMO,
        *,
        config: EngineConfig | None = None,
        spawn: bool = False,
        progress: Callable[[int, int], None] | None = None,
        chat_template: str | None = None,
        **engine: Any,
    ) -> None:
        self.config = config or EngineConfig(model=model, **engine)
        self.maybe_tokenizer: Tokenizer | None = None
        located = None if self.config.model.startswith("random:") else pull(self.config.model, progress)

        def read_tokenizer() -> None:
            if located is not None:
                self.maybe_tokenizer = _tokenizer(located)
                if chat_template is not None:
                    self.maybe_tokenizer.template = choose_template(self.maybe_tokenizer, chat_template)

        self._client = _client(self.config, spawn, progress, read_tokenizer)
        forget_metadata()
        self.info: EngineInfo = self._client.info
        self.failed: str | None = None
        self._streams: dict[str, Stream] = {}
        self._measured: dict[int, tuple[threading.Event, list[Metrics]]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._pump = threading.Thread(target=self._run, name="llmx-engine", daemon=True)
        self._pump.start()

    @property
    def tokenizer(self) -> Tokenizer:
        if self.maybe_tokenizer is None:
            raise UsageError(f"{self.config.model} has random weights and no tokenizer.", "give prompts as token ids")
        return self.maybe_tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[Output]:
        """Continue one prompt or many (text or token ids), with one SamplingParams or one for each.

        Outputs are in the order of the prompts. on_progress(requests done, requests) is called when one finishes.
        RequestError if any of them can't run: then none is started.
        """
        many = _as_list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise RequestError(f"{len(each)} SamplingParams for {len(many)} prompts; give one, or one for each.")
        mailbox = Mailbox()
        prepared = [self._prepare(p, s, None, b"") for p, s in zip(many, each, strict=True)]
        streams = [self._start(request, text, mailbox) for request, text in prepared]
        try:
            left = len(streams)
            while left:
                stream, message = mailbox.get()
                was = stream.done
                stream.take(message)
                if stream.done and not was:
                    left -= 1
                    if on_progress:
                        on_progress(len(streams) - left, len(streams))
        finally:
            for stream in streams:
                stream.abort()
        return [stream.output() for stream in streams]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | None = None,
        **template: Any,
    ) -> list[Output]:
        """Answer one conversation (a list of {"role", "content"}) or many. `template`: arguments of `render`."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        return self.generate([self.render(c, **template) for c in conversations], params)

    def render(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]:
        """The prompt's token ids, by the model's chat template. `template`: add_generation_prompt (True),
        continue_final_message (False), tools, and whatever else the template knows."""
        chat = self.tokenizer.template
        if chat is None:
            raise UsageError("This model has no chat template.", hint="send a plain prompt instead of messages")
        options: dict[str, Any] = {
            "add_generation_prompt": not template.get("continue_final_message", False)
        } | template
        return self.tokenizer.encode(chat.render(messages, **options))

    def open(self, prompt: Prompt, params: SamplingParams, *, id: str | None = None, salt: bytes = b"") -> Stream:
        """Start one request. RequestError, before anything runs, if it can't be run as asked."""
        request, text = self._prepare(prompt, params, id, salt)
        return self._start(request, text, Mailbox())

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """`open`, for scripts: `async for delta in llm.stream("Once")` or a plain `for`."""
        return self.open(prompt, params or SamplingParams())

    def metrics(self, timeout: float = math.inf) -> Metrics:
        """The core's counters now; it answers between steps. LlmxError if it has failed or takes over `timeout` s."""
        number, answered, found = next(self._numbers), threading.Event(), list[Metrics]()
        self._measured[number] = (answered, found)
        deadline = time.monotonic() + timeout
        try:
            self.send(Ask(number))
            while not answered.wait(POLL_SECONDS):
                if not self.alive():
                    raise LlmxError(self.failed or "The engine has been closed.")
                if time.monotonic() > deadline:
                    raise LlmxError(f"The engine has not answered for {timeout:g} s.")
        finally:
            del self._measured[number]
        return found[0]

    def alive(self) -> bool:
        return self.failed is None and not self._closing.is_set()

    def send(self, message: Message) -> None:
        self._client.send(message)

    def forget(self, stream: Stream) -> None:
        with self._lock:
            self._streams.pop(stream.id, None)

    def close(self) -> None:
        """End the engine. What still runs ends with an error."""
        if not self._closing.is_set():
            self._closing.set()
            self._fail(Failed("The engine was closed."))
            if threading.current_thread() is not self._pump:
                self._pump.join(5.0)
            self._client.close()

    def kill(self) -> None:
        """Let the engine's process, if it has one, end this moment; for whoever is about to end the same way."""
        self._client.kill()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(
        self, prompt: Prompt, params: SamplingParams, id: str | None, salt: bytes
    ) -> tuple[Request, str | None]:
        text = prompt if isinstance(prompt, str) else None
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        vocab, context = self.info.vocab_size, self.info.max_model_len
        if not tokens:
            raise RequestError("The prompt is empty; at least one token is needed.", param="prompt")
        if bad := [t for t in tokens if not 0 <= t < vocab]:
            raise RequestError(f"Token id {bad[0]} is outside the vocabulary of {vocab}.", param="prompt")
        if len(tokens) >= context:
            raise RequestError(
                f"The prompt has {len(tokens)} tokens; the context of {context} must hold it and at least one more.",
                param="prompt",
                code="context_length_exceeded",
            )
        room = context - len(tokens)
        if params.max_tokens is not None and params.max_tokens > room:
            raise RequestError(
                f"{len(tokens)} prompt tokens and max_tokens {params.max_tokens} are {len(tokens) + params.max_tokens} "
                f"tokens, more than the context of {context}.",
                param="max_tokens",
                code="context_length_exceeded",
                hint=f"max_tokens can be at most {room} here",
            )
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", [t for t, _ in params.logit_bias])):
            if outside := [t for t in ids if not 0 <= t < vocab]:
                raise RequestError(f"{name}: token id {outside[0]} is outside the vocabulary of {vocab}.", param=name)
        if params.grammar is not None:
            validate(params.grammar)
        if params.n > self.info.max_num_seqs:
            raise RequestError(f"n={params.n} is more than the {self.info.max_num_seqs} sequences at once.", param="n")
        settled = replace(
            params,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
        )
        eos = frozenset() if self.maybe_tokenizer is None else self.maybe_tokenizer.eos_ids
        return Request(id or uuid.uuid4().hex, tuple(tokens), settled, frozenset(eos), salt), text

    def _start(self, request: Request, text: str | None, mailbox: Mailbox) -> Stream:
        stream = Stream(self, request, text, mailbox)
        with self._lock:
            if not self.alive():
                raise LlmxError(self.failed or "The engine has been closed.")
            if request.id in self._streams:
                raise RequestError(f"A request with the id {request.id!r} is running already.", param="id")
            self._streams[request.id] = stream
        self.send(Add(request))
        return stream

    def _run(self) -> None:
        """The pump: lets the core step and hands what it says to the streams."""
        try:
            while not self._closing.is_set() and self.failed is None:
                asleep = Asleep()
                for message in self._client.receive(POLL_SECONDS):
                    self._dispatch(message, asleep)
                wake(asleep)
        except LlmxError as error:
            self._fail(Failed(error.message, error.hint))
        except Exception as error:
            self._fail(Failed(f"The engine failed: {type(error).__name__}: {error}", "this is a bug; please report it"))
            raise

    def _dispatch(self, message: Message, asleep: Asleep) -> None:
        match message:
            case Tokens() | Refused():
                with self._lock:
                    stream = self._streams.get(message.id)
                if stream is not None:
                    stream._mailbox.put(stream, message, asleep)
            case Measured(token, metrics):
                if token in self._measured:
                    answered, found = self._measured[token]
                    found.append(metrics)
                    answered.set()
            case Failed():
                self._fail(message)

    def _fail(self, message: Failed) -> None:
        with self._lock:
            self.failed = self.failed or message.message
            streams = list(self._streams.values())
        asleep = Asleep()
        for stream in streams:
            stream._mailbox.put(stream, message, asleep)
        wake(asleep)


def _client(
    config: EngineConfig, spawn: bool, progress: Callable[[int, int], None] | None, meanwhile: Callable[[], None]
) -> Client:
    yield_while_waiting()
    if spawn:
        return Spawned(config, progress, meanwhile)
    meanwhile()  # first, for its errors come soon
    from llmx.engine.service import Core  # torch, which a front with a spawned core does without

    return InProcess(Core.load(config, progress))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    many = list(prompts)
    if many and all(isinstance(item, int) for item in many):
        return [many]  # type: ignore[list-item]
    return many  # type: ignore[return-value]


def _tokenizer(located: Located) -> Tokenizer:
    if located.kind == "gguf":
        from llmx.formats.gguf import open_gguf

        return load_tokenizer(located, open_gguf(located.path).metadata)
    return load_tokenizer(located)
