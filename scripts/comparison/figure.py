"""The figure: validation and training loss, against tokens and against training time.

All four panels share one axis of loss. It shows the part where runs can be told apart: the first updates, from
ln(vocabulary) down, would press everything after them flat, so they are cut off, and the legend names what lies
wholly beyond the axis. Colours are Okabe and Ito's, which the colour-blind can tell apart; line
styles and markers say the same again for black-and-white print.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from scripts.comparison.analysis import smooth
from scripts.comparison.runs import Curve, Floats, Run
from scripts.comparison.wording import amount, exact, legend_labels

# Okabe and Ito without yellow, which is hardly seen on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Solid, and dashes as (offset, (ink, gap, ...)).
LINE_STYLES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (6, 1.5, 1, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
UNIGRAM_STYLE: dict[str, Any] = {"color": "#555555", "linestyle": (0, (1, 2)), "linewidth": 1.6}
MARKERS_A_LINE = 12

SMOOTHED_PART = 0.02  # of a run's training rows
FEWEST_SMOOTHED = 5
SMOOTHING_TEXT = (
    f"training loss: faint lines are single rows, strong lines the running mean over "
    f"{SMOOTHED_PART:.0%} of a run's rows (at least {FEWEST_SMOOTHED})"
)

# Losses before this part of the longest run don't count when the axis of loss is chosen.
EARLY_PART = 0.1


@dataclass(frozen=True)
class Style:
    colour: str
    line: Any  # what matplotlib takes as a line style
    marker: str


def style(number: int) -> Style:
    """The look of a run: the three cycles have different lengths, so 28 runs differ in at least one."""
    return Style(
        COLOURS[number % len(COLOURS)],
        LINE_STYLES[number % len(LINE_STYLES)],
        MARKERS[number % len(MARKERS)],
    )


def draw(runs: list[Run], title: str | None = None) -> Figure:
    """The whole figure, ready to be saved."""
    means = [smoothed_training(run.train) for run in runs]
    unigrams = sorted({round(run.unigram_loss, 6) for run in runs if run.unigram_loss is not None})
    limits = loss_limits([run.evals for run in runs], means, unigrams)
    seconds, time_unit = time_scale(max(run.time for run in runs))
    figure = Figure(figsize=(12, 9), layout="constrained")
    figure.suptitle(title or default_title(runs), fontsize=14, parse_math=False)
    (val_tokens, val_time), (train_tokens, train_time) = figure.subplots(2, 2, sharey=True, sharex="col")

    for number, (run, mean) in enumerate(zip(runs, means, strict=True)):
        look = style(number)
        _faint_line(train_tokens, run.train.tokens, run.train.loss, look)
        _faint_line(train_time, run.train.time / seconds, run.train.loss, look)
        _line(val_tokens, run.evals.tokens, run.evals.loss, look)
        _line(val_time, run.evals.time / seconds, run.evals.loss, look)
        _line(train_tokens, mean.tokens, mean.loss, look)
        _line(train_time, mean.time / seconds, mean.loss, look)

    for panel, what, x_label in (
        (val_tokens, "validation", "tokens trained"),
        (val_time, "validation", f"training time ({time_unit})"),
        (train_tokens, "training", "tokens trained"),
        (train_time, "training", f"training time ({time_unit})"),
    ):
        panel.set_title(f"{what.capitalize()} loss", fontsize=12)
        panel.set(xlabel=x_label, ylabel=f"{what} loss (nats per token)")
        panel.tick_params(labelleft=True, labelbottom=True)  # though panels share axes
        panel.grid(True, color="#dddddd", linewidth=0.6)
        _unigram_lines(panel, unigrams, limits)
    if limits:
        val_tokens.set_ylim(*limits)
    val_tokens.xaxis.set_major_formatter(FuncFormatter(token_ticks(max(run.tokens for run in runs))))
    _legend(figure, runs, means, unigrams, limits)
    return figure


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def default_title(runs: list[Run]) -> str:
    """The data sets and the sizes."""
    facts = [
        ", ".join(_distinct([run.dataset or "unknown data" for run in runs])),
        ", ".join(_distinct([amount(run.number("parameters")) for run in runs])) + " parameters",
        ", ".join(_distinct([exact(run.number("tokens_per_update")) for run in runs])) + " tokens an update",
    ]
    return " · ".join(fact for fact in facts if not fact.startswith(("- ", "unknown ")))


def smoothed_training(train: Curve) -> Curve:
    window = max(FEWEST_SMOOTHED, round(SMOOTHED_PART * len(train)))
    return Curve(train.updates, train.tokens, train.time, smooth(train.loss, window))


def loss_limits(evals: list[Curve], means: list[Curve], unigrams: list[float]) -> tuple[float, float] | None:
    """The range of the axis of loss, or None where there is nothing to draw.

    From the lowest loss up to what the runs had reached after the first tenth of the tokens; up to the unigram line
    where that doesn't make the range much larger, and not beyond it: a run above it has learnt next to nothing.
    """
    finite = [curve.finite() for curve in evals + means if len(curve.finite())]
    if not finite:
        return None
    start = EARLY_PART * max(float(curve.tokens.max()) for curve in finite)
    if any(map(len, evals)) and not any(np.any(curve.tokens >= start) for curve in evals):
        start = 0  # the runs have hardly begun: show all there is
    late = [curve.loss[curve.tokens >= start] for curve in finite if np.any(curve.tokens >= start)]
    low = min(float(curve.loss.min()) for curve in finite)
    high = max(float(np.quantile(losses, 0.95, method="higher")) for losses in late)
    if unigrams and max(unigrams) <= low:
        low = max(unigrams)
    elif unigrams and max(unigrams) - low <= 3 * (high - low):
        high = max(unigrams)
    else:
        high = low + 1.4 * (high - low)
    pad = max(0.06 * (high - low), 0.02)
    return low - pad, high + pad


def time_scale(longest: float) -> tuple[int, str]:
    """The unit of an axis that reaches this many seconds: how many seconds it has, and its name."""
    return (1, "s") if longest < 180 else (60, "min") if longest < 3 * 3600 else (3600, "h")


def token_ticks(longest: float) -> Callable[[float, int], str]:
    """Writes tokens in the unit that fits the whole axis: 0.5M, 1M, 1.5M."""
    size, suffix = (1e9, "B") if longest >= 1e9 else (1e6, "M") if longest >= 1e5 else (1e3, "K")
    return lambda tokens, position: f"{tokens / size:g}{suffix}" if tokens else "0"


def _line(panel: Axes, x: Floats, y: Floats, look: Style) -> None:
    panel.plot(
        *(x, y),
        color=look.colour,
        linestyle=look.line,
        linewidth=1.7,
        marker=look.marker,
        markersize=5,
        markevery=max(1, len(x) // MARKERS_A_LINE),
        zorder=3,
    )


def _faint_line(panel: Axes, x: Floats, y: Floats, look: Style) -> None:
    panel.plot(x, y, color=look.colour, alpha=0.22, linewidth=0.7, zorder=1)


def _unigram_lines(panel: Axes, unigrams: list[float], limits: tuple[float, float] | None) -> None:
    for loss in unigrams:
        panel.axhline(loss, zorder=2, **UNIGRAM_STYLE)
        # At the right, where every curve that learns is far below.
        if limits and limits[0] < loss < limits[1]:
            panel.annotate(
                *("unigram model", (0.99, loss)),
                xycoords=panel.get_yaxis_transform(),
                xytext=(0, -3),
                textcoords="offset points",
                ha="right",
                va="top",
                fontsize=9,
                color="#555555",
            )


def _plain(text: str) -> str:
    """A dollar sign in a folder's name does not begin a formula."""
    return text.replace("$", r"\$")


