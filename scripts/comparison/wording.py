"""How numbers and runs are written, in the table, the sentences and the figure alike."""

import math

from scripts.comparison.analysis import short_names
from scripts.comparison.runs import Run


def amount(number: float | None) -> str:
    """1234567 as 1.23M: tokens and parameters."""
    if number is None or not math.isfinite(number):
        return "-"
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e5, "M"), (1e3, "K")):
        if number >= size:
            value = number / (1e6 if suffix == "M" else size)
            return f"{value:.2f}{suffix}" if value < 10 else f"{value:.1f}{suffix}"
    return f"{number:.0f}"


def exact(number: float | None) -> str:
    """All digits: rounded ones would hide that two runs differ."""
    return "unknown" if number is None else f"{number:,.0f}"


def rate(number: float | None) -> str:
    """0.006 as 6e-3, the way papers write a learning rate."""
    if number is None:
        return "-"
    if number == 0:
        return "0"
    digits, exponent = f"{number:.3e}".split("e")
    return f"{float(digits):g}e{int(exponent)}" if int(exponent) else f"{float(digits):g}"


def loss_text(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _optimizers_differ(runs: list[Run]) -> bool:
    return len({run.optimizer for run in runs}) == len(runs)


def sentence_names(runs: list[Run]) -> list[str]:
    """Optimizers where they name the runs, else the names in the table's first column."""
    return [run.optimizer for run in runs] if _optimizers_differ(runs) else short_names(runs)


def legend_labels(runs: list[Run]) -> list[str]:
    if _optimizers_differ(runs):
        return [run.optimizer for run in runs]
    names = short_names(runs)
    return [
        f"{run.optimizer}, lr {rate(run.number('learning_rate'))} ({name})"
        for run, name in zip(runs, names, strict=True)
    ]
