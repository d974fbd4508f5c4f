"""What is taken of each scored position: log-likelihood, and the distance to a reference. No loop over positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FLOOR = 16.0  # nats below the likeliest (when stored) or below 0 (when compared), where llama-perplexity stops looking


def log_likelihoods(logits: Tensor, targets: Tensor) -> Tensor:
    """(rows, vocab) f32 logits and the tokens that came (rows,) -> ln p of each, f64."""
    return logits.gather(1, targets[:, None])[:, 0].double() - _normaliser(logits)


def _normaliser(logits: Tensor) -> Tensor:
    """(rows,) f64: ln of the sum of exp."""
    top = logits.amax(-1, keepdim=True)
    return top[:, 0].double() + (logits - top).exp().sum(-1, dtype=torch.float64).log()


def encode(logits: Tensor) -> tuple[Any, Any, Any]:
    """codes (rows, vocab) u16, scale (rows,) f32, least (rows,) f32 as numpy arrays: llama-perplexity's arithmetic.

    ln p of a token is scale * code + least, within scale / 2 of the true one where that is at most 16 below the top's.
    """
    top = logits.amax(-1, keepdim=True)
    low = torch.maximum(logits.amin(-1, keepdim=True), top - FLOOR)
    spread = (logits - top).exp().sum(-1, keepdim=True, dtype=torch.float64).log().float()
    scale = (top - low) / 65535.0
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    codes = ((logits - low).clamp(min=0.0) * inverse).round().clamp(max=65535.0)
    least = low - top - spread
    return codes.int().cpu().numpy().astype("<u2"), scale[:, 0].cpu().numpy(), least[:, 0].cpu().numpy()


def decode(codes: Any, scale: Any, least: Any, device: torch.device) -> Tensor:
    """(rows, vocab) f32 log-probabilities."""
    values = torch.from_numpy(codes.astype("int32")).to(device).float()
    return (
        values * torch.from_numpy(scale.copy()).to(device)[:, None] + torch.from_numpy(least.copy()).to(device)[:, None]
    )


def compare(logits: Tensor, base: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Each row against the reference's log-probabilities `base` (rows, vocab) f32; all (rows,) f64.

    ln_p, ln_p_base: of the token that came. kld: sum of p_base * (ln p_base - ln p) over tokens with ln p_base > -16.
    p_diff: p - p_base of the token that came. same_top: 1 where both find the same token likeliest (of equals the
    first).
    """
    normaliser = _normaliser(logits)
    ln_p = logits.gather(1, targets[:, None])[:, 0].double() - normaliser
    ln_p_base = base.gather(1, targets[:, None])[:, 0].double()
    terms = base.exp() * (base - (logits - normaliser.float()[:, None]))
    kld = torch.where(base > -FLOOR, terms, 0.0).sum(-1, dtype=torch.float64)
    same = (_likeliest(logits) == _likeliest(base)).double()
    return {"ln_p": ln_p, "ln_p_base": ln_p_base, "kld": kld, "p_diff": ln_p.exp() - ln_p_base.exp(), "same_top": same}


def _likeliest(scores: Tensor) -> Tensor:
    """(rows,): the first of the largest; a plain argmax need not take the first on every device."""
    tokens = torch.arange(scores.shape[1], device=scores.device)
    return torch.where(scores == scores.amax(-1, keepdim=True), tokens, scores.shape[1]).amin(-1)
