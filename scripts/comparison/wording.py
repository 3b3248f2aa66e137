"""How numbers and runs are written, in the table, the sentences and the figure alike."""

import math
from dataclasses import dataclass

from scripts.comparison.analysis import short_names
from scripts.comparison.curves import DIVERGED
from scripts.comparison.groups import Group, setting_values
from scripts.comparison.runs import printable
from scripts.comparison.statistics import Spread


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
    return "unknown" if number is None else f"{number:,.0f}" if number < 1e15 else f"{number:g}"


def rate(number: float | None) -> str:
    """0.006 as 6e-3, the way papers write a learning rate."""
    if number is None:
        return "-"
    if number == 0:
        return "0"
    digits, exponent = f"{number:.3e}".split("e")
    return f"{float(digits):g}e{int(exponent)}" if int(exponent) else f"{float(digits):g}"


def loss_text(loss: float | None) -> str:
    """1.890, or 1.9e+30 of a run that diverged."""
    return "-" if loss is None else f"{loss:.3f}" if not abs(loss) >= DIVERGED else f"{loss:.1e}"


def shortened(texts: list[str], room: int) -> list[str]:
    """Long ones without their middle, in this room or as little more as keeps different ones different."""
    for width in range(room, max(map(len, texts), default=0)):
        short = [
            t if len(t) <= width else t[: width // 2 - 2] + "..." + t[len(t) - (width - width // 2 - 1) :]
            for t in texts
        ]
        if len(set(short)) == len(set(texts)):
            return short
    return texts


def loss_name(loss: float) -> str:
    """A loss that was asked for: 2.9, with as many digits as tell it from any other."""
    return short if float(short := f"{loss:g}") == loss else repr(loss)


def duration(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def times(speed_up: float | None) -> str:
    return "-" if speed_up is None else f"{speed_up:.2f}x"


def spread_text(value: Spread | None) -> str:
    """1.890, or 1.890±.004 where several seeds stand behind it."""
    if value is None:
        return "-"
    return loss_text(value.mean) + ("" if value.sd is None else f"±{loss_text(value.sd)}".replace("±0.", "±."))


def tokens_unit(tokens: float) -> tuple[float, str]:
    """The unit in which this many tokens are written on an axis: how many it has, and its letter."""
    return (1e9, "B") if tokens >= 1e9 else (1e6, "M") if tokens >= 1e5 else (1e3, "K")


@dataclass(frozen=True)
class Names:
    """What groups are called: a run by its folder, several by their setting, either by the optimizer if it will do."""

    rows: list[str]  # in the table and its notes: as much as is needed to find the run
    sentences: list[str]
    legend: list[str]


def names(groups: list[Group]) -> Names:
    optimizers = [group.first.optimizer for group in groups]
    only_optimizers = len(set(optimizers)) == len(groups)
    folders = short_names([run for group in groups for run in group.runs])
    settings = _setting_names(groups, folders)
    rows, sentences, legend, start = [], [], [], 0
    for group, optimizer, setting in zip(groups, optimizers, settings, strict=True):
        folder, n = folders[start], len(group.runs)
        start += n
        seeds = f"{n} seeds"
        rows.append(f"{setting} ({seeds})" if n > 1 else folder)
        if only_optimizers:
            sentences.append(optimizer)
            label = f"{optimizer}, {seeds}" if n > 1 else optimizer
        else:
            sentences.append(setting if n > 1 else folder)
            lr = rate(group.first.number("learning_rate"))
            label = f"{setting}, {seeds}" if n > 1 else f"{optimizer}, lr {lr} ({folder})"
        legend.append(label + ("" if group.finished else f" (at update {group.updates:,.0f})"))
    return Names(rows, sentences, legend)


def _setting_names(groups: list[Group], folders: list[str]) -> list[str]:
    """The optimizer, with the first settings that tell it from other groups of that optimizer. Where none does, as with
    other data, the name of a run.
    """
    result, start = [], 0
    for group in groups:
        values, folder = setting_values(group.first.config), folders[start]
        start += len(group.runs)
        # A seed that is kept apart is called by its folder.
        rivals = [setting_values(other.first.config) for other in groups if other is not group and not other.apart]
        rivals = [other for other in rivals if other["optimizer"] == values["optimizer"]]
        name = group.first.optimizer
        for key, value in values.items():
            if any(other[key] != value for other in rivals):
                name += f", {'lr' if key == 'learning_rate' else key} {_value_text(value)}"
                rivals = [other for other in rivals if other[key] == value]
        result.append(f"{name}, {folder} and others" if rivals and len(group.runs) > 1 else name)
    return result


def _value_text(value: object) -> str:
    return rate(value) if isinstance(value, float) else printable(str(value))