def _legend(
    figure: Figure,
    runs: list[Run],
    means: list[Curve],
    unigrams: list[float],
    limits: tuple[float, float] | None,
) -> None:
    """One legend under all panels, where it covers no curve."""
    handles = []
    for number, (label, run, mean) in enumerate(zip(legend_labels(runs), runs, means, strict=True)):
        look = style(number)
        losses = np.concatenate([run.evals.finite().loss, mean.finite().loss])
        text = label + _beyond(losses, limits)
        handles.append(
            Line2D([], [], color=look.colour, linestyle=look.line, marker=look.marker, markersize=5, label=_plain(text))
        )
    for loss in unigrams:
        text = f"unigram model, {loss:.2f}" + _beyond(np.array([loss]), limits)
        handles.append(Line2D([], [], label=_plain(text), **UNIGRAM_STYLE))
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(len(handles), 4, 150 // (longest + 8)))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        fontsize=10,
        handlelength=3.5,
        title=SMOOTHING_TEXT,
        title_fontsize=9,
    )


def _beyond(losses: Floats, limits: tuple[float, float] | None) -> str:
    return " (above the axis)" if limits and len(losses) and losses.min() > limits[1] else ""


def _distinct(values: list[str]) -> list[str]:
    return list(dict.fromkeys(values))
