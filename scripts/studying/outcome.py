"""The outcome of a study: what each arm came to at each size, set against its rival over paired seeds."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from scripts.comparison.analysis import throughput
from scripts.comparison.groups import Group, difference
from scripts.comparison.milestones import Race, race
from scripts.comparison.runs import Run
from scripts.comparison.statistics import Difference, Spread, spread
from scripts.comparison.wording import loss_text, rate, spread_text, times
from scripts.studying.cells import Cell
from scripts.studying.plan import Plan, Tuning, neighbours
from scripts.studying.pool import Store


@dataclass(frozen=True)
class Outcome:
    """Of an arm at a size. Losses in nats per token at the end of training; what is not known is None."""

    tuning: Tuning
    seeds: tuple[int, ...]
    """those that are done at the best learning rate"""
    losses: tuple[float, ...]
    """of these; infinite where it diverged"""
    final: Spread | None
    against: str
    difference: Difference | None
    """to `against`, at its own best learning rate, over the seeds that both have"""
    race: Race | None
    """tokens to the mean final loss of `against`"""
    half: float | None
    """how much higher the loss is at half the best learning rate, over the seeds that are done there"""
    double: float | None
    seconds_per_update: float | None
    """the median of runs' medians, evaluations and checkpoints not counted"""

    @property
    def tokens_part(self) -> float | None:
        """Tokens to the final loss of `against`, as a part of all that it took."""
        return self.race.tokens / self.race.other_tokens if self.race and self.race.tokens else None


def outcomes(store: Store) -> list[Outcome]:
    """All that can be told from what is done, in the study's order."""
    plan = store.plan()
    return [
        _outcome(store, plan, plan.tunings[size, arm]) for size in _sizes(store) for arm in store.study.arms_of(size)
    ]


def _sizes(store: Store) -> list[str | None]:
    return [None, *store.study.sizes]


def _outcome(store: Store, plan: Plan, tuning: Tuning) -> Outcome:
    done = _done(store, plan.best_cells(tuning.size, tuning.arm))
    losses = [loss for _, _, loss in done]
    rival = store.study.rival(tuning.arm)
    ours, theirs = _group(done), None
    if rival != tuning.arm and (tuning.size, rival) in plan.tunings:
        theirs = _group(_done(store, plan.best_cells(tuning.size, rival)))
    paired = difference(ours, theirs) if ours and theirs else None
    run_race = None
    if ours and theirs and ours.evaluated and theirs.evaluated:
        run_race = race(ours, theirs, float(theirs.evals.loss[-1]), float(theirs.evals.tokens[-1]))
    half, double = (
        _excess(store, plan, tuning, value) for value in (neighbours(tuning.best) if tuning.best else (None, None))
    )
    return Outcome(
        *(tuning, tuple(cell.seed for cell, _, _ in done), tuple(losses)),
        *(spread(list(losses)) if losses and np.isfinite(losses).all() else None, rival, paired[0] if paired else None),
        *(run_race, half, double, _seconds_per_update([run for _, run, _ in done])),
    )


def _done(store: Store, cells: list[Cell]) -> list[tuple[Cell, Run, float]]:
    """Those of the cells that are done."""
    states = [(cell, store.state(cell)) for cell in cells]
    return [(cell, state.run, state.loss) for cell, state in states if state.run is not None and state.loss is not None]


def _group(done: list[tuple[Cell, Run, float]]) -> Group | None:
    """The runs that did not diverge as one group."""
    runs = tuple(run for _, run, loss in done if math.isfinite(loss))
    return Group(runs) if runs else None


def _excess(store: Store, plan: Plan, tuning: Tuning, value: float | None) -> float | None:
    """The mean over seeds of the loss at a learning rate less that at the best one; infinite where it diverged."""
    if value is None:
        return None
    at_best = {cell.seed: loss for cell, _, loss in _done(store, plan.best_cells(tuning.size, tuning.arm))}
    cells = plan.seeds(tuning.size, tuning.arm, value)
    if value in tuning.rates:
        place = tuning.rates.index(value)
        cells = cells or [
            Cell(store.study, tuning.size, tuning.arm, tuning.rates[place], plan.tuning_seed(tuning.size))
        ]
    pairs = [loss - at_best[cell.seed] for cell, _, loss in _done(store, cells) if cell.seed in at_best]
    return float(np.mean(pairs)) if pairs else None


