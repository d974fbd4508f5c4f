"""Windows through the engine, several a step, their logits taken in bounded pieces and never sampled from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmx.config import EngineConfig, EngineInfo
from llmx.core import Request, SamplingParams
from llmx.core import Sequence as Text
from llmx.engine.messages import Add, Refused, Tokens
from llmx.engine.service import Core
from llmx.errors import LlmxError, UsageError
from llmx.evals import measures
from llmx.evals.logits_file import LogitsFile, LogitsWriter
from llmx.evals.protocol import Protocol

STEP_TOKENS = 2048  # of one step, unless the window is longer or the user says otherwise
TOGETHER = 8  # least texts that are written at once
TELL_SECONDS = 10.0
KINDS = ("ln_p", "ln_p_base", "kld", "p_diff", "same_top")

Windows = Sequence[tuple[int, ...]]
Say = Callable[[str], None]


def scoring_config(config: EngineConfig, ctx: int) -> EngineConfig:
    """The engine for windows of `ctx`: nothing cached between them, and just enough room."""
    tokens = config.max_num_batched_tokens or max(STEP_TOKENS, ctx)
    return replace(
        config,
        max_model_len=ctx,
        max_num_batched_tokens=tokens,
        max_num_seqs=config.max_num_seqs or min(tokens, max(TOGETHER, -(-tokens // ctx) + 1)),
        prefix_caching=False,
    )


class Scores:
    """What is known of each scored position: (windows, positions) f64 by kind."""

    def __init__(self, windows: int, positions: int, kinds: Sequence[str]) -> None:
        self.values = {kind: np.full((windows, positions), np.nan) for kind in kinds}
        self.known = np.zeros((windows, positions), bool)

    @property
    def done(self) -> Any:
        """(windows,) bool: those scored whole."""
        return self.known.all(1)

    def keep(self, window: int, rows: slice, found: Mapping[str, Any]) -> None:
        """Values of some positions. LlmxError where one is not a number: there nothing can be averaged."""
        for kind, values in found.items():
            self.values[kind][window, rows] = values
            if np.isnan(values).any():
                raise LlmxError(f"The model's logits in window {window + 1} are not numbers.", "try --dtype float32")
        self.known[window, rows] = True

    def whole(self) -> dict[str, Any]:
        """Each kind's values (n,) over the windows that are scored whole."""
        done = self.done
        return {kind: value[done].reshape(-1) for kind, value in self.values.items()}


