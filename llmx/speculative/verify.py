"""Sampler-match: a draft token is accepted iff it is what the target draws there. Lossless by construction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmx.batch import Batch, Drafts, Kept, one_each, slots_of
from llmx.core import Emitted, Logprob, Row, Sequence
from llmx.sampler import Draws, Points


@dataclass(frozen=True)
class Verdict:
    """Still on the device, so that the next step can be launched from it."""

    kept: Kept
    walk: Tensor  # (R, levels) index of each draw that is emitted; -1 after the last one
    start: Tensor  # (R,) where the sequence's next row starts
    last: Tensor  # (R,) with which token


def points(rows: list[Row], drafts: Drafts, batch: Batch) -> Points:
    """Every drawn position of the step: the tips and all draft nodes."""
    if batch.plain:
        each = one_each(len(rows))
        return Points([r.sequence for r in rows], each.index, batch.prefix, each.none[:, None])
    owner, node = batch.sequence[batch.sample], batch.node[batch.sample]
    above = drafts.ancestors[owner, node.clamp(min=0)] & (node >= 0)[:, None]
    path = torch.where(above, drafts.tokens[owner], -1)
    return Points([r.sequence for r in rows], owner, batch.positions[batch.sample] + 1, path)


def verify(drafts: Drafts, batch: Batch, draws: Draws) -> Verdict:
    """Walk every tree at once, one level at a time."""
    if batch.plain:
        each = one_each(len(drafts.sizes))
        kept = Kept(each.all, batch.positions, batch.slots, batch.base)
        return Verdict(kept, each.index[:, None], batch.base, draws.tokens)
    count, width, device = len(drafts.sizes), drafts.width, batch.tokens.device
    owner, place = batch.sequence[batch.sample], batch.node[batch.sample] + 1
    drawn_at = torch.full((count, width + 1), -1, dtype=torch.long, device=device)
    drawn_at[owner, place] = torch.arange(len(owner), device=device)  # index into draws; column 0 is the root
    every, here = torch.arange(count, device=device), torch.zeros(count, dtype=torch.long, device=device)
    walk, on_path = [drawn_at[:, 0]], torch.zeros(count, width, dtype=torch.bool, device=device)
    for _ in range(drafts.depth):
        want = draws.tokens[drawn_at[every, here]]
        match = drafts.exists & (drafts.parents == here[:, None] - 1) & (drafts.tokens == want[:, None])
        alive = match.any(1)
        here = torch.where(alive, match.long().argmax(1) + 1, here)
        on_path |= match
        walk.append(torch.where(alive, drawn_at[every, here], -1))
    lines = torch.stack(walk, 1)
    mask = (batch.node < 0) | on_path[batch.sequence, batch.node.clamp(min=0)]
    end = batch.base + on_path.sum(1)
    slots = [slots_of(table, batch.sequence, batch.positions, batch.size) for table in batch.tables]
    slots = [torch.where(mask, slot, slot % batch.size) for slot in slots]
    tip = lines.amax(1).clamp(min=0)
    last = draws.tokens[tip] if len(owner) else torch.zeros_like(end)
    return Verdict(Kept(mask, batch.positions, slots, end), lines, end, last)


def emit(
    rows: list[Row], drafts: Drafts, verdict: Verdict, draws: Draws, prompts: list[dict[int, Logprob]]
) -> list[Emitted]:
    """The trip to the host."""
    tokens, walk = draws.tokens.tolist(), verdict.walk.tolist()
    values = tops = None
    if draws.logprobs is not None and draws.top is not None:
        values = draws.logprobs.tolist()
        tops = (draws.top[0].tolist(), draws.top[1].tolist())
    emitted = []
    for row, line, prompt, drafted in zip(rows, walk, prompts, drafts.sizes, strict=True):
        chosen = [i for i in line if i >= 0]
        wanted = _wanted(row.sequence)
        logprobs = None
        if wanted is not None and values is not None and tops is not None:
            logprobs = [
                Logprob(tokens[i], values[i], tuple(zip(tops[1][i][:wanted], tops[0][i][:wanted], strict=True)))
                for i in chosen
            ]
        emitted.append(Emitted([tokens[i] for i in chosen], logprobs, prompt, drafted))
    return emitted


def _wanted(sequence: Sequence) -> int | None:
    return sequence.request.params.logprobs
