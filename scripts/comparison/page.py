"""The comparison as one page that any browser opens without a network: curves to hover and zoom, and the tables.

plotly.js lies in the file itself, 5 MB of it. Long curves are thinned (see `curves.thinned`) to what a screen can show.
"""

import html
import json
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from scripts.comparison import published, report, table
from scripts.comparison.analysis import short_names
from scripts.comparison.curves import Curve, smoothed, thinned
from scripts.comparison.figure import (
    FEW,
    NARROW_ROOM,
    default_title,
    explanation,
    loss_limits,
    shows_rows,
    time_scale,
    unigram_losses,
)
from scripts.comparison.groups import Group
from scripts.comparison.published import Published
from scripts.comparison.style import (
    GREYS,
    PUBLISHED_DASHES,
    PUBLISHED_SYMBOLS,
    UNIGRAM_GREY,
    Style,
    style,
)
from scripts.comparison.wording import names, shortened

TEMPLATE = Path(__file__).with_name("page.html")
MOST_POINTS = 2000  # of a drawn line
THINNING_TEXT = (
    f"Lines of more than {MOST_POINTS:,} rows are drawn by the lowest and the highest row of each of "
    f"{MOST_POINTS // 2:,} stretches of equal length."
)
HOVER = (
    "<b>%{fullData.name}</b><br>update %{customdata[0]:,}<br>%{customdata[1]:,} tokens<br>"
    "%{customdata[2]:,.1f} s<br>loss %{y:.4f}<extra></extra>"
)
VALIDATION, TRAINING = 1, 2  # rows of panels
HEIGHT, ENTRY_HEIGHT = 860, 12  # pixels: of the curves, and of an entry of the legend beyond the first FEW


def page(groups: list[Group], title: str | None, losses: list[float], paper: Published | None) -> str:
    """The whole page as HTML.

    Args:
        groups: what is compared.
        title: of the page; None: the data set and sizes.
        losses: to which tokens and time are listed.
        paper: what is published of this size.
    """
    seconds, unit = time_scale(max(run.time for group in groups for run in group.runs))
    columns = [
        {"title": "updates", "unit": 1},
        {"title": "tokens trained", "unit": 1},
        {"title": f"training time ({unit})", "unit": seconds},
    ]
    explained = f"{explanation(groups)}\n{THINNING_TEXT}"
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(title or default_title(groups)),
        explanation="<br>".join(html.escape(line[0].upper() + line[1:]) for line in explained.split("\n")),
        height=HEIGHT + ENTRY_HEIGHT * max(0, len(groups) - FEW),  # the legend stands under the panels
        sections="\n".join(_sections(groups, losses, paper)),
        plotly=get_plotlyjs(),
        figure=_script(draw(groups, paper).to_plotly_json()),
        columns=_script(columns),
    )


def _script(value: Any) -> str:
    """JSON that cannot end the script it stands in."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def draw(groups: list[Group], paper: Published | None) -> go.Figure:
    """Validation loss above, training loss below, against tokens. Each point carries its update, tokens and seconds."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.07)
    means = [smoothed(group.train) for group in groups]
    labels = names(groups).legend
    labels = shortened(labels, NARROW_ROOM) if len(labels) > FEW else labels
    folders = iter(short_names([run for group in groups for run in group.runs]))
    longest = max(run.tokens for group in groups for run in group.runs)
    known = [curve.curve.at(curve.curve.tokens <= longest) for curve in paper.curves] if paper else []
    for number, (group, mean, label) in enumerate(zip(groups, means, labels, strict=True)):
        look = style(number)
        runs = [(run, next(folders)) for run in group.runs]
        faint = {"color": look.colour, "width": 1}
        if len(runs) == 1 and shows_rows(groups):
            _add(figure, TRAINING, group.train, f"{label}, single rows", label, line=faint, opacity=0.25)
        elif len(runs) > 1:
            _add_band(figure, group, label, look)
            for run, folder in runs:
                _add(figure, VALIDATION, run.evals, folder, label, line=faint, opacity=0.5)
                _add(figure, TRAINING, smoothed(run.train), folder, label, line=faint, opacity=0.4)
        line = {"color": look.colour, "width": 2.2, "dash": look.dash}
        few = {"symbol": look.symbol, "size": 6, "maxdisplayed": 14}
        strong = {"line": line, "marker": few, "mode": "lines+markers"}
        _add(figure, VALIDATION, group.evals, label, label, showlegend=True, **strong)
        # A line without points has no entry in the legend.
        _add(figure, TRAINING, mean, label, label, showlegend=not len(group.evals), **strong)
    if paper:
        _add_published(figure, paper, groups, longest)
    unigrams = unigram_losses(groups)
    for loss in unigrams:
        grey = {"color": UNIGRAM_GREY, "dash": "dot", "width": 1.5}
        label_look = {"font": {"size": 11, "color": UNIGRAM_GREY}, "x": 0.995, "xanchor": "right", "yanchor": "top"}
        figure.add_hline(y=loss, line=grey, annotation_text=f"unigram model, {loss:.2f}", annotation=label_look)
    limits = loss_limits([*(run.evals for group in groups for run in group.runs), *known], means, unigrams)
    _lay_out(figure, limits)
    return figure


