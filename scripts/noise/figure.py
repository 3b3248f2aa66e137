"""The figure of `scripts/gradient_noise.py`: errors of all estimates, a column of panels a measured point."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from scripts.comparison.figure import save
from scripts.comparison.style import COLOURS
from scripts.noise.statistics import ALL, AVERAGE, SINGLE, Tree

LAG, NOISE, PLAIN_GREY = COLOURS[1], COLOURS[5], "#555555"
LABELS = {AVERAGE: "MSE of m / plain momentum's", SINGLE: "MSE of c / the gradient's"}
WIDEST = 2.5  # where the axis of m ends at the latest; longer bars have their length written on them


def draw(points: list[Tree]) -> Figure:
    """Of m the error as a bar of bias² and variance, above; of c the error alone, on a logarithmic axis, below.
    Estimates that only some of the points have are left out."""
    cases = [case for case in points[0]["kinds"][ALL][AVERAGE] if all(case in p["kinds"][ALL][AVERAGE] for p in points)]
    size = max(6.4, 2 + 2.6 * len(points)), 2 + 0.4 * len(cases)
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06))
    panels = figure.subplots(2, len(points), sharey=True, sharex="row", squeeze=False)
    for (above, below), point in zip(panels.T, points, strict=True):
        figures = point["kinds"][ALL]
        above.set_title(f"{point['name']}, update {point['update']}", fontsize=11)
        _draw_average(above, [figures[AVERAGE][case] for case in cases])
        _draw_single(below, [figures[SINGLE][case] for case in cases])
        for panel, name in ((above, AVERAGE), (below, SINGLE)):
            panel.set_xlabel(LABELS[name], fontsize=9)
            panel.axvline(1, color=PLAIN_GREY, linestyle="--", linewidth=1, zorder=0)
            panel.grid(True, axis="x", color="#dddddd", linewidth=0.6)
            panel.set_axisbelow(True)
            panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_yticks(range(len(cases)), cases)
    panels[0][0].invert_yaxis()
    figure.legend(
        handles=[
            Patch(color=LAG, label="bias² (lag)"),
            Patch(color=NOISE, label="variance"),
            Line2D([], [], color="black", linewidth=1.2, label="± standard error"),
            Line2D([], [], color=PLAIN_GREY, linestyle="--", label="plain"),
        ],
        loc="outside lower center",
        ncols=4,
        fontsize=9,
    )
    return figure


def write(points: list[Tree], path: Path) -> None:
    """Raises OSError where the file cannot be written."""
    save(draw(points), path)


def _draw_average(panel: Axes, rows: list[Tree]) -> None:
    plain = rows[0]["mse"]["value"]
    bias = [max(0.0, row["bias_squared"]["value"] / plain) for row in rows]  # an estimate of nearly 0 can be below it
    variance = [row["variance"]["value"] / plain for row in rows]
    panel.barh(range(len(rows)), bias, color=LAG, height=0.7)
    panel.barh(range(len(rows)), variance, left=bias, color=NOISE, height=0.7)
    _draw_errors(panel, rows)
    panel.set_xlim(0, WIDEST)
    for place, row in enumerate(rows):
        if row["relative_mse"]["value"] > WIDEST:
            text = f"{row['relative_mse']['value']:.3g} "
            panel.text(WIDEST, place, text, ha="right", va="center", fontsize=8, fontweight="bold")


def _draw_single(panel: Axes, rows: list[Tree]) -> None:
    panel.set_xscale("log")
    panel.plot([row["relative_mse"]["value"] for row in rows], range(len(rows)), "o", color=COLOURS[0], markersize=5)
    _draw_errors(panel, rows)


def _draw_errors(panel: Axes, rows: list[Tree]) -> None:
    values, errors = ([row["relative_mse"][name] for row in rows] for name in ("value", "error"))
    panel.errorbar(
        *(values, range(len(rows))), xerr=errors, fmt="none", ecolor="black", elinewidth=1.2, capsize=2, clip_on=True
    )
