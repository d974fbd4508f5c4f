"""Two sides on the same tokens: tokenizers first, then tokens, layers, ops, and what is stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from llmx.errors import UsageError
from llmx.inspect.probe import Error, Follower, Place, Recorder
from llmx.inspect.side import Seen, Side, continued, run
from llmx.inspect.tensors import Differs, compared
from llmx.tokenizer import Tokenizer

SIZES = ("hidden", "layers", "heads", "kv_heads", "head_dim", "inner")  # sides that differ here have no ops in common
FINE, COARSE = 1e-4, 2e-2  # tolerances: of two sides in float32, and where one computes in 16 bits
RANDOM_PROMPT = 32  # tokens, where there is no tokenizer
Say = Callable[[str], None]


@dataclass(frozen=True)
class TokenizerDiffers:
    """The prompt's first token that is not the same. a, b: as text; None: that side has no more tokens."""

    position: int
    a: str | None
    b: str | None
    a_id: int | None
    b_id: int | None


@dataclass(frozen=True)
class TokenDiffers:
    """The first token that B would not have drawn after A's text. margin: between A's best two logits there."""

    position: int
    index: int
    a_id: int
    b_id: int
    a: str
    b: str
    margin: float


@dataclass
class Difference:
    """What was found. growth: per layer the largest relative error of the residual stream, inherited errors included.

    faults: ops that, given A's own inputs, give something else: each one's fault is its own, in the model's order.
    crossing: the first op, in a run of B's own, whose output is beyond the tolerance though its input is not.
    """

    a: Side
    b: Side
    tolerance: float = 0.0
    ids: list[int] = field(default_factory=list)
    prompt_len: int = 0
    tokenizer: TokenizerDiffers | None = None
    config: list[tuple[str, str, str]] = field(default_factory=list)
    sizes: str | None = None
    token: TokenDiffers | None = None
    growth: list[tuple[str, float]] = field(default_factory=list)
    faults: list[Error] = field(default_factory=list)
    crossing: Error | None = None
    one_sided: list[Place] = field(default_factory=list)
    tensors: list[Differs] = field(default_factory=list)
    seen: tuple[Seen, Seen] | None = None

    @property
    def differs(self) -> bool:
        return bool(self.tokenizer or self.sizes or self.token or self.faults or self.one_sided)

    def sentence(self) -> str:
        """The first things that differ."""
        if not self.differs:
            return f"A and B agree within {self.tolerance:g} on {len(self.ids)} tokens."
        if self.sizes:
            return f"A and B differ: {self.sizes}"
        said = []
        if self.tokenizer:
            one = self.tokenizer
            said.append(f"the tokenizers part at token {one.position} of the prompt ({one.a!r} against {one.b!r})")
        if self.token:
            said.append(f"token {self.token.index} of the output is {self.token.a!r} in A and {self.token.b!r} in B")
        if self.faults:
            fault = self.faults[0]
            said.append(f"the first op that differs by itself is {named(fault)} (relative error {fault.worst():.2g})")
        elif self.one_sided:
            said.append(f"only one of them has {self.one_sided[0]}")
        return "A and B differ: " + "; ".join(said) + "."


def named(error: Error) -> str:
    """ "layer 7: up_proj"."""
    return str(dataclasses.replace(error.place, name=error.part))


def compare(
    a: Side, b: Side, *, prompt: str, ids: Sequence[int] | None, tokens: int, tolerance: float | None, say: Say
) -> Difference:
    """Run both on A's tokens: the prompt and A's greedy continuation of `tokens`. UsageError if that can't be done."""
    found = Difference(a, b)
    left, right = a.tokenizer(), b.tokenizer()
    start = _prompt(a, left, prompt, ids)
    if ids is None and left is not None and right is not None:
        found.tokenizer = _tokenizers(left, right, prompt)
    shapes = a.shape(), b.shape()
    found.config = list(_config(*shapes))
    apart = [f"{name} is {getattr(shapes[0], name)} in A and {getattr(shapes[1], name)} in B" for name in SIZES
             if getattr(shapes[0], name) != getattr(shapes[1], name)]  # fmt: skip
    if apart:
        found.sizes = "; ".join(apart) + "."
        return found
    say("A: prompt and greedy continuation")
    found.ids, found.prompt_len = continued(a, start, tokens), len(start)
    if (largest := max(found.ids)) >= shapes[1].vocab:
        found.sizes = f"A's token {largest} is none of B's {shapes[1].vocab}."
        return found
    first = max(0, found.prompt_len - 1)
    say("A: one forward, every op recorded")
    record = Recorder()
    seen_a = run(a, found.ids, first, record)
    say("B: the same tokens, errors as they grow")
    free = Follower(record.taken, forced=False, tokens=len(found.ids))
    seen_b = run(b, found.ids, first, free)
    say("B: every op by itself, on A's inputs")
    forced = Follower(record.taken, forced=True, tokens=len(found.ids))
    run(b, found.ids, first, forced)
    found.seen = seen_a, seen_b
    found.tolerance = tolerance if tolerance is not None else _usual(seen_a, seen_b)
    _judge(found, record, free, forced)
    found.token = _token(found, left)
    if a.located is not None and b.located is not None and a.located.path != b.located.path:
        say("both: stored tensors")
        left_files, right_files = a.opened(), b.opened()
        assert left_files is not None
        assert right_files is not None
        found.tensors = list(compared(left_files, right_files))
    return found


