"""A server that speaks OpenAI's API, to be measured: what it understands, how to ask it, and what /metrics says."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from llmx.bench import clock
from llmx.bench.datasets import WORDS
from llmx.bench.http import Exchange, Pool
from llmx.bench.records import Record
from llmx.bench.recount import Recount
from llmx.bench.sse import IDS, RETOKENIZED, USAGE, USAGE_SO_FAR, Reader, events, refusal
from llmx.bench.stats import share
from llmx.bench.workload import Job
from llmx.errors import LlmxError, UsageError

SPECULATION = ("drafts", "draft_tokens", "accepted_tokens")
COUNTERS = (  # of /metrics, without the engine's name
    *("num_preemptions_total", "engine_step_seconds_total"),
    *(f"spec_decode_num_{name}_total" for name in SPECULATION),
)
SAMPLE = re.compile(r"(?:llmx|vllm)[:_](\w+?)(\{[^}]*\})?\s+(\S+)(?:\s+\d+)?")
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
POOL_WORDS = 3000  # random text that is tokenized for ids to draw prompts from
RESIDENT = re.compile(r"^process_resident_memory_bytes\s+(\S+)", re.MULTILINE)


Find = Callable[[str], Recount | None]


@dataclass(frozen=True)
class Dialect:
    """Which fields beyond OpenAI's a server takes, and how its tokens are counted."""

    salt: bool = True
    ignore_eos: bool = True
    stream_options: tuple[str, ...] = ("include_usage", "continuous_usage_stats")
    token_ids: bool = True
    source: str = USAGE


RICHEST = Dialect()
DIALECTS = (  # tried in order until the server refuses none of the fields
    RICHEST,
    replace(RICHEST, stream_options=("include_usage",), token_ids=False, salt=False),
    Dialect(salt=False, ignore_eos=False, stream_options=("include_usage",), token_ids=False),
    Dialect(salt=False, ignore_eos=False, stream_options=(), token_ids=False),
)


@dataclass(frozen=True)
class Server:
    """Plain values, so that client processes can be told of it."""

    root: str  # without /v1
    prefix: str  # "/v1"
    model: str
    key: str | None
    chat: bool
    silence: float
    dialect: Dialect = RICHEST

    @property
    def path(self) -> str:
        return self.prefix + ("/chat/completions" if self.chat else "/completions")

    def pool(self) -> Pool:
        return Pool(self.root, {"Authorization": f"Bearer {self.key}"} if self.key else {}, self.silence)

    def body(self, job: Job) -> dict[str, Any]:
        """What is asked for a job. A chat's prompt is a text or messages."""
        dialect = self.dialect
        found: dict[str, Any] = {"model": self.model, "stream": True, "temperature": 0, "max_tokens": job.output_len}
        if self.chat:
            text = isinstance(job.prompt, str)
            found["messages"] = [{"role": "user", "content": job.prompt}] if text else list(job.prompt)
        else:
            found["prompt"] = job.prompt if isinstance(job.prompt, str) else list(job.prompt)
        if dialect.stream_options:
            found["stream_options"] = dict.fromkeys(dialect.stream_options, True)
        if dialect.token_ids:
            found["return_token_ids"] = True
        if dialect.ignore_eos and job.exact:
            found["ignore_eos"] = True
        if dialect.salt and job.salt:
            found["cache_salt"] = job.salt
        return found

    def request(self, pool: Pool, job: Job) -> bytes:
        return pool.encode("POST", self.path, json.dumps(self.body(job)).encode())


async def send(pool: Pool, request: bytes, record: Record, exchange: Exchange) -> None:
    """One request of the measured run; nothing is parsed here."""
    record.strict = False
    await pool.ask(request, exchange)
    record.sent = exchange.sent or record.sent


