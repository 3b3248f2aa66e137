"""Folders of runs for the tests of scripts/compare.py, written by hand so that every result can be worked out."""

import json
from pathlib import Path

import numpy as np

from scripts.comparison.curves import Curve

DATA = {"path": "data/tiny", "train_tokens": 9000, "val_tokens": 800, "val_bytes": 1600, "tokenizer": "gpt2"}


def write_run(
    folder: Path,
    evals: list[tuple[int, float]],
    optimizer: str = "adamw",
    train_rows: int | None = None,
    seconds: float = 0.5,
    tokens_per_update: int = 1000,
    data: dict | None = None,
    **config: object,
) -> Path:
    """A run of some tokens and seconds an update, evaluated at the given updates."""
    last = evals[-1][0] if evals else 0
    values = {
        **{"optimizer": optimizer, "learning_rate": 0.003, "max_iters": last, "seed": 1, "dataset": "data/tiny"},
        **{"parameters": 830_000, "tokens_per_update": tokens_per_update, "processes": 1, "device_name": "cpu"},
        "data": DATA | {"unigram_loss": 3.0} | (data or {}),
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values | config))

    def at(update: int) -> dict[str, float]:
        return {"iter": update, "tokens": tokens_per_update * update, "time": seconds * update}

    rows = [{**at(k), "val/loss": loss} for k, loss in evals]
    for k in range(1, (last if train_rows is None else train_rows) + 1):
        # The first five rows are slow, as they are while a model compiles.
        speed = 10 if k <= 5 else tokens_per_update / seconds + k
        row = {"train/loss": 4 - k / 100, "lr": 0.003, "grad_norm": 1.0, "tokens_per_sec": speed}
        rows.append({**at(k), **row})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def curve(*points: tuple[float, float]) -> Curve:
    """A curve of 1000 tokens an update and 100 tokens a second through points of tokens and loss."""
    tokens = np.array([x for x, _ in points], dtype=float)
    return Curve(tokens / 1000, tokens, tokens / 100, np.array([y for _, y in points], dtype=float))
