"""The plots of a study: loss against learning rate, and final losses with the intervals of their differences."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.comparison.style import style
from scripts.studying.outcome import Outcome


def draw_tuning(found: list[Outcome], title: str) -> Figure:
    """Tuning curves, a panel a size; a run that diverged is an x at the upper edge."""
    figure, panels = _panels(found, title, width=8.0, height=5.0)
    looks = {name: style(k) for k, name in enumerate(dict.fromkeys(each.tuning.arm for each in found))}
    for panel, (size, members) in zip(panels, _by_size(found).items(), strict=True):
        for each in members:
            tuning, look = each.tuning, looks[each.tuning.arm]
            points = [(r, loss) for r, loss in zip(tuning.rates, tuning.losses, strict=True) if loss is not None]
            finite = [(r, loss) for r, loss in points if np.isfinite(loss)]
            marks = dict(color=look.colour, marker=look.marker, markersize=5)
            x, y = [r for r, _ in finite], [loss for _, loss in finite]
            panel.plot(x, y, linestyle=look.line, linewidth=1.5, label=tuning.arm, **marks)
            if tuning.best is not None:
                at = [loss for r, loss in finite if r == tuning.best]
                panel.plot(
                    [tuning.best], at, linestyle="", markersize=11, fillstyle="none", marker="o", color=look.colour
                )
            gone = [r for r, loss in points if not np.isfinite(loss)]
            panel.scatter(
                gone,
                [0.985] * len(gone),
                marker="x",
                color=look.colour,
                transform=panel.get_xaxis_transform(),
                clip_on=False,
            ).set_in_layout(False)
        panel.set_xscale("log")
        _label(panel, size, "peak learning rate", "validation loss at the end (nats per token)")
        panel.legend(fontsize=8)
    figure.supxlabel("one seed; circles: the best; x at the upper edge: diverged", fontsize=9)
    return figure


def draw_final(found: list[Outcome], title: str) -> Figure:
    """Per arm a point a seed and the mean, beside it the paired difference to its rival with its 95 % interval."""
    sizes = _by_size(found)
    figure = Figure(figsize=(11, 1.6 + 0.45 * len(found) + 0.9 * (len(sizes) - 1)), layout="constrained")
    figure.suptitle(title, parse_math=False)
    heights = [len(members) for members in sizes.values()]
    grid = figure.subplots(len(sizes), 2, squeeze=False, sharey="row", height_ratios=heights)
    for (left, right), (size, members) in zip(grid, sizes.items(), strict=True):
        for row, each in enumerate(members):
            look = style(row)
            known = [loss for loss in each.losses if np.isfinite(loss)]
            left.plot(known, [row] * len(known), "o", color=look.colour, alpha=0.5, markersize=5)
            if known:
                left.plot([np.mean(known)], [row], "|", color=look.colour, markersize=16, markeredgewidth=2)
            if each.difference is not None:
                low, high = each.difference.mean - each.difference.low, each.difference.high - each.difference.mean
                right.errorbar(
                    [each.difference.mean], [row], xerr=[[low], [high]], fmt="o", color=look.colour, capsize=4
                )
                right.annotate(
                    f"to {each.against}", (each.difference.mean, row), (0, 7), textcoords="offset points", fontsize=7,
                    ha="center",
                )  # fmt: skip
        left.set_yticks(range(len(members)), [each.tuning.arm for each in members])
        left.set_ylim(len(members) - 0.4, -0.6)
        right.axvline(0, color="#555555", linewidth=0.8)
        _label(left, size, "validation loss at the end (nats per token)", "")
        _label(right, size, "paired difference, 95 % interval (negative: lower loss)", "")
    figure.supxlabel("points: one seed each at the arm's best learning rate; bars: their mean", fontsize=9)
    return figure


def _by_size(found: list[Outcome]) -> dict[str | None, list[Outcome]]:
    sizes: dict[str | None, list[Outcome]] = {}
    for each in found:
        sizes.setdefault(each.tuning.size, []).append(each)
    return sizes


def _panels(found: list[Outcome], title: str, width: float, height: float) -> tuple[Figure, list[Axes]]:
    number = len(_by_size(found))
    figure = Figure(figsize=(width * number, height), layout="constrained")
    figure.suptitle(title, parse_math=False)
    return figure, list(figure.subplots(1, number, squeeze=False)[0])


def _label(panel: Axes, size: str | None, x: str, y: str) -> None:
    panel.set(xlabel=x, ylabel=y, title=size or "")
    panel.grid(True, color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
