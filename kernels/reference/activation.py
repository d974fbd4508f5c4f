"""Gated activations."""

import math

import torch
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """(rows, 2 * inner), gate before up -> silu(gate) * up, (rows, inner); in f32, rounded once.

    SwiGLU, Shazeer 2020. Written with exp: torch's sigmoid treats the tail of a buffer differently from its middle, and
    a row's result may not depend on where it lies.
    """
    gate, up = gate_up.float().chunk(2, -1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """As silu_mul, with the exact GELU (Hendrycks & Gimpel 2016) of the gate."""
    gate, up = gate_up.float().chunk(2, -1)
    return (0.5 * gate * (1 + torch.erf(gate * math.sqrt(0.5))) * up).to(gate_up.dtype)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """As silu_mul, with GELU's tanh approximation of the gate."""
    gate, up = gate_up.float().chunk(2, -1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)
    return (0.5 * gate * (1 + torch.tanh(inner)) * up).to(gate_up.dtype)