def _seconds_per_update(runs: list[Run]) -> float | None:
    seconds = []
    for run in runs:
        speed, tokens = throughput(run.tokens_per_sec), run.number("tokens_per_update")
        if speed and tokens:
            seconds.append(tokens / speed)
    return float(np.median(seconds)) if seconds else None


HEADS = (
    "arm",
    "best lr",
    "rates",
    "seeds",
    "final loss",
    "difference",
    "95 % interval",
    "tokens",
    "at lr/2",
    "at 2 lr",
)
HEADS = (*HEADS, "ms/update")


def table(found: list[Outcome]) -> list[str]:
    """A row an arm, and what the columns mean."""
    rows = [HEADS, *(_row(each) for each in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if k == 0 else cell.rjust(w) for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * len(lines[0]))
    return [
        *lines,
        "",
        "Loss in nats per token at the end of training, mean±standard deviation over seeds. difference: to the arm",
        "in brackets, paired by seeds, with Student's interval; negative is lower. tokens: needed for that arm's mean",
        "final loss, as a part of all that it took. at lr/2, at 2 lr: how much higher the loss is there.",
        "*: at the grid's edge.",
    ]


def _row(each: Outcome) -> tuple[str, ...]:
    tuning, paired = each.tuning, each.difference
    best = "-" if tuning.best is None else rate(tuning.best) + ("*" if tuning.at_edge else "")
    against = f" ({each.against})" if paired else ""
    done = sum(loss is not None for loss in tuning.losses)
    final = "diverged" if any(map(math.isinf, each.losses)) else spread_text(each.final)
    missed = each.race is not None and each.race.tokens is None
    return (
        *(tuning.name, best, f"{done}/{len(tuning.rates)}", str(len(each.seeds)), final),
        "-" if paired is None else f"{paired.mean:+.4f}{against}",
        "-" if paired is None else f"{paired.low:+.4f} to {paired.high:+.4f}",
        "not reached" if missed else times(each.tokens_part),
        *(_excess_text(value) for value in (each.half, each.double)),
        "-" if each.seconds_per_update is None else f"{1000 * each.seconds_per_update:.1f}",
    )


def _excess_text(value: float | None) -> str:
    return "-" if value is None else "diverged" if math.isinf(value) else f"+{loss_text(value)}".replace("+-", "-")


def as_json(store: Store, found: list[Outcome]) -> dict[str, Any]:
    """The unrounded numbers. What is unknown, or not a number, is null."""
    return {
        "study": store.study.name,
        "baseline": store.study.baseline,
        "complete": store.plan().complete,
        "arms": [_clean(_record(each)) for each in found],
    }


def _record(each: Outcome) -> dict[str, Any]:
    tuning = each.tuning
    return {
        "size": tuning.size,
        "arm": tuning.arm,
        "best_learning_rate": tuning.best,
        "at_edge": tuning.at_edge,
        "tuning": [{"learning_rate": r, "loss": loss} for r, loss in zip(tuning.rates, tuning.losses, strict=True)],
        "added_learning_rates": list(tuning.added),
        "seeds": list(each.seeds),
        "final_losses": list(each.losses),
        "final_loss": asdict(each.final) if each.final else None,
        "against": each.against,
        "difference": asdict(each.difference) if each.difference else None,
        "tokens_to_loss_of_against": each.race.tokens if each.race else None,
        "tokens_of_against": each.race.other_tokens if each.race else None,
        "excess_at_half": each.half,
        "excess_at_double": each.double,
        "seconds_per_update": each.seconds_per_update,
    }


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clean(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_clean(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
