"""Which runs a study wants, given the losses that are known: a pure function, so that whoever starts next, at whatever
point, comes to the same runs.

Each arm's learning rate is tuned with one seed at each size. Where the best is at an edge of the grid, the grid goes on
there. Then the best is run with all seeds, and its half and double with some.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from scripts.comparison.wording import rate
from scripts.studying.cells import Cell
from scripts.studying.declaration import Study, rounded

Losses = Callable[[Cell], float | None]  # the loss of a cell that is done, infinite where it diverged; else None


@dataclass(frozen=True)
class Tuning:
    """How far an arm's learning rate is known at a size."""

    size: str | None
    arm: str
    rates: tuple[float, ...]
    """the grid, as far as it goes now; empty as long as the arm whose best it starts from has none"""
    losses: tuple[float | None, ...]
    """of each rate; None where it is not done"""
    added: tuple[float, ...]
    """the rates beyond the declared grid"""
    best: float | None
    """once all are done; None too where all diverged"""
    at_edge: bool
    """whether the best is at the edge of a grid of several, and the grid may not go on"""

    @property
    def done(self) -> bool:
        return bool(self.rates) and None not in self.losses

    @property
    def name(self) -> str:
        return f"{self.size}-{self.arm}" if self.size is not None else self.arm

    @property
    def notes(self) -> list[str]:
        """What has to be said of the grid."""
        lines = []
        if self.added:
            rates = ", ".join(rate(value) for value in self.added)
            lines.append(f"{self.name}: the best learning rate was at the grid's edge, so the grid goes on: {rates}")
        if self.at_edge and self.best is not None:
            lines.append(f"{self.name}: the best learning rate, {rate(self.best)}, is at the grid's edge")
        if self.done and self.best is None:
            lines.append(f"{self.name}: all learning rates diverged")
        return lines


class Plan:
    """The runs that a study wants now.

    Args:
        study: what is declared.
        losses: what is known.
    """

    def __init__(self, study: Study, losses: Losses) -> None:
        self.study, self._losses = study, losses
        self.tunings: dict[tuple[str | None, str], Tuning] = {}
        """by size and arm; the first size is None"""
        for size in (None, *study.sizes):
            for arm in sorted(study.arms_of(size), key=lambda name: study.arms[name].around is not None):
                self.tunings[size, arm] = self._tune(size, arm)

    @property
    def cells(self) -> list[Cell]:
        """All that are wanted, tuning first, each once; of those that hang on a learning rate which is not known yet
        none."""
        tuning, final = [], []
        for (size, arm), found in self.tunings.items():
            tuning += [self._tuning_cell(size, arm, value) for value in found.rates]
            final += [cell for value in self._around(found) for cell in self.seeds(size, arm, value)]
        return list(dict.fromkeys(tuning + final))

    @property
    def to_come(self) -> int:
        """How many runs will be wanted when learning rates are known that are not yet, without extended grids."""
        missing = [found for found in self.tunings.values() if not found.done]
        grids = sum(self._grid_length(found.size, found.arm) for found in missing if not found.rates)
        return grids + sum(len(self.study.seeds_of(found.size)) - self._shared(found.size) for found in missing)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return self.to_come == 0 and all(self._losses(cell) is not None for cell in self.cells)

    @property
    def notes(self) -> list[str]:
        return [line for found in self.tunings.values() for line in found.notes]

    def best_cells(self, size: str | None, arm: str) -> list[Cell]:
        """One for each seed at the arm's best learning rate; none where that is not known."""
        best = self.tunings[size, arm].best
        return [] if best is None else [Cell(self.study, size, arm, best, seed) for seed in self.study.seeds_of(size)]

    def seeds(self, size: str | None, arm: str, value: float) -> list[Cell]:
        """The runs of one learning rate beside tuning: all seeds at the best one, some at its half and double."""
        seeds = self.study.seeds_of(size)
        if value != self.tunings[size, arm].best:
            seeds = seeds[: self.study.sensitivity_seeds]
        return [Cell(self.study, size, arm, value, seed) for seed in seeds]

    def _around(self, found: Tuning) -> list[float]:
        """The best learning rate, and what its sensitivity is told by."""
        if found.best is None:
            return []
        others = neighbours(found.best) if self.study.sensitivity_seeds and len(found.rates) > 1 else ()
        return [found.best, *others]

    def _tune(self, size: str | None, arm: str) -> Tuning:
        grid = self._declared(size, arm)
        rates, added, room = sorted(grid), [], {True: self.study.extend, False: self.study.extend}
        while True:
            losses = [self._losses(self._tuning_cell(size, arm, value)) for value in rates]
            known = [loss for loss in losses if loss is not None]
            if not rates or len(known) < len(losses) or math.isinf(min(known)):
                best, at_edge = None, False
                break
            place = known.index(min(known))
            best, low = rates[place], place == 0
            at_edge = len(rates) > 1 and place in (0, len(rates) - 1)
            if not at_edge or room[low] == 0:
                break
            room[low] -= 1
            added.append(_next(rates, low))
            rates = sorted([*rates, added[-1]])
        return Tuning(size, arm, tuple(rates), tuple(losses), tuple(sorted(added)), best, at_edge)

    def _declared(self, size: str | None, arm: str) -> list[float]:
        """The declared grid; empty as long as it hangs on a best learning rate that is not known."""
        declared, other = self.study.arms[arm], None
        factors = declared.factors
        if size is not None and self.study.sizes[size].factors is not None:
            other, factors = (None, arm), self.study.sizes[size].factors or ()
        elif declared.around is not None:
            other = (size, declared.around)
        if other is None:
            return list(declared.learning_rates or ())
        start = self.tunings[other].best if other in self.tunings else None
        return sorted({rounded(start * factor) for factor in factors}) if start is not None else []

    def _grid_length(self, size: str | None, arm: str) -> int:
        factors = self.study.sizes[size].factors if size is not None else None
        return len(factors or self.study.arms[arm].learning_rates or self.study.arms[arm].factors)

    def _shared(self, size: str | None) -> int:
        """How many of the seeds at the best learning rate are there from tuning."""
        return int(self.tuning_seed(size) in self.study.seeds_of(size))

    def tuning_seed(self, size: str | None) -> int:
        """The seed with which learning rates are tried."""
        seed = self.study.tuning_seed
        return self.study.seeds_of(size)[0] if seed is None else seed

    def _tuning_cell(self, size: str | None, arm: str, value: float) -> Cell:
        return Cell(self.study, size, arm, value, self.tuning_seed(size))


def neighbours(best: float) -> tuple[float, float]:
    """Half and double of a learning rate."""
    return rounded(best / 2), rounded(best * 2)


def _next(rates: list[float], low: bool) -> float:
    """The learning rate beyond an edge, as far from it in proportion as its neighbour is on the other side."""
    return rounded(rates[0] ** 2 / rates[1]) if low else rounded(rates[-1] ** 2 / rates[-2])