class Scorer:
    """One model that scores windows, or writes texts of its own. Close it, or use it as a context manager."""

    def __init__(self, config: EngineConfig, protocol: Protocol) -> None:
        self.protocol = protocol
        self.core = Core.load(scoring_config(config, protocol.ctx))

    @property
    def info(self) -> EngineInfo:
        return self.core.info

    def score(
        self,
        windows: Windows,
        bos: int | None,
        *,
        base: LogitsFile | None = None,
        out: LogitsWriter | None = None,
        say: Say | None = None,
    ) -> tuple[Scores, bool]:
        """All windows; and whether it was interrupted (Ctrl-C): then some aren't scored.

        bos: what stands in place of each window's first token, if anything. base: the reference's logits to compare
        with. out: where the model's own are written. UsageError for tokens that the model doesn't have.
        """
        vocab = self.info.vocab_size
        if (highest := max(max(window) for window in windows)) >= vocab:
            raise UsageError(f"The text has the token {highest}; {self.info.model} has a vocabulary of {vocab}.")
        if base is not None and base.layout.vocab != vocab:
            raise UsageError(
                f"{self.info.model} has a vocabulary of {vocab}, the reference logits have {base.layout.vocab}.",
                hint="only models with the same tokens can be compared",
            )
        scores = Scores(len(windows), self.protocol.scored, KINDS if base is not None else KINDS[:1])
        taker = _Taker(self.protocol, windows, scores, base, out)
        self.core.engine.take = taker
        ticks = _Ticks(scores, say)
        params = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
        try:
            for i, window in enumerate(windows):
                prompt = self.protocol.prompt(window, bos)
                request = Request(str(i), prompt, params, score_from=self.protocol.first)
                for answer in self.core.handle(Add(request)):
                    if isinstance(answer, Refused):
                        raise LlmxError(answer.message)
            while self.core.busy:
                self.core.step()
                ticks.tell()
        except KeyboardInterrupt:
            return scores, True
        finally:
            self.core.engine.take = None
        return scores, False

    def write(self, start: int, eos: frozenset[int], total: int, seed: int, say: Say | None = None) -> list[int]:
        """At least `total` tokens of the model's own: texts behind `start`, drawn at temperature 1, end to end.

        Text i has the seed `seed + i`; it ends where the model ends it, or fills a window.
        """
        tokens: list[int] = []
        written, began, told = 0, time.monotonic(), time.monotonic()
        while len(tokens) < total:
            count = min(self.info.max_num_seqs, -(-(total - len(tokens)) // self.protocol.ctx))
            texts: list[list[int]] = [[start] for _ in range(count)]
            for i in range(count):
                params = SamplingParams(max_tokens=self.protocol.ctx - 1, seed=seed + written + i)
                self.core.handle(Add(Request(str(i), (start,), params, eos)))
            while self.core.busy:
                for message in self.core.step():
                    if isinstance(message, Tokens):
                        texts[int(message.id)] += message.tokens
                if say is not None and time.monotonic() - told > TELL_SECONDS:
                    told = time.monotonic()
                    done = min(total, len(tokens) + sum(map(len, texts)))
                    say(f"{done} of {total} tokens written, about {(told - began) * (total / done - 1):.0f} s left")
            tokens += [token for text in texts for token in text]
            written += count
        if say is not None:
            say(f"{total} tokens written in {time.monotonic() - began:.0f} s")
        return tokens[:total]

    def close(self) -> None:
        self.core.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Taker:
    """Gets the engine's pieces of logits and keeps what is measured of them."""

    def __init__(
        self,
        protocol: Protocol,
        windows: Windows,
        scores: Scores,
        base: LogitsFile | None,
        out: LogitsWriter | None,
    ) -> None:
        self.protocol, self.scores, self.base, self.out = protocol, scores, base, out
        self.targets = torch.tensor([window[protocol.first + 1 :] for window in windows])

    def __call__(self, sequence: Text, position: int, logits: Tensor) -> None:
        window, row = int(sequence.request.id), position - self.protocol.first
        rows = slice(row, row + len(logits))
        targets = self.targets[window, rows].to(logits.device)
        if self.base is None:
            found = {"ln_p": measures.log_likelihoods(logits, targets)}
        else:
            base = measures.decode(*self.base.read(window, row, len(logits)), logits.device)
            found = measures.compare(logits, base, targets)
        if self.out is not None:
            self.out.write(window, row, *measures.encode(logits))
        self.scores.keep(window, rows, {kind: values.cpu().numpy() for kind, values in found.items()})


class _Ticks:
    """A line whenever windows were finished: how many, the perplexity so far, the time left."""

    def __init__(self, scores: Scores, say: Say | None) -> None:
        self.scores, self.say, self.began, self.told = scores, say, time.monotonic(), 0

    def tell(self) -> None:
        if self.say is None:
            return
        done, every = int(self.scores.done.sum()), len(self.scores.done)
        if done > self.told:
            self.told = done
            seconds = time.monotonic() - self.began
            ppl = float(np.exp(-self.scores.whole()["ln_p"].mean()))
            left = f", about {seconds / done * (every - done):.0f} s left" if done < every else f" in {seconds:.0f} s"
            kld = self.scores.whole().get("kld")
            away = "" if kld is None else f", KLD {kld.mean():.6f}"
            self.say(f"{done} of {every} windows: perplexity {ppl:.4f}{away}{left}")
