"""Tokens of one choice to text that may be shown: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from llmx.core import SamplingParams
from llmx.tokenizer import Tokenizer


class StopStrings:
    """Finds stop strings in a text that is read character by character (Aho and Corasick, CACM 18, 1975).

    A state is the longest end of the text so far that begins some stop string. The work per character does not depend
    on how many stop strings there are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.match: list[str | None] = [None]  # by state: the longest stop string that ends here
        self.held = [0]  # by state: characters at the text's end that may be the beginning of a stop string
        depth = [0]
        for stop in stops:
            state = 0
            for character in stop:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._fail.append(0)
                    self.match.append(None)
                    self.held.append(0)
                    depth.append(depth[state] + 1)
                state = self._next[state][character]
            self.match[state] = stop
        queue = deque(self._next[0].values())  # breadth first: a state's fallback is shorter, so it is done before
        while queue:
            state = queue.popleft()
            fallback = self._fail[state]
            self.match[state] = self.match[state] or self.match[fallback]
            self.held[state] = depth[state] if self._next[state] else self.held[fallback]
            for character, child in self._next[state].items():
                self._fail[child] = self.step(fallback, character)
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        while character not in self._next[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return self._next[state][character]


class Detokenizer:
    """One choice's tokens to text.

        d = Detokenizer(tokenizer, prompt_ids, params)
        for token in tokens:
            show(d.push(token))
            if d.stopped is not None: break     # a stop string; d.used tokens count, the rest is to be dropped
        show(d.finish())

    Stop strings are searched for in the text as if it were produced character by character: the one that is complete
    first ends it; if several are complete at the same character, the longest (it begins earliest). The text is cut
    before it, or after it with `include_stop_str_in_output`. A stop string counts only if a token after the first
    `min_tokens` completes it (as in vLLM); it may begin before. What `push` returns never ends inside a character, nor
    with what may be the beginning of a stop string.

    A token that ends the text (`stop_token_ids` and, unless `ignore_eos`, the tokenizer's `eos_ids`, after the first
    `min_tokens`) adds no text, except one of `stop_token_ids` with `include_stop_str_in_output`, decoded as any other.

    stopped: the stop string that ended the text. ended: whether a stop string or an end token did; further pushes are
    then ignored. used: tokens that count (usage), up to and including the one that completed the stop string.
    completed: of those, how many have their whole text shown, or cut off by a stop string. text: all returned so far.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._stream = tokenizer.stream(prompt_ids, params.skip_special_tokens, params.visible_special_ids)
        self._stops = StopStrings(params.stop) if params.stop else None
        self._state = 0
        self._held = ""  # text that may be the beginning of a stop string
        self._params = params
        self._own_ends = frozenset(params.stop_token_ids)
        self._ends = self._own_ends if params.ignore_eos else self._own_ends | tokenizer.eos_ids
        self._waiting: deque[int] = deque()  # by token, oldest first: length of the text at which all of it is shown
        self._shown: list[str] = []
        self._length = 0
        self.stopped: str | None = None
        self.ended = False
        self.used = 0

    @property
    def text(self) -> str:
        return "".join(self._shown)

    @property
    def completed(self) -> int:
        return self.used - len(self._waiting)

    def push(self, token_id: int) -> str:
        """The text that this token makes safe to show."""
        if self.ended:
            return ""
        self.used += 1
        late = self.used > self._params.min_tokens
        self.ended = late and token_id in self._ends
        silent = self.ended and not (self._params.include_stop_str_in_output and token_id in self._own_ends)
        new = self._cut("" if silent else self._stream.push(token_id), late)
        self._waiting.append(self._length + len(self._held) + self._stream.pending)
        return self._show(new)

    def finish(self) -> str:
        """The rest of the text, at its end: what was held back, and U+FFFD for an incomplete character."""
        if self.stopped is not None:
            return ""
        rest = self._cut(self._stream.flush(), self.used > self._params.min_tokens)
        rest += self._held if self.stopped is None else ""
        self._held = ""
        self.ended = True
        self._waiting.clear()
        return self._show(rest)

    def _show(self, new: str) -> str:
        if new:
            self._shown.append(new)
        while self._waiting and (self._waiting[0] <= self._length or self.stopped is not None):
            self._waiting.popleft()
        return new

    def _cut(self, new: str, late: bool) -> str:
        """Appends to the text; returns what may be shown of it, and keeps the rest in `_held`."""
        text = self._held + new
        if self._stops is not None:
            for at, character in enumerate(new, start=len(self._held) + 1):
                self._state = self._stops.step(self._state, character)
                match = self._stops.match[self._state]
                if match is not None and late:
                    self.stopped, self.ended, self._held = match, True, ""
                    text = text[:at] if self._params.include_stop_str_in_output else text[: at - len(match)]
                    self._length += len(text)
                    return text
            safe = len(text) - self._stops.held[self._state]
            text, self._held = text[:safe], text[safe:]
        self._length += len(text)
        return text