def _add(figure: go.Figure, row: int, curve: Curve, name: str, group: str, **look: Any) -> None:
    curve = thinned(curve, MOST_POINTS)
    points = [_point(*place) for place in zip(curve.updates, curve.tokens, curve.time, strict=True)]
    look = {"mode": "lines", "showlegend": False, "hovertemplate": HOVER} | look
    figure.add_scatter(
        x=[tokens for _, tokens, _ in points],
        y=[round(loss, 5) if np.isfinite(loss) else None for loss in curve.loss.tolist()],
        customdata=points,
        name=html.escape(name),
        legendgroup=html.escape(group),
        **look,
        row=row,
        col=1,
    )


def _point(update: float, tokens: float, seconds: float) -> tuple[int, int, float | None]:
    return round(update), round(tokens), round(float(seconds), 2) if np.isfinite(seconds) else None


def _add_band(figure: go.Figure, group: Group, label: str, look: Style) -> None:
    """There along the highest seed and back along the lowest."""
    low, high = group.band
    outline = group.evals.at(np.r_[np.arange(len(low)), np.arange(len(low))[::-1]])
    # Against time there is none: each seed takes a time of its own.
    outline = Curve(outline.updates, outline.tokens, np.full(len(outline), np.nan), np.concatenate([high, low[::-1]]))
    fill = {"fill": "toself", "fillcolor": look.colour, "line": {"width": 0}, "opacity": 0.16}
    # Not thinned with `_add`: an outline has no order to be cut by.
    points = [_point(*place) for place in zip(outline.updates, outline.tokens, outline.time, strict=True)]
    figure.add_scatter(
        x=[tokens for _, tokens, _ in points],
        y=[loss if np.isfinite(loss) else None for loss in outline.loss.tolist()],
        customdata=points,
        mode="lines",
        showlegend=False,
        hoverinfo="skip",
        legendgroup=html.escape(label),
        **fill,
        row=VALIDATION,
        col=1,
    )


def _add_published(figure: go.Figure, paper: Published, groups: list[Group], longest: float) -> None:
    for number, known in enumerate(paper.curves):
        line = {"color": GREYS[number], "dash": PUBLISHED_DASHES[number], "width": 1.3}
        curve = known.curve.at(known.curve.tokens <= longest)
        _add(figure, VALIDATION, curve, known.label, known.label, line=line, showlegend=True)
    for symbol, (label, points) in zip(PUBLISHED_SYMBOLS, paper.points(groups).items(), strict=False):
        marker = {"symbol": symbol, "size": 11, "color": UNIGRAM_GREY}
        points = points.at(points.tokens <= longest)
        _add(figure, VALIDATION, points, label, label, mode="markers", marker=marker, showlegend=True)


def _lay_out(figure: go.Figure, limits: tuple[float, float] | None) -> None:
    grid = {"gridcolor": "#e6e8eb", "zeroline": False, "linecolor": "#8b949e", "showline": True, "ticks": "outside"}
    figure.update_layout(
        template="none",
        font={"family": "system-ui, 'DejaVu Sans', sans-serif", "size": 13, "color": "#1f2328"},
        hovermode="closest",
        hoverlabel={"align": "left", "bgcolor": "#ffffff", "font": {"color": "#1f2328"}},
        legend={"orientation": "h", "y": -0.1, "yanchor": "top", "x": 0},
        margin={"l": 70, "r": 20, "t": 20, "b": 60},
    )
    figure.update_xaxes(**grid, exponentformat="B", rangemode="tozero")
    figure.update_yaxes(**grid, range=limits)
    figure.update_yaxes(title_text="validation loss (nats per token)", row=VALIDATION)
    figure.update_yaxes(title_text="training loss (nats per token)", row=TRAINING, matches="y")
    figure.update_xaxes(title_text="tokens trained", row=TRAINING)


def _sections(groups: list[Group], losses: list[float], paper: Published | None) -> list[str]:
    said = [*report.warnings(groups), *report.sentences(groups)]
    parts = ["<h2>Runs</h2>", _table(groups)]
    if said:
        parts += ["<h2>What they say</h2>", _list(said)]
    for heading, lines in (
        ("Tokens and time to a loss", report.losses_table(groups, losses)),
        ("Published values", published.lines(groups, paper) if paper else []),
    ):
        if lines:
            parts += [f"<h2>{heading}</h2>", f"<pre>{html.escape(chr(10).join(lines))}</pre>"]
    return [*parts, "<h2>Notes</h2>", _list(report.notes(groups), "quiet")]


def _list(lines: list[str], kind: str = "") -> str:
    items = [
        f'<li class="{"warning" if line.startswith("warning") else ""}">{html.escape(line)}</li>' for line in lines
    ]
    return f'<ul class="{kind}">{"".join(items)}</ul>'


def _table(groups: list[Group]) -> str:
    heads, rows = table.cells(groups)
    over = "".join(f'<th class="over" colspan="{len(columns)}">{html.escape(head)}</th>' for head, columns in heads)
    text = ['class="text"'] * table.TEXT_COLUMNS + [""] * sum(len(columns) for _, columns in heads)
    under = [column for _, columns in heads for column in columns]

    def line(cells: list[str], tag: str) -> str:
        cells = [f"<{tag} {kind}>{html.escape(cell)}</{tag}>" for cell, kind in zip(cells, text, strict=False)]
        return "".join(cells)

    body = "".join(f'<tr class="{"seed" if row[0].startswith("  ") else ""}">{line(row, "td")}</tr>' for row in rows)
    thead = f"<thead><tr>{over}</tr><tr>{line(under, 'th')}</tr></thead>"
    return f'<div class="wide"><table>{thead}<tbody>{body}</tbody></table></div>'
