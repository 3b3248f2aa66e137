"""Copies of a study's runs that are small enough for a repository, from which the same tables and plots come."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from configs import TrainConfig
from scripts.comparison.analysis import throughput
from scripts.studying.pool import Store
from training.folder import read_json
from training.metrics import read_rows

DROPPED = ("command", "host", "out_dir")  # of config.json: what says only where a run was made
NEEDED = ("seed", "optimizer", "learning_rate", "max_iters", "dataset")  # read as they stand
DEFAULTS = {field.name: field.default for field in fields(TrainConfig) if field.name not in NEEDED}
KEPT = ("iter", "tokens", "time", "val/loss")


def thin(store: Store, folder: Path) -> int:
    """Writes to FOLDER/CELL what the report reads of each cell that is done: `config.json`, `status.json`, and of
    `metrics.jsonl` the evaluation rows and one training row, the last, with the run's median of tokens a second.

    Returns:
        how many cells.
    """
    done = [cell for cell in store.plan().cells if store.state(cell).done]
    for cell in done:
        source, target, run = store.path(cell), folder / cell.name, store.state(cell).run
        target.mkdir(parents=True, exist_ok=True)
        config = _without_defaults(read_json(source / "config.json"))
        status = read_json(source / "status.json")
        rows = read_rows(source / "metrics.jsonl")
        kept = [{key: row[key] for key in KEPT} for row in rows if "val/loss" in row]
        last = [row for row in rows if "train/loss" in row][-1:]
        speed = throughput(run.tokens_per_sec) if run is not None else None
        kept += [
            {key: row[key] for key in ("iter", "tokens", "time", "train/loss")} | {"tokens_per_sec": speed}
            for row in last
        ]
        _write(target / "config.json", [config])
        _write(target / "status.json", [{key: status.get(key) for key in ("state", "iter", "max_iters", "reason")}])
        _write(target / "metrics.jsonl", kept)
    return len(done)


def _without_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json without the keys of TrainConfig that have their default: what is missing means that."""
    kept = {key: value for key, value in config.items() if key not in DROPPED}
    return {key: value for key, value in kept.items() if key not in DEFAULTS or DEFAULTS[key] != value}


def _write(path: Path, objects: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(each, separators=(",", ":")) + "\n" for each in objects), encoding="utf-8")
