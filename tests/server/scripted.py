"""An engine whose texts a test writes, with a real tokenizer, a real chat template, and real detokenisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tokenizers
from server.fake import FakeLLM, FakeStream
from tokenizers import decoders, models, pre_tokenizers

from llmx.core import Delta, SamplingParams
from llmx.detokenizer import Detokenizer
from llmx.llm import LLM
from llmx.templates import ChatTemplate
from llmx.tokenizer import Tokenizer
from llmx.tokenizer.pieces import Spelling

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


class ScriptedLLM(FakeLLM):
    """says: what comes next, one text per request, the last again and again. A token is a byte, or a special token.

    prompts: the texts of the prompts so far; params: their parameters.
    """

    def __init__(self, template: str, specials: Sequence[str] = (), *, named: dict[str, str] | None = None) -> None:
        super().__init__(lambda step: None)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = tokenizers.Tokenizer(models.BPE({c: n for n, c in enumerate(alphabet)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        marks = [*NAMES.values(), *specials]
        backend.add_special_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in marks])
        self.tokenizer: Any = Tokenizer(
            backend,
            Spelling(byte_level=True),
            eos_ids=[backend.token_to_id("</s>")],
            template=ChatTemplate(template, NAMES, named=named),
        )
        self.says: list[str] = []
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []

    render = LLM.render  # type: ignore[assignment]

    def open(self, prompt: list[int], params: SamplingParams, *, id: str, salt: bytes) -> FakeStream:
        self.prompts.append(self.tokenizer.decode(prompt, skip_special=False))
        self.params.append(params)
        text = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        deltas = [delta for index in range(params.n) for delta in self._deltas(index, text, prompt, params)]
        stream = FakeStream(tuple(prompt), params, lambda step: deltas[step] if step < len(deltas) else None, 0.0)
        self.opened.append(stream)
        return stream

    def _deltas(self, index: int, text: str, prompt: list[int], params: SamplingParams) -> list[Delta]:
        ids = [*self.tokenizer.encode(text, add_special=False), *self.tokenizer.eos_ids]
        cut = ids[: params.max_tokens]
        detokenizer = Detokenizer(self.tokenizer, prompt, params)
        deltas = [Delta(index, detokenizer.push(token), (token,)) for token in cut]
        last = Delta(index, detokenizer.finish(), (), "stop" if len(cut) == len(ids) else "length")
        return [*deltas, last]
