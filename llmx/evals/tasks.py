"""Tasks of EleutherAI's lm-evaluation-harness, asked of `llmx serve` in a process of its own, as any client would."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import json
import os
import re
import secrets
import subprocess
import sys
import threading
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmx.config import EngineConfig
from llmx.errors import LlmxError, UsageError
from llmx.formats.hub import locate

CONCURRENT = 16  # requests in flight
SERVED = "llmx"
_LISTENS = re.compile(r"llmx serves .* at (http://\S+)/v1")


@dataclass(frozen=True)
class Wanted:
    """Which tasks. path: a folder with more of them. limit: most examples of each. chat: through the chat API."""

    names: tuple[str, ...]
    path: Path | None = None
    limit: int | None = None
    chat: bool = False

    @classmethod
    def parse(cls, names: str, path: Path | None, limit: int | None, chat: bool) -> Wanted:
        """UsageError before anything is loaded: no names, no lm-eval."""
        every = tuple(name.strip() for name in names.split(",") if name.strip())
        if not every:
            raise UsageError("--tasks names no task.", hint="such as --tasks arc_easy,hellaswag")
        if path is not None and not path.is_dir():
            raise UsageError(f"--tasks-path {path} is no folder.")
        if importlib.util.find_spec("lm_eval") is None:
            raise UsageError("--tasks needs lm-eval, which is not installed.", hint="Run: pip install 'llmx[eval]'")
        return cls(every, path, limit, chat)


def run_tasks(config: EngineConfig, wanted: Wanted, say: Callable[[str], None]) -> tuple[dict[str, Any], bool]:
    """Each task's metrics, {"mean", "se"} by name; and whether it was interrupted. LlmxError where lm-eval fails."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if wanted.path is None else str(wanted.path))
    if unknown := [name for name in wanted.names if not manager.match_tasks([name])]:
        near = difflib.get_close_matches(unknown[0], manager.all_tasks, 5)
        raise UsageError(
            f"lm-eval has no task {unknown[0]}.", hint=f"close: {', '.join(near)}" if near else "see: lm-eval ls tasks"
        )
    try:
        with _served(config, say) as (url, key):
            client = _client(url, key, config, wanted.chat)
            say(f"lm-eval: {', '.join(wanted.names)}")
            with contextlib.redirect_stdout(sys.stderr):
                found = simple_evaluate(
                    client,
                    tasks=list(wanted.names),
                    limit=wanted.limit,
                    task_manager=manager,
                    apply_chat_template=wanted.chat,
                    log_samples=False,
                )
    except KeyboardInterrupt:
        return {}, True
    except LlmxError:
        raise
    except Exception as error:
        raise LlmxError(f"lm-eval failed: {type(error).__name__}: {error}") from error
    return metrics(found or {}), False


def metrics(found: Mapping[str, Any]) -> dict[str, Any]:
    """lm-eval's `results` in our shape: `acc,none` and `acc_stderr,none` are acc: {mean, se}; another filter than none
    is part of the name."""
    tasks: dict[str, Any] = {}
    for task, values in found.get("results", {}).items():
        mine: dict[str, Any] = {}
        for name, value in values.items():
            metric, comma, kind = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{kind}")
            label = metric if kind == "none" else f"{metric}_{kind}"
            mine[label] = {"mean": float(value), "se": float(error) if isinstance(error, int | float) else None}
        samples = found.get("n-samples", {}).get(task, {}).get("effective")
        tasks[task] = mine | {"samples": samples, "few_shot": found.get("n-shot", {}).get(task)}
    return tasks


