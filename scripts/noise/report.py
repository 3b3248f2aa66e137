"""What `scripts/gradient_noise.py` prints of a measured point."""

from __future__ import annotations

import math
from typing import Any

from scripts.noise.statistics import ALL, AVERAGE, SINGLE, Tree

NAMES = {
    SINGLE: "the single estimate c; the plain one is the gradient of one batch",
    AVERAGE: "the moving average m; the plain one is plain momentum",
}
COLUMNS = {
    "bias_squared": "bias²/MSE",  # of the estimate, of the plain one
    "variance": "variance",
    "same": "same noise",
    "mse": "MSE",
    "cosine": "cosine",
    "clip": "clipped",
}
EXPLANATION = (
    "bias² and MSE are relative to the plain estimate's MSE, variance to its variance; ± is a standard error over\n"
    "replicates, on one path. same noise: the relative variance if the noise of a batch were the same along the path.\n"
    "cosine: to the true gradient. clipped: tensors whose c is longer than 1, which MARS would clip; none is here."
)


def lines_of(point: Tree) -> list[str]:
    """A measured point: head, then for each kind of parameters two tables."""
    lines = [
        f"{point['name']}: weights after update {point['update']}, path from update {point['start']} "
        f"({point['points']} points), {point['replicates']} replicates, beta1 {point['beta1']:g}"
    ]
    for kind, figures in point["kinds"].items():
        lines += ["", f"--- {kind} ({point['sizes'][kind]:,} parameters) ---", *gradient_lines(point, figures)]
        for name, title in NAMES.items():
            lines += ["", title, *table(figures[name], point["expected"][name])]
            lines.append(best_line(figures["best"][name]))
    return lines


def gradient_lines(point: Tree, figures: Tree) -> list[str]:
    gradient, expected = figures["gradient"], point["expected"][AVERAGE]["plain"]["variance"]
    noise, scale = gradient["noise"]["value"], gradient["noise_scale"]
    share = figures[AVERAGE]["plain"]["variance"]["value"] / noise
    return [
        f"true gradient: norm {shown(gradient['norm'])}; trace of the covariance of that of a batch of "
        f"{point['sequences']} sequences: {shown(gradient['noise'])}",
        f"noise scale: {shown(scale)} sequences"
        + (f", {scale['value'] * point['block_size']:,.0f} tokens" if scale["value"] is not None else ""),
        f"gradient norms of {point['batches']} batches: mean {shown(gradient['norms_mean'])}, deviation "
        f"{shown(gradient['norms_deviation'])}, coefficient of variation {shown(gradient['norms_variation'])}",
        f"variance of plain momentum: {share:.4f} of the gradient's (same noise along the path: {expected:.4f})",
    ]


def table(rows: Tree, expected: Tree) -> list[str]:
    """A line a case."""
    clips = any("clip_rate" in row for row in rows.values())
    head = [f"{name:>16}" for key, name in COLUMNS.items() if clips or key != "clip"]
    lines = [" " * 18 + "".join(head)]
    for case, row in rows.items():
        cells = [
            shown(row["relative_bias_squared"]),
            shown(row["relative_variance"]),
            f"{expected[case]['relative_variance']:.4g}",
            shown(row["relative_mse"]),
            shown(row["cosine"]),
        ]
        if clips:
            cells.append(f"{100 * row['clip_rate']['value']:.0f} %")
        lines.append(f"{case:18}" + "".join(f"{cell:>16}" for cell in cells))
    return lines


def best_line(best: Tree) -> str:
    parts = [
        f"{form} {shown(found['gamma'])} (MSE {shown(found['relative_mse'])})"
        for form, found in best.items()
        if found["gamma"]["value"] is not None
    ]
    return "gamma of least MSE: " + ", ".join(parts) if parts else ""


def shown(figure: dict[str, Any]) -> str:
    """A value to the second digit of its error, and the error."""
    value, error = figure["value"], figure["error"]
    if value is None:
        return "-"
    if not error:
        return f"{value:.4g}"
    decimals = max(0, 1 - math.floor(math.log10(error)))
    if decimals > 6:
        return f"{value:.2g} ± {error:.1g}"
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"


def summary(points: list[Tree]) -> list[str]:
    """The answer, a line a point: what plain momentum's error is made of, and which m has less of what."""
    lines = []
    for point in points:
        rows = point["kinds"][ALL][AVERAGE]
        lag = 100 * rows["plain"]["relative_bias_squared"]["value"]
        lines.append(
            f"{point['name']}, update {point['update']}, all parameters: {lag:.0f} % of plain momentum's squared error "
            f"is lag; less variance: {lower(rows, 'relative_variance')}; less error: {lower(rows, 'relative_mse')}"
        )
    return lines


def lower(rows: Tree, key: str) -> str:
    """The cases that are below plain by more than two standard errors."""
    found = [
        f"{case} ({shown(row[key])})" for case, row in rows.items() if row[key]["value"] + 2 * row[key]["error"] < 1
    ]
    return ", ".join(found) or "none"
