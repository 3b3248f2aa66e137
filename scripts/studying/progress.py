"""How far a study is: a line a cell, and how long the rest will take, from what the runs so far took."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scripts.comparison.analysis import throughput
from scripts.comparison.runs import RunError, read_run
from scripts.studying.cells import Cell
from scripts.studying.plan import Plan
from scripts.studying.pool import Pool, Store
from training.metrics import format_duration, read_rows

START = 6.0  # seconds until the first update, assumed
BAR = 20  # characters
EVERY = 60.0  # seconds between lines where the output is no terminal


@dataclass(frozen=True)
class Estimate:
    """Of the rest, in seconds of work of one place; None where no run was measured."""

    seconds: float | None
    cells: int
    to_come: int
    """runs beside them that hang on learning rates which are not known yet; they are counted in `seconds`"""

    def text(self, places: int) -> str:
        runs = f"{self.cells} to run" + (f", about {self.to_come} after those" if self.to_come else "")
        if self.seconds is None:
            return f"{runs}; how long is known when the first runs have been measured"
        return f"{runs}; about {format_duration(self.seconds / places)} with {places} at once"


def estimate(store: Store, plan: Plan, wanted: list[Cell], measured_from: list[Cell]) -> Estimate:
    """What is left to do.

    A run is taken to need as long per update as runs of its arm and size did, else of its size, else in proportion to
    tokens.

    Args:
        wanted: cells that are not done.
        measured_from: cells that may have been measured.
    """
    known: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for cell in measured_from:
        seconds = seconds_per_token(store.path(cell))
        if seconds is not None:
            for key in _keys(cell):
                known[key].append(seconds)
    times = []
    for cell in wanted:
        rates = next((known[key] for key in _keys(cell) if key in known), None)
        if rates is None:
            return Estimate(None, len(wanted), plan.to_come)
        rest = 1 - done_part(store.path(cell), cell)
        times.append(START + float(np.mean(rates)) * _tokens(cell) * rest)
    each = float(np.mean(times)) if times else START
    return Estimate(sum(times) + plan.to_come * each, len(wanted), plan.to_come)


def seconds_per_token(folder: Path) -> float | None:
    """Of a run's training and its evaluations; None where it has not been going long enough to say."""
    try:
        run = read_run(folder)
    except RunError:
        return None
    speed = throughput(run.tokens_per_sec)
    if not speed or run.tokens <= 0:
        return None
    evaluating = sum(row.get("eval_seconds") or 0.0 for row in read_rows(folder / "metrics.jsonl"))
    return 1 / speed + evaluating / run.tokens


def done_part(folder: Path, cell: Cell) -> float:
    """The part of a run's updates that is done, by the last row that it wrote."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            update = json.loads(file.read().splitlines()[-1])["iter"]
        return min(1.0, update / max(1, cell.config.max_iters))
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return 0.0


class Display:
    """Shows the state of a pool: on a terminal bars that are drawn again in place, else a line now and then.

    Args:
        places: runs at once.
    """

    def __init__(self, places: int) -> None:
        self._places, self._drawn, self._last = places, 0, time.monotonic()
        self._terminal = sys.stdout.isatty()

    def tell(self, line: str) -> None:
        """A line that stays."""
        self.clear()
        print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)

    def look(self, pool: Pool) -> None:
        """Shows how it stands, not too often."""
        if time.monotonic() - self._last < (1.0 if self._terminal else EVERY):
            return
        self._last = time.monotonic()
        lines = self.lines(pool)
        if self._terminal:
            self.clear()
            print("\n".join(lines), flush=True)
            self._drawn = len(lines)
        else:
            self.tell("; ".join(line.strip() for line in lines))

    def lines(self, pool: Pool) -> list[str]:
        """A bar for each run that goes on, and one line of the whole."""
        chosen, wanted = pool.chosen(), pool.wanted()
        bars = []
        for each in pool.running:
            part = done_part(pool.store.path(each.cell), each.cell)
            bars.append(f"  [{'#' * round(part * BAR):{BAR}}] {part:4.0%}  {each.cell.name}")
        counts = [(len(chosen) - len(wanted), "done"), (len(pool.running), "running"), (len(pool.failed), "failed")]
        counts.append((len(pool.elsewhere), "at work elsewhere"))
        told = ", ".join(f"{number} {what}" for number, what in counts if number or what == "done")
        rest = estimate(pool.store, pool.plan, wanted, chosen)
        return [*bars, f"{told} of {len(chosen)}; {rest.text(self._places)}"]

    def clear(self) -> None:
        """Takes the bars away."""
        if self._drawn:
            print(f"\x1b[{self._drawn}A\x1b[J", end="", flush=True)
            self._drawn = 0


def _keys(cell: Cell) -> list[tuple[str, ...]]:
    """From the most telling to the least."""
    size = cell.size or ""
    return [(size, cell.arm), (size,)]


def _tokens(cell: Cell) -> int:
    return cell.config.max_iters * cell.config.total_batch_size * cell.config.block_size