def _judge(found: Difference, record: Recorder, free: Follower, forced: Follower) -> None:
    found.growth = [
        (str(error.place).removesuffix(": residual sum"), error.worst())
        for error in free.errors
        if error.place.layer is None or error.place.name == "residual sum"
    ]
    found.faults = [error for error in forced.errors if error.worst() > found.tolerance]
    bound = found.tolerance
    found.crossing = next((e for e in free.errors if e.worst() > bound >= float(e.inputs.max())), None)
    reached = {(error.place.layer, error.place.name) for error in forced.errors}
    found.one_sided = [p for p in record.taken if (p.layer, p.name) not in reached] + forced.extra


def _usual(a: Seen, b: Seen) -> float:
    return FINE if a.dtype == b.dtype == "float32" else COARSE


def _prompt(a: Side, tokenizer: Tokenizer | None, prompt: str, ids: Sequence[int] | None) -> list[int]:
    vocab = a.shape().vocab
    if ids is not None:
        if not ids or min(ids) < 0 or max(ids) >= vocab:
            raise UsageError(f"--ids must be token ids between 0 and {vocab - 1}, at least one.")
        return list(ids)
    if tokenizer is None:
        if a.located is not None:
            raise UsageError(f"{a.config.model} has no tokenizer.", hint="give token ids: --ids 1,2,3")
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, vocab, (RANDOM_PROMPT,), generator=generator).tolist()
    found = tokenizer.encode(prompt)
    if not found:
        raise UsageError("--prompt gives no tokens.")
    return found


def _tokenizers(a: Tokenizer, b: Tokenizer, prompt: str) -> TokenizerDiffers | None:
    left, right = a.encode(prompt), b.encode(prompt)
    if left == right:
        return None
    shared = min(len(left), len(right))
    at = next((i for i in range(shared) if left[i] != right[i]), shared)
    one, other = left[at : at + 1], right[at : at + 1]
    return TokenizerDiffers(
        at,
        a.token(one[0]) if one else None,
        b.token(other[0]) if other else None,
        one[0] if one else None,
        other[0] if other else None,
    )


def _config(a: Any, b: Any) -> Iterator[tuple[str, str, str]]:
    """Settings of the two models that are not the same, nested ones by their path."""
    for one in dataclasses.fields(a):
        left, right = getattr(a, one.name), getattr(b, one.name, None)
        if left == right:
            continue
        if dataclasses.is_dataclass(left) and dataclasses.is_dataclass(right):
            yield from ((f"{one.name}.{key}", x, y) for key, x, y in _config(left, right))
        else:
            yield one.name, str(left)[:200], str(right)[:200]


def _token(found: Difference, tokenizer: Tokenizer | None) -> TokenDiffers | None:
    """The first position at which B's likeliest token is not A's."""
    assert found.seen is not None
    a, b = found.seen[0].logits, found.seen[1].logits
    width = min(a.shape[1], b.shape[1])
    chosen, other = a.argmax(1), b[:, :width].argmax(1)
    for row in (chosen != other).nonzero().flatten().tolist():
        best = a[row].topk(min(2, a.shape[1])).values
        mine, theirs = int(chosen[row]), int(other[row])

        def text(token: int) -> str:
            return str(token) if tokenizer is None else tokenizer.token(token)

        position = found.prompt_len + row
        return TokenDiffers(position, row, mine, theirs, text(mine), text(theirs), float(best[0] - best[-1]))
    return None
