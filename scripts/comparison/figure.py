"""The figure: validation and training loss, against tokens and against training time.

All four panels share one axis of loss. It shows the part where runs can be told apart: the first updates, from
ln(vocabulary) down, would press everything after them flat, so they are cut off, and the legend names what lies
wholly beyond the axis. Several seeds are a mean, a band from the lowest to the highest of them, and a faint line each.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from scripts.comparison.curves import DIVERGED, FEWEST_SMOOTHED, SMOOTHED_PART, Curve, Floats, smoothed, thinned
from scripts.comparison.groups import Group
from scripts.comparison.published import Published
from scripts.comparison.style import (
    GREYS,
    PUBLISHED_LINE_STYLES,
    PUBLISHED_MARKERS,
    UNIGRAM_GREY,
    Style,
    style,
)
from scripts.comparison.wording import amount, exact, names, shortened, tokens_unit

UNIGRAM_STYLE: dict[str, Any] = {"color": UNIGRAM_GREY, "linestyle": (0, (1, 2)), "linewidth": 1.6}
MARKERS_A_LINE = 12
MOST_WITH_ROWS = 4  # groups: the single rows of more of them would cover each other
MOST_POINTS = 1500  # of a drawn line: more would not be seen, and make an SVG of many megabytes
HEIGHT, ROW_HEIGHT = 9.0, 0.21  # inches: of a figure, and of a row of the legend
FEW = 6  # entries whose names are written out, and rows for which the height will do
ROOM, NARROW_ROOM = 140, 40  # characters of a name in the legend: of one column, and of three

SMOOTHING_TEXT = f"the running mean over {SMOOTHED_PART:.0%} of a run's rows (at least {FEWEST_SMOOTHED})"
SINGLE_TEXT = f"training loss: faint lines are single rows, strong lines {SMOOTHING_TEXT}"
NO_ROWS_TEXT = f"training loss: {SMOOTHING_TEXT}"
SEVERAL_TEXT = "several seeds: strong lines are their mean, thin lines one seed each, bands go from lowest to highest"

# Losses before this part of the longest run don't count when the axis of loss is chosen.
EARLY_PART = 0.1


def draw(groups: list[Group], title: str | None = None, paper: Published | None = None) -> Figure:
    """The whole figure, ready to be saved."""
    runs = [run for group in groups for run in group.runs]
    means = [smoothed(group.train) for group in groups]
    unigrams = unigram_losses(groups)
    longest = max(run.tokens for run in runs)
    known = [curve.curve.at(curve.curve.tokens <= longest) for curve in paper.curves] if paper else []
    limits = loss_limits([*(run.evals for run in runs), *known], means, unigrams)
    seconds, time_unit = time_scale(max(run.time for run in runs))
    figure = Figure(figsize=(12, HEIGHT), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    figure.suptitle(_drawable(title or default_title(groups)), fontsize=14, parse_math=False)
    (val_tokens, val_time), (train_tokens, train_time) = figure.subplots(2, 2, sharey=True, sharex="col")

    rows = shows_rows(groups)
    for number, (group, mean) in enumerate(zip(groups, means, strict=True)):
        look = style(number)
        _draw_group(val_tokens, train_tokens, lambda curve: curve.tokens, group, mean, look, rows)
        # Without a band: each seed takes a time of its own.
        _draw_group(val_time, train_time, lambda curve: curve.time / seconds, group, mean, look, rows, banded=False)

    if limits:
        val_tokens.set_ylim(*limits)
    published = _draw_published(val_tokens, paper, groups, longest, limits) if paper else []
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
        panel.spines[["top", "right"]].set_visible(False)
        _unigram_lines(panel, unigrams, limits)
    val_tokens.xaxis.set_major_formatter(FuncFormatter(token_ticks(longest)))
    _legend(figure, groups, means, unigrams, limits, published)
    return figure


def save(figure: Figure, path: Path) -> None:
    """Writes a PNG, SVG or PDF, by the path's suffix.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def default_title(groups: list[Group]) -> str:
    """The data sets and the sizes."""
    runs = [group.first for group in groups]
    facts = [
        ", ".join(_distinct([run.dataset or "unknown data" for run in runs])),
        ", ".join(_distinct([amount(run.number("parameters")) for run in runs])) + " parameters",
        ", ".join(_distinct([exact(run.number("tokens_per_update")) for run in runs])) + " tokens an update",
    ]
    return " · ".join(fact for fact in facts if not fact.startswith(("- ", "unknown ")))


def explanation(groups: list[Group]) -> str:
    """What strong and faint lines are."""
    several = [len(group.runs) > 1 for group in groups]
    rows = shows_rows(groups) and not all(several)
    return "\n".join([SINGLE_TEXT if rows else NO_ROWS_TEXT] + [SEVERAL_TEXT] * any(several))


def shows_rows(groups: list[Group]) -> bool:
    """Whether the single rows of training loss are drawn too."""
    return len(groups) <= MOST_WITH_ROWS


def unigram_losses(groups: list[Group]) -> list[float]:
    """Those of the data sets, each once."""
    losses = [run.unigram_loss for group in groups for run in group.runs]
    return sorted({round(loss, 6) for loss in losses if loss is not None})


