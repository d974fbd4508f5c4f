"""Gated activations."""

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """(rows, 2 * inner), gate before up -> silu(gate) * up, (rows, inner); computed in f32, rounded once.

    Shazeer 2020 (SwiGLU). Written with exp: torch's sigmoid treats the tail of a buffer differently from its middle, and a
    row's result may not depend on where it lies.
    """
    gate, up = gate_up.float().chunk(2, -1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)
