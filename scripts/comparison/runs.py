"""Reads a run's folder.

A run leaves `config.json` (every value it used) and `metrics.jsonl` (one JSON object a line, training rows and
evaluation rows mixed). A comparison is often made while a run is still going or after it was killed, so a
line that was cut short is skipped and counted, and anything a row or config lacks is simply unknown. What makes
a comparison impossible is a `RunError`, whose message is one line that a user can act on.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class RunError(Exception):
    """A run or an argument that cannot be used. The message is one line that a user can act on."""


@dataclass(frozen=True)
class Curve:
    """Losses in nats per token, in the order they were written, and where in the run they stand."""

    updates: Floats
    tokens: Floats
    time: Floats  # seconds of training
    loss: Floats  # not a number where training diverged

    def __len__(self) -> int:
        return len(self.loss)

    def finite(self) -> "Curve":
        """The curve without the losses that are not numbers."""
        keep = np.isfinite(self.loss)
        return Curve(self.updates[keep], self.tokens[keep], self.time[keep], self.loss[keep])


@dataclass(frozen=True)
class Run:
    """One run as its folder tells it. A value that its config lacks is None."""

    folder: Path
    config: dict[str, Any]
    train: Curve
    evals: Curve
    tokens_per_sec: Floats  # of each training row
    damaged_lines: int = 0

    @property
    def optimizer(self) -> str:
        return str(self.config.get("optimizer", "unknown"))

    @property
    def dataset(self) -> str | None:
        """The data set's name: the last part, where the config gives a path."""
        name = self.config.get("dataset") or self.data.get("path")
        return Path(str(name)).name if name else None

    @property
    def data(self) -> dict[str, Any]:
        data = self.config.get("data")
        return data if isinstance(data, dict) else {}

    @property
    def unigram_loss(self) -> float | None:
        return _number(self.data.get("unigram_loss"))

    @property
    def max_iters(self) -> float | None:
        return self.number("max_iters")

    @property
    def updates(self) -> float:
        return self._last("updates")

    @property
    def tokens(self) -> float:
        return self._last("tokens")

    @property
    def time(self) -> float:
        return self._last("time")

    @property
    def finished(self) -> bool:
        return self.max_iters is None or self.updates >= self.max_iters

    @property
    def evaluated(self) -> bool:
        """Whether it was evaluated after training began: the evaluation at 0 says nothing of an optimizer."""
        return bool(np.any(self.evals.updates > 0))

    def number(self, key: str) -> float | None:
        return _number(self.config.get(key))

    def number_of_tokens(self, split: str) -> float | None:
        return _number(self.data.get(f"{split}_tokens"))

    def _last(self, column: str) -> float:
        """The column's value in the newest row of either kind."""
        return max((float(getattr(c, column)[-1]) for c in (self.train, self.evals) if len(c)), default=0.0)


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None  # type: ignore[arg-type]


def read_run(folder: Path) -> Run:
    where = folder.resolve()
    expected = "a run's folder holds config.json and metrics.jsonl; train.py writes them to its out_dir"
    if not where.is_dir():
        raise RunError(f"{where} is {'not a folder' if where.exists() else 'missing'}: {expected}")
    for name in ("config.json", "metrics.jsonl"):
        if not (where / name).is_file():
            raise RunError(f"{where / name} is missing: {expected}")
    return _read_metrics(folder, _read_config(where / "config.json"), where / "metrics.jsonl")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise RunError(f"{path} cannot be read: {problem.strerror}") from None
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise RunError(f"{path} is damaged: expected one JSON object, as train.py writes it")
    return config


def _read_metrics(folder: Path, config: dict[str, Any], path: Path) -> Run:
    train: list[tuple[float, ...]] = []
    evals: list[tuple[float, ...]] = []
    damaged = 0
    try:
        # Line by line: a file of 100,000 rows takes a third of a second, and only its numbers stay in memory.
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                    if "train/loss" in row:
                        train.append((*_position(row), _value(row.get("tokens_per_sec")), _value(row["train/loss"])))
                    if "val/loss" in row:
                        evals.append((*_position(row), math.nan, _value(row["val/loss"])))
                except (ValueError, TypeError, KeyError):
                    damaged += 1
    except OSError as problem:
        raise RunError(f"{path} cannot be read: {problem.strerror}") from None
    if not train and not evals:
        state = "holds no readable rows" if damaged else "is empty"
        raise RunError(f"{path} {state}: expected a JSON object a line, with train/loss or val/loss, from train.py")
    train_columns, speed = _columns(train)
    eval_columns, _ = _columns(evals)
    return Run(folder, config, train_columns, eval_columns, speed, damaged)


def _position(row: dict[str, Any]) -> tuple[float, float, float]:
    return float(row["iter"]), float(row["tokens"]), float(row["time"])


def _value(value: Any) -> float:
    return math.nan if value is None else float(value)


def _columns(rows: list[tuple[float, ...]]) -> tuple[Curve, Floats]:
    """Rows as columns: the curve, and the tokens a second."""
    updates, tokens, time, speed, loss = np.array(rows, dtype=np.float64).reshape(-1, 5).T
    return Curve(updates, tokens, time, loss), speed
