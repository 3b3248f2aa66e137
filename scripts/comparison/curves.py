"""Curves of losses, and what can be read off them: pure functions of numbers.

The question behind them is the one of the MARS paper (arXiv 2411.10438): how many tokens does one optimizer need to
reach the loss at which another ended? Evaluations are sparse, so what lies between two of them is read off the straight
line that joins them.
"""

from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SMOOTHED_PART = 0.02  # of a curve's rows
FEWEST_SMOOTHED = 5
DIVERGED = 1e4  # nats per token, which no model that learns has


@dataclass(frozen=True)
class Curve:
    """Losses in nats per token, in the order they were written, and where in the run they stand."""

    updates: Floats
    tokens: Floats
    time: Floats  # seconds of training
    loss: Floats  # not a number where training diverged

    def __len__(self) -> int:
        return len(self.loss)

    def at(self, places: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> "Curve":
        """The curve at these places only."""
        return Curve(self.updates[places], self.tokens[places], self.time[places], self.loss[places])

    def finite(self) -> "Curve":
        """The curve without the losses that are not numbers."""
        return self.at(np.isfinite(self.loss))


def tokens_to_loss(evals: Curve, loss: float) -> float | None:
    """Tokens until the loss is first reached from above, or None where it never is."""
    curve = evals.finite()
    return crossing(curve.tokens, curve.loss, loss)


def crossing(x: Floats, y: Floats, level: float) -> float | None:
    """Where y first comes down to the level, by straight lines between points; x[0] where it starts there."""
    reached = np.flatnonzero(y <= level)
    if len(reached) == 0:
        return None
    after = int(reached[0])
    if after == 0:
        return float(x[0])
    before = after - 1
    part = (y[before] - level) / (y[before] - y[after])
    return float(x[before] + part * (x[after] - x[before]))


def loss_at(evals: Curve, tokens: float) -> float | None:
    """The loss after so many tokens: of the evaluation there, else on the line between its neighbours.

    None where the curve does not reach as far; not a number beside a loss that is none: that the run diverged there
    must not be hidden by what came before and after.
    """
    if len(evals) == 0 or not evals.tokens[0] <= tokens <= evals.tokens[-1]:
        return None
    after = int(np.searchsorted(evals.tokens, tokens))
    if evals.tokens[after] == tokens:
        return float(evals.loss[after])
    x, y = evals.tokens[after - 1 : after + 1], evals.loss[after - 1 : after + 1]
    return float(y[0] + (y[1] - y[0]) * (tokens - x[0]) / (x[1] - x[0]))


def smooth(values: Floats, window: int) -> Floats:
    """The mean of the `window` values around each one, fewer at the ends. What is not a number is left out."""
    half = window // 2
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    places = np.arange(len(values))
    first, last = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    number = counts[last] - counts[first]
    mean = (sums[last] - sums[first]) / np.maximum(number, 1)
    # A gap stays a gap: a mean of its neighbours would hide that the run diverged there.
    return np.where(known, mean, np.nan)


def smoothed(curve: Curve) -> Curve:
    """The running mean over `SMOOTHED_PART` of the curve's rows, at least `FEWEST_SMOOTHED`."""
    window = max(FEWEST_SMOOTHED, round(SMOOTHED_PART * len(curve)))
    return Curve(curve.updates, curve.tokens, curve.time, smooth(curve.loss, window))


def mean_curve(curves: list[Curve]) -> tuple[Curve, Floats]:
    """The mean of several curves at the updates that all of them have.

    Only there: where one more or one less counted, the mean would jump without any of the runs doing so.

    Returns:
        the mean (of tokens and time too), and the losses behind it, a row a curve.
    """
    shared = reduce(np.intersect1d, [curve.updates for curve in curves])
    rows = []
    for curve in curves:
        updates, places = np.unique(curve.updates, return_index=True)
        rows.append(curve.at(places[np.isin(updates, shared)]))
    losses = np.array([row.loss for row in rows]).reshape(len(curves), len(shared))
    tokens, time = (np.mean([getattr(row, column) for row in rows], axis=0) for column in ("tokens", "time"))
    return Curve(shared, tokens, time, losses.mean(axis=0)), losses


def thinned(curve: Curve, most: int) -> Curve:
    """At most about `most` points of the curve, for drawing: of each of `most / 2` stretches of equal length the lowest
    and the highest, so that no spike is lost; the first point, the last one, and one of each stretch's gaps stay too.
    """
    length = len(curve)
    if length <= most:
        return curve
    # Places as a table, a row a stretch; the last row is filled up with the last place.
    width = -(-length // max(1, most // 2))
    places = np.minimum(np.arange(-(-length // width) * width), length - 1).reshape(-1, width)
    losses = curve.loss[places]
    gaps = ~np.isfinite(losses)
    rows = np.arange(len(places))
    lowest = places[rows, np.where(gaps, np.inf, losses).argmin(axis=1)]
    highest = places[rows, np.where(gaps, -np.inf, losses).argmax(axis=1)]
    first_gaps = places[rows, gaps.argmax(axis=1)][gaps.any(axis=1)]
    return curve.at(np.unique(np.concatenate([[0], lowest, highest, first_gaps, [length - 1]])))
