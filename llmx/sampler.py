"""From logits to tokens: every draw of a step in one call, no loop over rows.

A draw depends on its logits, its parameters and (seed, choice, position), on nothing else: Gumbel-max (Gumbel 1954;
Maddison et al. 2014) over the processed logits with counter-based noise (Philox4x32-10). Ties go to the lower token id.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmx.core import SamplingParams, Sequence
from llmx.kernels import Kernels
from llmx.kernels.reference.sample import WEIGHT, gumbel, weights

CHOICE_STREAM = 0  # the Philox stream of a sequence's own tokens; a rejection sampler takes another
CANDIDATES = 1024  # so many of the likeliest tokens are looked at before a full sort
LEAST_TEMPERATURE = 1e-5  # below it a draw is greedy: logits divided by less could overflow
MASK32, MASK64 = 2**32 - 1, 2**64 - 1


@dataclass(frozen=True)
class Allowed:
    """Which tokens may be drawn, at the draws where not every one may."""

    at: Tensor  # (A,) draws
    tokens: Tensor  # (A, vocab) bool, at least one in each row


@dataclass(frozen=True)
class Points:
    """Where tokens are drawn: draw i follows `path[i]` drafts of sequences[index[i]], for position positions[i]."""

    sequences: list[Sequence]
    index: Tensor  # (M,)
    positions: Tensor  # (M,) absolute position of the token that is drawn
    path: Tensor  # (M, W) draft tokens between the sequence's end and this draw; -1 pads
    allowed: Allowed | None = None  # by the grammars of requests; None: there are none


@dataclass(frozen=True)
class Draws:
    """Drawn tokens; if asked for, their log-probabilities and the likeliest tokens', of the raw logits."""

    tokens: Tensor  # (M,)
    logprobs: Tensor | None = None  # (M,) f32
    top: tuple[Tensor, Tensor] | None = None  # values f32, tokens: (M, most wanted)


def sibling_seed(seed: int, sibling: int) -> int:
    """The signed 64-bit key of a request's choice: splitmix64's finaliser over seed + sibling; choice 0 keeps it."""
    mixed = seed & MASK64
    if sibling:
        mixed = (mixed + sibling * 0x9E3779B97F4A7C15) & MASK64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK64
        mixed ^= mixed >> 31
    return mixed - 2**64 if mixed >= 2**63 else mixed


def draw(logits: Tensor, points: Points, kernels: Kernels) -> Draws:
    """logits (M, vocab) f32, not changed -> one token per row."""
    return _drawn_by_kernel(logits, points, kernels) if kernels.has("draw") else _drawn(logits, points, kernels)


def _drawn_by_kernel(logits: Tensor, points: Points, kernels: Kernels) -> Draws:
    rules, tokens = rules_of(points.sequences, kernels), [s.tokens for s in points.sequences]
    allowed = None if points.allowed is None else (points.allowed.at, points.allowed.tokens)
    drawn, scores = kernels.get("draw")(logits, rules, tokens, points.index, points.positions, points.path, allowed)
    return Draws(drawn) if scores is None else Draws(drawn, scores[0], (scores[1], scores[2]))


def rules_of(sequences: list[Sequence], kernels: Kernels) -> list[Any]:
    """What the kernel is told of each; the same objects for as long as a sequence lives."""
    rules = [s.drawing for s in sequences]
    if None not in rules:
        return rules
    make = kernels.get("draw_rule")
    for s in sequences:
        if s.drawing is None:
            s.drawing = _rule(s, make)
    return [s.drawing for s in sequences]


def _rule(sequence: Sequence, make: Callable[..., Any]) -> Any:
    """What the kernel is told of a sequence, once."""
    p, bias = sequence.request.params, dict[int, float]()
    for token, value in p.logit_bias:
        bias[token] = bias.get(token, 0.0) + value
    return make(
        seed=sibling_seed(sequence.request.seed, sequence.sibling),
        temperature=p.temperature,
        top_k=p.top_k,
        top_p=p.top_p,
        floor=_log(p.min_p),
        repetition=p.repetition_penalty,
        presence=p.presence_penalty,
        frequency=p.frequency_penalty,
        prompt=sequence.prompt_len if p.penalised else None,
        bias=bias,
        stops=sorted(sequence.request.stops) if p.min_tokens else (),
        until=sequence.prompt_len + p.min_tokens,
        logprobs=p.logprobs,
    )


