"""One decoder block through an algorithm: scales folded between neighbours, each linear's codes, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmx.quantize import forms, widths
from llmx.quantize.awq import clip, find_scales
from llmx.quantize.forms import Scaled, fp8_kind, scale_dtype
from llmx.quantize.gptq import gptq
from llmx.quantize.gram import Gram
from llmx.quantize.grids import Rounding, losses_of
from llmx.quantize.memory import give_back
from llmx.quantize.options import Options
from llmx.quantize.source import Lazy, Unit
from llmx.quantize.states import Stats
from llmx.schemes.grid import Grid

SLACK = 1.001  # two ways to sum the same error


@dataclass(frozen=True)
class Result:
    """made: the linear's tensors as they are stored, by the last component of their names: packed before the next
    linear's turn. error, nearest: squared output error over the calibration tokens, as a part of the outputs' squares;
    of these codes and of round-to-nearest. Of fp8, which takes no calibration, the weights' own squared error. None:
    not known. how: what made the codes. energy: what the errors are parts of."""

    unit: Unit
    made: dict[str, Tensor]
    error: float | None
    nearest: float | None
    how: str
    fell_back: bool = False
    energy: float = 0.0

    @property
    def worse(self) -> bool:
        known = self.error is not None and self.nearest is not None
        return known and not (self.error <= self.nearest * SLACK)  # type: ignore[operator]


@dataclass
class Done:
    """vectors: those that took scales, by name, as stored. rows: what the outputs of a linear were divided by."""

    results: list[Result] = field(default_factory=list)
    vectors: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """A block to be quantized. vectors: its norms' weights by name, as stored."""

    lazies: Sequence[Lazy]
    stats: Sequence[Stats]
    vectors: Mapping[str, Tensor]