class Setup:
    """What is asked of the server around the measurement, one plain request at a time."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """(status, body). LlmxError where the server can't be reached."""
        exchange, pool = Exchange(), self.server.pool()

        async def ask() -> None:
            try:
                await pool.ask(pool.encode(method, path, None if body is None else json.dumps(body).encode()), exchange)
            finally:
                pool.close()

        clock.run(ask)
        if exchange.error is not None:
            raise LlmxError(f"{exchange.error}.", "Is the server running there?")
        return exchange.status, exchange.body

    def json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """LlmxError for anything but a JSON object with status 200."""
        status, raw = self.call(method, path, body)
        try:
            found = json.loads(raw) if status == 200 else None
        except ValueError:
            found = None
        if not isinstance(found, dict):
            hint = "Put the key into LLMX_API_KEY." if status in (401, 403) else None
            raise LlmxError(f"{self.server.root}{path} answered {refusal(status, raw)}.", hint)
        return found

    def first_model(self) -> str:
        models = [one.get("id") for one in self.json("GET", self.server.prefix + "/models").get("data") or ()]
        if not models:
            raise LlmxError(f"{self.server.root} lists no models.", "Name one: llmx bench MODEL --url URL.")
        return str(models[0])

    def dialect(self, recounts: bool) -> Dialect:
        """By a short request. LlmxError where it refuses, or tells no number of tokens and nobody `recounts` them."""
        refused = "no answer"
        for dialect in DIALECTS:
            server = replace(self.server, dialect=dialect)
            prompt: Any = ({"role": "user", "content": "Hello"},) if server.chat else "Hello"
            job = Job(prompt, 8, True, "llmx-bench-probe")
            status, raw = self.call("POST", server.path, server.body(job))
            if status == 200:
                return self._counted(dialect, raw, recounts)
            refused = refusal(status, raw)
            if status not in (400, 422):
                break
        hint = "Put the key into LLMX_API_KEY." if refused.startswith(("401", "403")) else None
        raise LlmxError(f"{self.server.root}{self.server.path} answered {refused}.", hint)

    def _counted(self, dialect: Dialect, raw: bytes, recounts: bool) -> Dialect:
        reader, where = Reader(), f"{self.server.root}{self.server.path}"
        for when, data in events([(0.0, raw)]):
            reader.read(when, data)
        source = reader.source or (RETOKENIZED if recounts and reader.chunks else None)
        if reader.error:
            raise LlmxError(f"{where}: {reader.error}.")
        if source is None:
            raise LlmxError(
                f"{where}: it tells neither token ids nor usage, so its tokens can't be counted.",
                "Name its model's tokenizer: --tokenizer MODEL.",
            )
        options = tuple(o for o in dialect.stream_options if o == "include_usage" or source == USAGE_SO_FAR)
        return replace(dialect, source=source, token_ids=source == IDS, stream_options=options)

    def random_ids(self, seed: int) -> list[int]:
        """Ids that random prompts are made of: what the server makes of random words. Empty if it won't tokenize."""
        words = " ".join(random.Random(f"words/{seed}").choices(WORDS, k=POOL_WORDS))
        body = {"model": self.server.model, "prompt": words, "content": words, "add_special_tokens": False}
        for path in ("/tokenize", self.server.prefix + "/tokenize"):
            status, raw = self.call("POST", path, body)
            try:
                tokens = json.loads(raw).get("tokens") if status == 200 else None
            except (ValueError, AttributeError):
                tokens = None
            if isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens):
                return sorted(set(tokens))
        return []

    def text(self, ids: tuple[int, ...]) -> str | None:
        """Their text; None if the server won't tell."""
        for path in ("/detokenize", self.server.prefix + "/detokenize"):
            status, raw = self.call("POST", path, {"model": self.server.model, "tokens": list(ids)})
            try:
                found = json.loads(raw) if status == 200 else {}
            except ValueError:
                found = {}
            if isinstance(text := found.get("prompt", found.get("content", found.get("text"))), str):
                return text
        return None

    def metrics(self) -> Mapping[str, float] | None:
        """The samples of /metrics by their names without the engine's, summed over labels; None if there are none."""
        status, raw = self.call("GET", "/metrics")
        return parse_metrics(raw.decode(errors="replace")) if status == 200 else None


def parse_metrics(text: str) -> dict[str, float] | None:
    """Prometheus' text format. None where it holds nothing of vLLM's or ours."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if match := SAMPLE.fullmatch(line.strip()):
            found[match[1]] = found.get(match[1], 0.0) + float(match[3])
            if match[1] == PER_POSITION and (position := re.search(r'position="(\d+)"', match[2] or "")):
                found[f"{PER_POSITION}/{position[1]}"] = float(match[3])
    if found and (resident := RESIDENT.search(text)):
        found["process_resident_memory_bytes"] = float(resident[1])
    return found or None


def connect(
    url: str, model: str | None, chat: bool, key: str | None, silence: float, find: Find = lambda model: None
) -> tuple[Server, Recount | None]:
    """Find out what is at `url`; what `find` makes of its model's name counts tokens where the server doesn't.
    LlmxError where it can't be reached or says no."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    path = parts.path.rstrip("/")
    prefix = path if path else "/v1"
    server = Server(f"{parts.scheme}://{parts.netloc}", prefix, model or "", key, chat, silence)
    server.pool()  # refuses a wrong address before anything is sent
    if model is None:
        server = replace(server, model=Setup(server).first_model())
    recount = find(server.model)
    return replace(server, dialect=Setup(server).dialect(recount is not None)), recount


def prepare(job: Job, server: Server, setup: Setup) -> Job:
    """The job as the endpoint takes it: no ids in a chat, no conversation in a completion. UsageError."""
    prompt = job.prompt
    if server.chat and job.input_len:
        assert isinstance(prompt, tuple)
        text = setup.text(prompt)  # type: ignore[arg-type]
        if text is None:
            raise UsageError("Random prompts in chats need a server with /detokenize.", "Use --endpoint completions.")
        return replace(job, prompt=text)
    if not server.chat and isinstance(prompt, tuple) and not job.input_len:
        if len(prompt) > 1:
            raise UsageError("The dataset holds conversations.", "Use --endpoint chat.")
        return replace(job, prompt=str(prompt[0]["content"]))  # type: ignore[index]
    return job


def delta_figures(
    before: Mapping[str, float] | None, after: Mapping[str, float] | None, duration: float
) -> dict[str, object]:
    """What the server's counters say about the time between two readings, under vLLM's names."""
    if before is None or after is None:
        return {}

    def grown(name: str) -> float | None:
        return after[name] - before.get(name, 0.0) if name in after else None

    figures: dict[str, object] = {}
    if (preemptions := grown("num_preemptions_total")) is not None:
        figures["preemptions"] = int(preemptions)
    if (busy := grown("engine_step_seconds_total")) is not None:
        figures["busy_share"] = share(busy, duration)
    drafts, drafted, accepted = (grown(f"spec_decode_num_{name}_total") for name in SPECULATION)
    if drafted and accepted is not None:
        figures |= {"spec_decode_draft_tokens": int(drafted), "spec_decode_accepted_tokens": int(accepted)}
        figures["spec_decode_acceptance_rate"] = 100 * accepted / drafted
    if drafts and accepted is not None:
        figures |= {"spec_decode_num_drafts": int(drafts), "spec_decode_acceptance_length": 1 + accepted / drafts}
        places = sorted(
            (name for name in after if name.startswith(f"{PER_POSITION}/")), key=lambda x: int(x.split("/")[1])
        )
        if places:
            figures["spec_decode_per_position_acceptance_rates"] = [(grown(name) or 0.0) / drafts for name in places]
    return figures
