"""Reads `metrics.jsonl`: one JSON object a line, training rows and evaluation rows mixed.

`by_line` says what the file means: a row is of the kind whose key it has, whatever else it holds; a line that is no
row is skipped and counted, since a comparison is often made while a run still writes or after it was killed.
`by_arrow` gives the same numbers several times faster, for files about which there can be no doubt, and nothing
for all others. docs/comparing.md has the ratio.
"""

import io
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.comparison.curves import Curve, Floats

KINDS = ("train/loss", "val/loss")
COLUMNS = ("iter", "tokens", "time", *KINDS, "tokens_per_sec")
# Below this pyarrow's import takes longer than the reading: bytes, about 5000 rows.
SMALL = 1 << 20
# Numbers beyond these were not written by a run, and their squares would not be numbers: updates, tokens and seconds;
# losses and tokens a second.
FURTHEST, HIGHEST = 1e30, 1e40


@dataclass(frozen=True)
class Metrics:
    train: Curve
    evals: Curve
    tokens_per_sec: Floats  # of each training row
    damaged_lines: int = 0


def read_metrics(content: bytes) -> Metrics:
    """The rows of a file. Losses that are null or NaN are NaN here."""
    return (by_arrow(content) if len(content) >= SMALL else None) or by_line(content)


def by_line(content: bytes) -> Metrics:
    """Line by line, with Python's own parser."""
    train: list[tuple[float, ...]] = []
    evals: list[tuple[float, ...]] = []
    damaged = 0
    # As a stream: all lines at once would take many times the file's size in memory.
    for line in io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", errors="replace"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "train/loss" in row:
                train.append((*_position(row), _value(row.get("tokens_per_sec")), _value(row["train/loss"])))
            if "val/loss" in row:
                evals.append((*_position(row), math.nan, _value(row["val/loss"])))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            damaged += 1
    train_curve, speed = _columns(train)
    return Metrics(train_curve, _columns(evals)[0], speed, damaged)


def by_arrow(content: bytes) -> Metrics | None:
    """With pyarrow's parser, or None where its answer could differ from `by_line`'s: damaged lines, nulls (which it
    does not tell from what is missing), numbers beyond float64, lines that are no single object.
    """
    import pyarrow
    from pyarrow import json as arrow_json

    schema = pyarrow.schema([(name, pyarrow.float64()) for name in COLUMNS])
    options = arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        table = arrow_json.read_json(pyarrow.BufferReader(content), parse_options=options)
    except (pyarrow.ArrowException, ValueError):
        return None
    lines = content.count(b"\n") + (not content.endswith(b"\n"))
    if table.num_rows != lines or not content.startswith(b"{"):
        return None
    curves, speeds = [], []
    for kind in KINDS:
        rows = table.filter(table.column(kind).is_valid())
        needed = ("iter", "tokens", "time", kind)
        if rows.num_rows != content.count(f'"{kind}"'.encode()) or any(rows.column(name).null_count for name in needed):
            return None
        updates, tokens, time, loss = (rows.column(name).to_numpy() for name in needed)
        curves.append(Curve(updates, tokens, time, loss))
        speeds.append(rows.column("tokens_per_sec").to_numpy())
    places = [getattr(curve, name) for curve in curves for name in ("updates", "tokens", "time")]
    if not all((np.abs(values) <= FURTHEST).all() for values in places):
        return None
    if not all((np.abs(curve.loss) <= HIGHEST).all() for curve in curves) or (np.abs(speeds[0]) > HIGHEST).any():
        return None
    return Metrics(curves[0], curves[1], speeds[0])


def _position(row: dict[str, Any]) -> tuple[float, float, float]:
    place = float(row["iter"]), float(row["tokens"]), float(row["time"])
    if not all(abs(value) <= FURTHEST for value in place):
        raise ValueError("a row without a place")
    return place


def _value(value: Any) -> float:
    number = math.nan if value is None else float(value)
    if HIGHEST < abs(number) < math.inf:
        raise ValueError("beyond float32, in which training computes")
    return number


def _columns(rows: list[tuple[float, ...]]) -> tuple[Curve, Floats]:
    """Rows as columns: the curve, and the tokens a second."""
    updates, tokens, time, speed, loss = np.array(rows, dtype=np.float64).reshape(-1, 5).T
    return Curve(updates, tokens, time, loss), speed