class Quantizer:
    """config: the model's Shape. smooth: its family's SMOOTH. dtype: the model's."""

    def __init__(self, options: Options, config: Any, smooth: Mapping[str, Sequence[str]], dtype: torch.dtype) -> None:
        self.options, self.dtype = options, dtype
        self._config, self._smooth = config, smooth
        self._scales = scale_dtype(options, dtype)

    def __call__(self, seen: Seen, *, fold: bool = True) -> Done:
        """fold: AWQ's and SmoothQuant's scales. Of `seen`, weights and statistics are dropped as they are used up."""
        done, columns, how = self.fold(seen) if fold else (Done(), {}, {})
        for lazy, stats in zip(seen.lazies, seen.stats, strict=True):
            done.results += self._made(lazy, stats, done, columns, how)
            lazy.drop()
            stats.drop()  # a Hessian may be larger than the block
            give_back()
        return done

    def fold(self, seen: Seen) -> tuple[Done, dict[str, Tensor], dict[str, str]]:
        """AWQ's and SmoothQuant's scales alone: what they change, and of each linear its inputs' and how they came."""
        done, columns, how = Done(), dict[str, Tensor](), dict[str, str]()
        if self.folds:
            for producer, names in self._smooth.items():
                self._fold(seen, producer, names, done, columns, how)
        return done, columns, how

    def one(self, unit: Unit, weight: Tensor, stats: Stats, columns: Tensor | None, how: str) -> Result:
        """A linear, or some rows of one, by itself; columns: the scales of its inputs, if any."""
        method = self.options.method
        if method == "gptq":
            return self._gptq([(unit, weight)], stats)[0]
        if method == "fp8":
            return self._fp8(unit, weight, stats)
        make = self._awq if method == "awq" else self._int8
        scales = torch.ones(unit.n_in) if columns is None else columns
        return make(unit, weight, stats, scales, torch.ones(unit.n_out), how)

    def _made(
        self, lazy: Lazy, stats: Stats, done: Done, columns: Mapping[str, Tensor], how: Mapping[str, str]
    ) -> list[Result]:
        """A linear with the scales of its inputs and outputs."""
        if self.options.method == "gptq":
            return self._gptq(self._parts(lazy), stats)
        if self.options.method == "fp8":
            return [self._fp8(unit, weight.float(), stats) for unit, weight in self._parts(lazy)]
        make, results = self._awq if self.options.method == "awq" else self._int8, []
        for unit, weight in self._parts(lazy):
            scales = columns.get(unit.name, torch.ones(unit.n_in))
            rows = done.rows.get(unit.name, torch.ones(unit.n_out))
            results.append(make(unit, weight, stats, scales, rows, how.get(unit.name, "no scales")))
        return results

    def _parts(self, lazy: Lazy) -> list[tuple[Unit, Tensor]]:
        return [(unit, part) for unit, part in lazy.parts() if not self.options.ignores(unit.name)]

    def _stored(self, made: Grid | Scaled) -> dict[str, Tensor]:
        return forms.store(made, self.options, self.dtype)

    @property
    def folds(self) -> bool:
        return self.options.method in ("awq", "int8")

    @property
    def _rounding(self) -> Rounding:
        return Rounding(self.options.bits, self.options.group, self.options.symmetric, self._scales)

    def _gptq(self, mine: list[tuple[Unit, Tensor]], stats: Stats) -> list[Result]:
        if not mine:
            return []
        hessian = _hessian(stats)
        whole = torch.cat([weight for _, weight in mine]) if len(mine) > 1 else mine[0][1]
        solved = gptq(whole, hessian, self._rounding, damp=self.options.damp, act_order=self.options.act_order)
        results, low = [], 0
        how = "round-to-nearest" if solved.damp is None else f"gptq, damp {solved.damp:g}"
        how += f", {solved.dead} dead inputs" if solved.dead else ""
        for unit, weight in mine:
            rows = slice(low, low + unit.n_out)
            grid = Grid(solved.grid.codes[rows], solved.grid.scales[rows], solved.grid.zeros[rows], self.options.bits,
                        self.options.group)  # fmt: skip
            energy = _energy(weight, hessian)
            error, nearest = float(solved.losses[rows].sum()), float(solved.nearest[rows].sum())
            made, fell_back = self._stored(grid), solved.damp is None
            results.append(Result(unit, made, error / energy, nearest / energy, how, fell_back, energy))
            low += unit.n_out
        return results

    def _fp8(self, unit: Unit, weight: Tensor, stats: Stats) -> Result:
        kind = fp8_kind(self.options)
        numbers, scale = widths.fp8(weight, kind, self._scales)
        input_scale = None
        if self.options.fp8_mode == "static":
            input_scale = (stats.most.amax() / widths.FP8_MOST).clamp(min=1e-12).reshape(1)
        spread = scale
        if kind == "block":
            spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: unit.n_out, : unit.n_in]
        energy = float(weight.square().sum().clamp(min=1e-30))
        error = float((numbers.float() * spread - weight).square().sum()) / energy
        made = self._stored(Scaled(numbers, scale, input_scale))
        return Result(unit, made, error, error, f"fp8 by {kind}", energy=energy)

    def _fold(
        self, seen: Seen, producer: str, names: Sequence[str], done: Done, columns: dict[str, Tensor],
        how: dict[str, str],
    ) -> None:  # fmt: skip
        """Scales for the linears `names`, from what `producer`, a norm or a linear, makes."""
        found = [(lazy, stats) for lazy, stats in zip(seen.lazies, seen.stats, strict=True)
                 if any(unit.last in names for unit in lazy.units)]  # fmt: skip
        if len(found) != 1:
            return
        lazy, stats = found[0]
        mine = self._parts(lazy)
        if len(mine) != len(lazy.units) or any(unit.last not in names for unit in lazy.units):
            return  # a neighbour that stays as it is would see scaled inputs
        norm = next((name for name in seen.vectors if name.rsplit(".", 1)[-1] == producer), None)
        source = next((unit for other in seen.lazies for unit, _ in self._parts(other) if unit.last == producer), None)
        if norm is None and source is None:
            return
        width = lazy.n_in if norm is not None or source is None else source.n_out
        owner = self._owner(width, lazy.n_in)
        if owner is None:
            return
        scales, how_made = self._search([weight for _, weight in mine], stats, owner, width)
        if norm is not None:
            done.vectors[norm], scales = self._into(seen.vectors[norm], scales)
        elif source is not None:
            done.rows[source.name] = scales
        for unit, _ in mine:
            columns[unit.name], how[unit.name] = scales[owner], how_made

    def _search(self, weights: list[Tensor], stats: Stats, owner: Tensor, width: int) -> tuple[Tensor, str]:
        if self.options.method == "awq":
            found = find_scales(weights, _hessian(stats), stats.mean, self._rounding, owner, width)
            same = found.loss == found.plain
            return found.scales, "no scales" if same else f"scales {'duo ' if found.duo else ''}{found.ratio:g}"
        smoothed = widths.smooth(weights, stats.sample, stats.most, owner, width, self._scales)
        return smoothed.scales, "no scales" if smoothed.alpha is None else f"alpha {smoothed.alpha:g}"

    def _owner(self, made: int, used: int) -> Tensor | None:
        """Which of `made` outputs each of `used` inputs is: itself, or, under grouped-query attention, its head's."""
        if made == used:
            return torch.arange(used)
        dim, heads, kv_heads = self._config.head_dim, self._config.heads, self._config.kv_heads
        if made != kv_heads * dim or used != heads * dim:
            return None
        head = torch.arange(heads) // (heads // kv_heads)
        owner: Tensor = (head[:, None] * dim + torch.arange(dim)).flatten()
        return owner

    def _into(self, stored: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """A norm's weight divided by `scales`, as stored, and by what that divided it after rounding."""
        offset = 1.0 if getattr(self._config, "unit_offset", False) else 0.0
        old = stored.float() + offset
        new = (old / scales - offset).to(stored.dtype)
        rounded = new.float() + offset
        exact = torch.where((old != 0) & (rounded != 0), old / rounded, scales)
        return new, exact

    def _awq(self, unit: Unit, weight: Tensor, stats: Stats, scales: Tensor, rows: Tensor, how: str) -> Result:
        hessian = _hessian(stats)
        clipped = clip(weight, scales, rows, hessian, self._rounding)
        energy, back = _energy(weight, hessian), rows.square()
        error, nearest = float((clipped.losses * back).sum()), float((clipped.nearest * back).sum())
        made = self._stored(clipped.grid)
        return Result(unit, made, error / energy, nearest / energy, f"awq, {how}", energy=energy)

    def _int8(self, unit: Unit, weight: Tensor, stats: Stats, scales: Tensor, rows: Tensor, how: str) -> Result:
        weight = weight.float()
        codes, scale = widths.int8_rows(weight * scales / rows[:, None], self._scales)
        x = stats.sample
        wanted = x @ weight.T
        energy = float(wanted.square().sum().clamp(min=1e-30))
        made = widths.rounded_rows(x / scales) @ (codes.float() * scale * rows[:, None]).T
        plain, plain_scale = widths.int8_rows(weight, self._scales)
        nearest = widths.rounded_rows(x) @ (plain.float() * plain_scale).T
        losses = [float((outputs - wanted).square().sum()) / energy for outputs in (made, nearest)]
        return Result(unit, self._stored(Scaled(codes, scale)), losses[0], losses[1], f"int8, {how}", energy=energy)


def _hessian(stats: Stats) -> Gram:
    assert stats.hessian is not None
    return stats.hessian


def _energy(weight: Tensor, hessian: Gram) -> float:
    """The outputs' squares over the calibration tokens."""
    return max(float(losses_of(weight, hessian).sum()), 1e-30)