@contextmanager
def _served(config: EngineConfig, say: Callable[[str], None]) -> Iterator[tuple[str, str]]:
    """`llmx serve` on a free loopback port; its URL and the key that only we know. LlmxError where it doesn't start."""
    key = secrets.token_urlsafe(16)
    command = [sys.executable, "-m", "llmx.cli", "serve", config.model, "--host", "127.0.0.1", "--port", "0"]
    command += ["--served-model-name", SERVED, "--generation-config", "none", "--max-num-queued-reqs", "1000000"]
    command += _flags(config)
    kept = {k: v for k, v in os.environ.items() if not re.match(r"LLMX_(SERVE_|API_KEY|CONFIG|ALLOWED)", k)}
    process = subprocess.Popen(
        command, env=kept | {"LLMX_API_KEY": key}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    said: deque[str] = deque(maxlen=20)
    assert process.stderr is not None
    try:
        say(f"starting llmx serve {config.model}")
        url = None
        for line in process.stderr:
            said.append(line.rstrip())
            if listens := _LISTENS.search(line):
                url = listens[1]
                break
        if url is None:
            raise LlmxError(f"llmx serve {config.model} did not start: {' '.join(said)}")
        reader = threading.Thread(target=said.extend, args=(process.stderr,))  # or the server would block
        reader.start()
        try:
            yield url, key
        finally:
            _end(process)
            reader.join()
    finally:
        _end(process)
        process.stderr.close()


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _flags(config: EngineConfig) -> list[str]:
    """The engine's settings as `llmx serve` takes them; what is None is its default too."""
    named = {
        "--dtype": config.dtype,
        "--device": config.device,
        "--kv-cache-dtype": config.kv_cache_dtype,
        "--activations": config.activations,
        "--max-num-seqs": config.max_num_seqs,
        "--max-num-batched-tokens": config.max_num_batched_tokens,
        "--memory-utilization": config.memory_utilization,
        "--block-size": config.block_size,
        "--threads": config.threads,
        "--tp": config.tensor_parallel_size,
    }
    return [part for flag, value in named.items() if value is not None for part in (flag, str(value))]


def _length(url: str, key: str) -> int:
    """The context that the server gives."""
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        length: int = json.load(answer)["data"][0]["max_model_len"]
    return length


def _client(url: str, key: str, config: EngineConfig, chat: bool) -> Any:
    """lm-eval's own client of this API; for completions with the model's own tokenizer, whatever file that is in."""
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    from llmx.tokenizer import load_tokenizer

    shared = {
        "model": SERVED,
        "num_concurrent": CONCURRENT,
        "max_retries": 1,
        "timeout": 24 * 3600,
        "max_length": _length(url, key),
        "header": {"Authorization": f"Bearer {key}"},
    }
    if chat:
        return LocalChatCompletion(base_url=f"{url}/v1/chat/completions", **shared)
    tokenizer = load_tokenizer(locate(config.model))
    end = min(tokenizer.eos_ids, default=None)

    class Client(LocalCompletionsAPI):  # type: ignore[misc]
        """local-completions. BOS begins every prompt of a model that adds one; lm-eval's own default leaves it out."""

        rolling = False

        def tok_encode(self, string: Any, left_truncate_len: int | None = None, **more: Any) -> Any:
            if not isinstance(string, str):
                return [self.tok_encode(one, left_truncate_len, **more) for one in string]
            special = more.get("add_special_tokens") is not False and not self.rolling
            tokens = tokenizer.encode(string, add_special=special)
            return tokens[-left_truncate_len:] if left_truncate_len else tokens

        def decode_batch(self, tokens: list[list[int]]) -> list[str]:
            return [tokenizer.decode(ids, skip_special=False) for ids in tokens]

        def loglikelihood_rolling(self, requests: Any, **more: Any) -> Any:
            self.rolling = True  # lm-eval puts `prefix_token_id` in front itself
            try:
                return super().loglikelihood_rolling(requests, **more)
            finally:
                self.rolling = False

        @property
        def eot_token_id(self) -> int | None:
            return end

        @property
        def prefix_token_id(self) -> int | None:
            return tokenizer.bos_id if tokenizer.bos_id is not None else end

        @property
        def eos_string(self) -> str | None:
            return None if end is None else tokenizer.decode([end], skip_special=False)

    client = Client(base_url=f"{url}/v1/completions", tokenizer_backend=None, add_bos_token=None, **shared)
    client.tokenizer, client.tokenized_requests = tokenizer, True
    return client
