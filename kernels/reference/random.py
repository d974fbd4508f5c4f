"""Counter-based random numbers: Philox4x32-10.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


def philox4x32(counter: list[torch.Tensor], key: list[torch.Tensor]) -> list[torch.Tensor]:
    """Ten rounds on broadcastable int64 tensors that hold 32-bit words: 4 of counter, 2 of key; gives 4 words.

    A 64-bit product may wrap into the sign bit; masking after an arithmetic shift still gives its upper word.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & MASK) ^ c1 ^ k0, p1 & MASK, ((p0 >> 32) & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return [c0, c1, c2, c3]


def philox_uniform(seeds: torch.Tensor, positions: torch.Tensor, stream: int, vocab: int) -> torch.Tensor:
    """A uniform number in (0, 1) for each row and vocabulary index: (rows,), (rows,) int64 -> (rows, vocab) float32.

    Key: low and high word of the seed. Counter: low and high word of the position, `stream`, index // 4; word
    index % 4 of the result is the index's. Its upper 23 bits b give (b + 0.5) / 2**23, exact in float32: never 0,
    never 1. (With 24 bits the half would round, up to 1.0, whose Gumbel value is infinite.)
    """
    groups = torch.arange((vocab + 3) // 4, device=seeds.device)
    counter = [
        (positions & MASK).unsqueeze(1),
        ((positions >> 32) & MASK).unsqueeze(1),
        torch.full_like(groups, stream & MASK).unsqueeze(0),
        groups.unsqueeze(0),
    ]
    key = [(seeds & MASK).unsqueeze(1), ((seeds >> 32) & MASK).unsqueeze(1)]
    words = torch.stack(torch.broadcast_tensors(*philox4x32(counter, key)), dim=-1)  # (rows, groups, 4)
    bits = words.flatten(1)[:, :vocab] >> 9
    return (bits.to(torch.float32) + 0.5) * 2.0**-23
