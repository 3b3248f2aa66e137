"""Reads a run's folder.

A run leaves `config.json` (every value it used) and `metrics.jsonl` (one JSON object a line, training rows and
evaluation rows mixed). A comparison is often made while a run is still going or after it was killed, so a
line that was cut short is skipped and counted, and anything a row or config lacks is simply unknown. What makes
a comparison impossible is a `RunError`, whose message is one line that a user can act on.
"""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.comparison.curves import Curve, Floats
from scripts.comparison.metrics import Metrics, read_metrics


class RunError(Exception):
    """A run or an argument that cannot be used. The message is one line that a user can act on."""


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
        return printable(str(self.config.get("optimizer", "unknown")))

    @property
    def dataset(self) -> str | None:
        """The data set's name: the last part, where the config gives a path."""
        name = self.config.get("dataset") or self.data.get("path")
        return printable(Path(str(name)).name) if name else None

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
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON's integers have no end
        return None
    return number if math.isfinite(number) else None


def printable(text: str) -> str:
    """A name as it can be shown anywhere: control characters, and bytes that are no UTF-8, are escaped as in \\x1b."""
    return "".join(c if c.isprintable() else _escaped(ord(c)) for c in text)


def _escaped(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:  # how Python keeps a byte of a file name that is no UTF-8
        code -= 0xDC00
    return {9: "\\t", 10: "\\n", 13: "\\r"}.get(code) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


def read_runs(folders: list[Path]) -> list[Run]:
    """Several runs, in the order given. Some are read at once: pyarrow's parser leaves the interpreter free."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        return list(pool.map(read_run, folders))


def read_run(folder: Path) -> Run:
    """One run.

    Raises:
        RunError: the folder, its config.json or its metrics.jsonl is missing, unreadable or without rows.
    """
    where = folder.resolve()
    expected = "a run's folder holds config.json and metrics.jsonl; train.py writes them to its out_dir"
    if not where.is_dir():
        raise RunError(f"{where} is {'not a folder' if where.exists() else 'missing'}: {expected}")
    for name in ("config.json", "metrics.jsonl"):
        if not (where / name).is_file():
            raise RunError(f"{where / name} is missing: {expected}")
    config, metrics = _read_config(where / "config.json"), _read_metrics(where / "metrics.jsonl")
    return Run(folder, config, metrics.train, metrics.evals, metrics.tokens_per_sec, metrics.damaged_lines)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise RunError(f"{path} cannot be read: {problem.strerror}") from None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise RunError(f"{path} is damaged: expected one JSON object, as train.py writes it")
    return config


def _read_metrics(path: Path) -> Metrics:
    try:
        metrics = read_metrics(path.read_bytes())
    except OSError as problem:
        raise RunError(f"{path} cannot be read: {problem.strerror}") from None
    if not len(metrics.train) and not len(metrics.evals):
        state = "holds no readable rows" if metrics.damaged_lines else "is empty"
        raise RunError(f"{path} {state}: expected a JSON object a line, with train/loss or val/loss, from train.py")
    return metrics
