"""A run's figures: rows in `metrics.jsonl`, the clock behind them, and numbers as people read them."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch

from training.console import warn
from training.device import synchronize

# A row is of the kind whose key it has. In the order in which an update writes them.
KINDS = ("variance/noise_scale", "train/loss", "val/loss")


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, appended; `iter` strictly increases within a kind, `time` never falls.

    A run that goes on from a checkpoint computes some rows again; those that the file holds already are dropped. If the
    run goes on in another way than before, the old ones are what has to go: see `abandon_rows`. Rows that do not fit on
    the disk wait in memory and are written when there is room.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last, self._time = dict.fromkeys(KINDS, -1), 0.0
        content = path.read_bytes() if path.exists() else b""
        for line in content.splitlines():
            kind, row = _parse(line)
            if kind is not None:
                self._last[kind] = max(self._last[kind], row["iter"])
                self._time = max(self._time, row["time"] if isinstance(row.get("time"), int | float) else 0.0)
        # Without an end, the last line is what a process was writing when it was killed.
        self._waiting = b"\n" if content and not content.endswith(b"\n") else b""
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def append(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """Writes a row, unless the file holds a later or equal one of its kind. Infinite numbers and NaN become null.

        Returns:
            the row, with the time that the file has; None where it is not new.
        """
        kind = kind_of(row)
        if row["iter"] <= self._last[kind]:
            return None
        self._last[kind] = row["iter"]
        if "time" in row:  # what is computed again may take less of it than before
            self._time = max(self._time, row["time"])
            row = row | {"time": self._time}
        clean = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
        had_to_wait = len(self._waiting) > 1
        self._waiting += json.dumps(clean).encode() + b"\n"
        if (problem := self._write()) and not had_to_wait:
            warn(f"{self._path.absolute()}: {problem}; rows wait in memory until there is room")
        return row

    def close(self) -> str | None:
        """Closes the file. Returns what kept rows from being written, if some were not."""
        problem = self._write()
        os.close(self._file)
        return f"{self._path.absolute()}: {problem}" if problem else None

    def _write(self) -> str | None:
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
        except OSError as error:
            return error.strerror
        return None


def abandon_rows(path: Path, update: int, evaluated: int) -> None:
    """Moves what a run computed before it was taken up again at an earlier point, with other settings, to
    `metrics.abandoned.jsonl`.

    Args:
        path: `metrics.jsonl`.
        update, evaluated: the last update, and the last evaluation, that the run goes on from.
    """
    limits = dict.fromkeys(KINDS, update) | {"val/loss": evaluated}
    kept: list[bytes] = []
    abandoned: list[bytes] = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        kind, row = _parse(line)
        (abandoned if kind is not None and row["iter"] > limits[kind] else kept).append(line + b"\n")
    if not abandoned:
        return
    with path.with_suffix(".abandoned.jsonl").open("ab") as file:
        file.writelines(abandoned)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(b"".join(kept))
    temporary.replace(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl`, without damaged lines; none where there is no file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [row for kind, row in map(_parse, lines) if kind is not None]


def kind_of(row: dict[str, Any]) -> str:
    """Raises StopIteration where it is of none."""
    return next(kind for kind in KINDS if kind in row)


def _parse(line: bytes) -> tuple[str | None, dict[str, Any]]:
    """A row's kind, and the row; None for a damaged line."""
    try:
        row = json.loads(line)
        if isinstance(row["iter"], int):
            return kind_of(row), row
    except (ValueError, TypeError, KeyError, StopIteration, RecursionError):
        pass
    return None, {}


class TrainingClock:
    """Seconds spent on updates. Stopped for evaluations and checkpoints, so that runs which do more of them compare.

    Args:
        seconds: already spent, by earlier processes of the run.
        device: what to wait for before the clock stops.
    """

    def __init__(self, seconds: float, device: torch.device) -> None:
        self._before, self._device = seconds, device
        self._since: float | None = None

    def start(self) -> None:
        """Goes on."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Waits for the device and stops."""
        synchronize(self._device)
        self._before = self.seconds()
        self._since = None

    def seconds(self) -> float:
        """Seconds so far."""
        return self._before + (time.perf_counter() - self._since if self._since is not None else 0.0)


def format_duration(seconds: float) -> str:
    """0:07, 12:34, 5:06:07 or 3d 4:05:06."""
    whole = max(0, round(seconds))
    days, hours, minutes, rest = whole // 86400, whole // 3600 % 24, whole // 60 % 60, whole % 60
    if days:
        return f"{days}d {hours}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_count(number: float) -> str:
    """950, 31.5k, 124.4M or 49.15B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:.4g}"
