"""Draws in C++. `llmx/sampler.py` defines which tokens, `kernels/reference/sample.py` the numbers behind them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from llmx.kernels.cpu import native

PACKED = struct.Struct("=2q 4q 6i 6f")  # as `Rule` in sample.cpp
MOST_TOP = 64
GREATEST = 2**31 - 1


class Rule:
    """How one sequence's tokens are drawn, packed once; kept between the steps of that sequence.

    seed: signed 64-bit key of the noise. floor: the logarithm of min-p. until: position before which no stop is drawn.
    logprobs: how many of the likeliest tokens are wanted, or None. prompt: how many tokens penalties take as given,
    or None where nothing is penalised.
    """

    def __init__(
        self,
        *,
        seed: int,
        temperature: float,
        top_k: int,
        top_p: float,
        floor: float,
        repetition: float,
        presence: float,
        frequency: float,
        prompt: int | None,
        bias: Mapping[int, float],
        stops: Sequence[int],
        until: int,
        logprobs: int | None,
    ) -> None:
        self.wanted = -1 if logprobs is None else logprobs
        self.prompt = prompt
        self._bias, self._biases = np.fromiter(bias, np.int32), np.fromiter(bias.values(), np.float32)
        self._stops = np.array(stops, np.int32)
        self._said, self._at, self._count = np.empty(0, np.int32), 0, 0
        self._before = (seed, until)
        self._lists = (self._bias.ctypes.data, self._stops.ctypes.data, self._biases.ctypes.data)
        self._after = (len(bias), len(stops), max(top_k, 0), self.wanted)
        self._numbers = (temperature, top_p, floor, repetition, presence, frequency)
        self._packed = PACKED.pack(*self._before, 0, *self._lists, 0, 0, *self._after, *self._numbers)

    def packed(self, tokens: list[int]) -> bytes:
        """For a draw that follows `tokens`: those of the call before, and more."""
        if self.prompt is None:
            return self._packed
        count = len(tokens)
        if count > len(self._said):
            grown = np.empty(2 * count + 64, np.int32)
            grown[: self._count] = self._said[: self._count]
            self._said, self._at = grown, grown.ctypes.data
        self._said[self._count : count] = tokens[self._count :]
        self._count = count
        return PACKED.pack(*self._before, self._at, *self._lists, self.prompt, count, *self._after, *self._numbers)


def _packed(rules: list[Rule], tokens: list[list[int]]) -> np.ndarray:
    return np.frombuffer(b"".join([r.packed(t) for r, t in zip(rules, tokens, strict=True)]), np.uint8)


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def draw(
    logits: Tensor,
    rules: list[Rule],
    tokens: list[list[int]],
    index: Tensor,
    positions: Tensor,
    path: Tensor,
    allowed: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
    """logits (M, vocab) f32 -> tokens (M,), and, if a rule wants them, log-probabilities, the likeliest and theirs.

    Draw i is for rules[index[i]], whose sequence is tokens[index[i]] and then path[i] (-1 pads), at positions[i].
    allowed: draws (A,) and what they may be, (A, vocab) bool. A row's bits are its own.
    """
    library = native()
    assert library is not None, "the table offers this only where the library is built"
    rows, vocab = logits.shape
    assert logits.dtype == torch.float32
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    index, positions, path = index.contiguous(), positions.contiguous(), path.contiguous()
    packed = _packed(rules, tokens)
    drawn = torch.empty(rows, dtype=torch.int64)
    scores, most = None, 0
    if any(rule.wanted >= 0 for rule in rules):
        most = min(max(1, *(rule.wanted for rule in rules)), vocab)
        assert most <= MOST_TOP
        scores = (torch.empty(rows), torch.empty(rows, most), torch.empty(rows, most, dtype=torch.int64))
    at, masks = (None, None) if allowed is None else (allowed[0].contiguous(), allowed[1].contiguous())
    library.draw(
        drawn.data_ptr(),
        *((0, 0, 0) if scores is None else [part.data_ptr() for part in scores]),
        most,
        logits.data_ptr(),
        logits.stride(0),
        rows,
        vocab,
        _address(packed),
        index.data_ptr(),
        positions.data_ptr(),
        path.data_ptr(),
        path.shape[1],
        0 if at is None else at.data_ptr(),
        0 if at is None else len(at),
        0 if masks is None else masks.data_ptr(),
        torch.get_num_threads(),
    )
    return drawn, scores


class Redraw:
    """`draw` whose rules and tokens stay where they are, so that a recorded one goes by what was filled in last.

    One token after each row's own sequence, of which nothing else is wanted. positions (rows,): where it will be.
    """

    def __init__(self, positions: Tensor) -> None:
        rows = len(positions)
        self.tokens = torch.empty(rows, dtype=torch.int64)  # (rows,) drawn
        self._positions, self._index = positions, torch.arange(rows)
        self._path = torch.full((rows, 1), -1)
        self._packed = np.zeros(rows * PACKED.size, np.uint8)
        self._rules: list[Rule] = []
        self._growing = False  # rules say of which tokens there are how many

    def fill(self, rules: list[Rule], tokens: list[list[int]]) -> None:
        """What the next draw goes by. None of the rules wants log-probabilities."""
        if rules != self._rules:
            assert all(rule.wanted < 0 for rule in rules)
            self._rules, self._growing = rules, any(rule.prompt is not None for rule in rules)
        elif not self._growing:
            return
        self._packed[:] = _packed(rules, tokens)

    def __call__(self, logits: Tensor) -> None:
        """logits (rows, vocab) f32, of which only this draw makes use."""
        library = native()
        assert library is not None, "the table offers this only where the library is built"
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        library.draw(
            self.tokens.data_ptr(),
            0,
            0,
            0,
            0,
            logits.data_ptr(),
            logits.stride(0),
            *logits.shape,
            _address(self._packed),
            self._index.data_ptr(),
            self._positions.data_ptr(),
            self._path.data_ptr(),
            1,
            0,
            0,
            0,
            torch.get_num_threads(),
        )