def loss_limits(evals: list[Curve], means: list[Curve], unigrams: list[float]) -> tuple[float, float] | None:
    """The range of the axis of loss, or None where there is nothing to draw.

    From the lowest loss up to what the runs had reached after the first tenth of the tokens; up to the unigram line
    where that doesn't make the range much larger, and not beyond it: a run above it has learnt next to nothing.
    """
    known = [curve.at(np.abs(curve.loss) < DIVERGED) for curve in evals + means]
    finite = [curve for curve in known if len(curve)]
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
    size, suffix = tokens_unit(longest)
    return lambda tokens, position: f"{tokens / size:g}{suffix}" if tokens else "0"


def _draw_group(
    val: Axes,
    train: Axes,
    x: Callable[[Curve], Floats],
    group: Group,
    mean: Curve,
    look: Style,
    rows: bool,
    banded: bool = True,
) -> None:
    if len(group.runs) == 1 and rows:
        _faint_line(train, x, group.train, look)
    elif len(group.runs) > 1:
        low, high = group.band
        if banded:
            val.fill_between(x(group.evals), low, high, color=look.colour, alpha=0.18, linewidth=0, zorder=1.5)
        for run in group.runs:
            _faint_line(val, x, run.evals, look, alpha=0.5)
            _faint_line(train, x, smoothed(run.train), look, alpha=0.4)
    _line(val, x, group.evals, look)
    _line(train, x, mean, look)


def _line(panel: Axes, x: Callable[[Curve], Floats], curve: Curve, look: Style) -> None:
    curve = thinned(curve, MOST_POINTS)
    panel.plot(
        *(x(curve), curve.loss),
        color=look.colour,
        linestyle=look.line,
        linewidth=1.7,
        marker=look.marker,
        markersize=5,
        markevery=max(1, len(curve) // MARKERS_A_LINE),
        zorder=3,
    )


def _faint_line(panel: Axes, x: Callable[[Curve], Floats], curve: Curve, look: Style, alpha: float = 0.22) -> None:
    curve = thinned(curve, MOST_POINTS)
    panel.plot(x(curve), curve.loss, color=look.colour, alpha=alpha, linewidth=0.7, zorder=1)


def _draw_published(
    panel: Axes, paper: Published, groups: list[Group], longest: float, limits: tuple[float, float] | None
) -> list[Line2D]:
    """Curves, and what is known as points only, up to where the runs are; returns what the legend shows of them: those
    that have something there.
    """
    if longest > 0:
        panel.set_xlim(-0.02 * longest, 1.02 * longest)
    lines = []
    for number, known in enumerate(paper.curves):
        look: dict[str, Any] = {"color": GREYS[number], "linestyle": PUBLISHED_LINE_STYLES[number], "linewidth": 1.1}
        lines += panel.plot(known.curve.tokens, known.curve.loss, label=known.label, zorder=2, **look)
    for marker, (label, points) in zip(PUBLISHED_MARKERS, paper.points(groups).items(), strict=False):
        look = {"color": UNIGRAM_GREY, "linestyle": "", "marker": marker, "markersize": 9, "markerfacecolor": "none"}
        lines += panel.plot(points.tokens, points.loss, label=label, zorder=4, **look)
    shown = []
    for line in lines:
        tokens, losses = np.asarray(line.get_data())
        if np.any(tokens <= longest):
            line.set_label(str(line.get_label()) + _beyond(losses[tokens <= longest], limits))
            shown.append(line)
    return shown


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
    return _drawable(text).replace("$", r"\$")


def _drawable(text: str) -> str:
    """Characters that the font lacks are escaped; matplotlib would draw a box, and warn."""
    font = get_font(findfont(FontProperties()))
    return "".join(c if c == "\n" or font.get_char_index(ord(c)) else ascii(c)[1:-1] for c in text)


def _legend(
    figure: Figure,
    groups: list[Group],
    means: list[Curve],
    unigrams: list[float],
    limits: tuple[float, float] | None,
    published: list[Line2D],
) -> None:
    """One legend under all panels, where it covers no curve; a figure with many entries gets the height for them."""
    handles = []
    for number, (label, group, mean) in enumerate(zip(names(groups).legend, groups, means, strict=True)):
        look = style(number)
        losses = np.concatenate([group.evals.finite().loss, mean.finite().loss])
        text = label + _beyond(losses, limits)
        handles.append(
            Line2D([], [], color=look.colour, linestyle=look.line, marker=look.marker, markersize=5, label=text)
        )
    for loss in unigrams:
        text = f"unigram model, {loss:.2f}" + _beyond(np.array([loss]), limits)
        handles.append(Line2D([], [], label=text, **UNIGRAM_STYLE))
    handles += published
    labels = shortened([str(handle.get_label()) for handle in handles], ROOM if len(handles) <= FEW else NARROW_ROOM)
    columns = max(1, min(len(handles), 4, 150 // (max(map(len, labels)) + 8)))
    rows = -(-len(handles) // columns)
    figure.set_figheight(HEIGHT + ROW_HEIGHT * max(0, rows - FEW))
    figure.legend(
        handles=handles,
        labels=[_plain(label) for label in labels],
        loc="outside lower center",
        ncols=columns,
        fontsize=10,
        handlelength=3.5,
        title=explanation(groups),
        title_fontsize=9,
    )


def _beyond(losses: Floats, limits: tuple[float, float] | None) -> str:
    if not limits or not len(losses):
        return ""
    return " (above the axis)" if losses.min() > limits[1] else " (below the axis)" if losses.max() < limits[0] else ""


def _distinct(values: list[str]) -> list[str]:
    return list(dict.fromkeys(values))