def _drawn(logits: Tensor, points: Points, kernels: Kernels) -> Draws:
    """With tensor operations, on any device: this defines the kernels."""
    params = [s.request.params for s in points.sequences]
    device = logits.device

    def column(get: Callable[[Any], float]) -> Tensor:
        return torch.tensor([get(p) for p in params], dtype=torch.float32, device=device)[points.index, None]

    warped = _ban(_penalise(logits, points, column), points)
    if any(_samples(p) for p in params):
        temperature = column(lambda p: p.temperature if _samples(p) else 0.0)
        warped = warped / torch.where(temperature > 0, temperature, 1.0)
        warped = _truncate(warped, params, column)
        keys = [sibling_seed(s.request.seed, s.sibling) for s in points.sequences]
        seeds = torch.tensor(keys, dtype=torch.int64, device=device)[points.index]
        uniform = kernels.get("philox_uniform")(seeds, points.positions, CHOICE_STREAM, logits.shape[1])
        warped = warped + gumbel(uniform) * (temperature > 0)
    tokens = warped.argmax(-1)
    wanted = [p.logprobs for p in params if p.logprobs is not None]
    if not wanted:
        return Draws(tokens)
    most = logits.amax(-1, keepdim=True)
    norm = most.double() + torch.log(weights(logits - most).sum(-1, keepdim=True) / WEIGHT)
    values, top = likeliest(logits, max(1, *wanted))
    scores = (torch.cat([logits.gather(1, tokens[:, None]), values], 1).double() - norm).float()
    return Draws(tokens, scores[:, 0], (scores[:, 1:], top))


def likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(rows, vocab) f32 -> values and tokens (rows, count), best first, ties to the lower token.

    A plain `topk` chooses among ties by how many are asked for, so a request's answer would hang on its neighbours'.
    """
    bits = scores.view(torch.int32).long()
    order = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # whole numbers that compare as the scores do
    tokens = torch.arange(scores.shape[1], device=scores.device)
    keys = ((order << 32) + (MASK32 - tokens)).topk(min(count, scores.shape[1]), -1).values
    chosen = MASK32 - (keys & MASK32)
    return scores.gather(1, chosen), chosen


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def _samples(params: SamplingParams) -> bool:
    return params.temperature >= LEAST_TEMPERATURE


def _penalise(logits: Tensor, points: Points, column: Callable[..., Tensor]) -> Tensor:
    """Counts are the sequence's plus those of the drafts before this draw: as if they had been emitted one by one.

    Repetition as Keskar et al. 2019 (CTRL) over prompt and output; presence and frequency as OpenAI's over the output.
    """
    if not any(s.request.params.penalised for s in points.sequences):
        return logits
    vocab, device = logits.shape[1], logits.device

    def bincount(tokens: list[int]) -> Tensor:
        return torch.bincount(torch.tensor(tokens, dtype=torch.long), minlength=vocab)

    outputs = [s.output if s.request.params.penalised else [] for s in points.sequences]
    counts = torch.stack([bincount(tokens) for tokens in outputs]).to(device)[points.index]
    prompts = [list(s.request.prompt) if s.request.params.repetition_penalty != 1 else [] for s in points.sequences]
    seen_before = torch.stack([bincount(tokens) > 0 for tokens in prompts]).to(device)[points.index]
    ahead = torch.zeros_like(counts).scatter_add_(1, points.path.clamp(min=0), (points.path >= 0).to(counts.dtype))
    counts = counts + ahead
    repetition = torch.where(seen_before | (counts > 0), column(lambda p: p.repetition_penalty), 1.0)
    logits = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - counts * column(lambda p: p.frequency_penalty)
    return logits - (counts > 0) * column(lambda p: p.presence_penalty)


def _ban(logits: Tensor, points: Points) -> Tensor:
    """logit_bias, what no grammar allows, and no stop before min_tokens, unless nothing else is allowed.

    Lists of (sequence, token) become (row, token) by one comparison.
    """
    bias, stops = [], []
    for i, s in enumerate(points.sequences):
        bias += [(i, token, value) for token, value in s.request.params.logit_bias]
        if s.request.params.min_tokens:
            until = s.prompt_len + s.request.params.min_tokens
            # A tokenizer may know end tokens that the model has no logit for.
            stops += [(i, token, until) for token in s.request.stops if token < logits.shape[1]]
    allowed = points.allowed
    if not bias and not stops and allowed is None:
        return logits
    device, logits = logits.device, logits.clone()
    slots = torch.zeros(len(points.sequences), logits.shape[1], device=device)
    if bias:
        owner, token, value = zip(*bias, strict=True)
        at = (torch.tensor(owner, device=device), torch.tensor(token, device=device))
        slots.index_put_(at, torch.tensor(value, dtype=torch.float32, device=device), accumulate=True)
        logits += slots[points.index]
    if stops:
        banned = torch.zeros_like(slots, dtype=torch.bool)
        ends = torch.zeros(len(points.sequences), dtype=torch.long, device=device)
        owners, tokens, untils = (torch.tensor(column, device=device) for column in zip(*stops, strict=True))
        banned[owners, tokens] = True
        ends[owners] = untils
        early = banned[points.index] & (points.positions < ends[points.index])[:, None]
        if allowed is not None:
            mine = early[allowed.at]
            early[allowed.at] = mine & (allowed.tokens & ~mine).any(-1, keepdim=True)
        logits.masked_fill_(early, -torch.inf)
    if allowed is not None:
        logits[allowed.at] = logits[allowed.at].masked_fill(~allowed.tokens, -torch.inf)
    return logits


def _truncate(logits: Tensor, params: list[Any], column: Callable[..., Tensor]) -> Tensor:
    """top-k, top-p (Holtzman et al. 2020) of what top-k leaves, min-p (Nguyen et al. 2024). Ties at an edge stay."""
    ks = [p.top_k for p in params if _samples(p) and p.top_k > 0]
    if any(_samples(p) and p.top_p < 1 for p in params) or ks:
        logits = _nucleus(logits, max(ks, default=0), column)
    if any(_samples(p) and p.min_p > 0 for p in params):
        floor = logits.amax(-1, keepdim=True) + column(lambda p: _log(p.min_p))
        logits = torch.where(logits < floor, -torch.inf, logits)
    return logits


def _nucleus(logits: Tensor, widest: int, column: Callable[..., Tensor]) -> Tensor:
    vocab = logits.shape[1]
    top_k, top_p = column(lambda p: p.top_k).clamp(min=0, max=vocab).long(), column(lambda p: p.top_p).double()
    most = logits.amax(-1, keepdim=True)
    whole = weights(logits - most).sum(-1, keepdim=True)
    # On the CPU a sort of the whole vocabulary costs more than the rest of the step; a GPU may not wait to find out.
    count = vocab if logits.device.type != "cpu" else min(vocab, max(CANDIDATES, widest))
    while True:
        values = logits.topk(count, -1).values  # (M, count)
        each = weights(values - most)
        sums = each.cumsum(-1)
        inside = (top_k == 0) | (torch.arange(count, device=logits.device) < top_k)
        # top-p counts in the mass of what top-k leaves, or of the whole vocabulary.
        mass = torch.where(top_k > 0, sums.gather(1, (top_k - 1).clamp(0, count - 1)), whole)
        keep = inside & ((sums - each < top_p * mass) | (top_p >= 1))
        keep[:, 0] = True
        # A row that keeps all that was looked at may keep more, unless top-k ends there or nothing is cut.
        if count == vocab or not bool((keep[:, -1:] & (top_k == 0) & (top_p < 1)).any()):
            break
        count = min(vocab, count * 16)
    edge = torch.where(keep, values, torch.inf).amin(-1, keepdim=True)
    cut = (top_k > 0) | (top_p < 1)
    return torch.where((logits < edge) & cut, -torch.inf, logits)
