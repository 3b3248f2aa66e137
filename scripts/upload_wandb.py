#!/usr/bin/env python3
"""Sends runs to Weights & Biases after the fact: `python scripts/upload_wandb.py RUN [RUN ...]`.

Everything comes from the `config.json` and `metrics.jsonl` in a run's folder; keys, group, job type, tags and steps are
those of a run trained with `wandb_log=True`. The id is kept in the run's folder (`wandb.json`), so that a second upload
sends only the rows that are new, and a run that goes on with `wandb_log=True` goes on there too. Without a network or a
login, or with WANDB_MODE=offline, the run is recorded in its folder and the command printed that sends it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training import RunError
from training.console import fail
from training.folder import is_locked, read_json, read_status
from training.metrics import read_rows
from training.stopping import STOPPED
from training.tracking import Tracker

UPLOAD_SECONDS = 600.0  # to send one run
# By the state in status.json: one that is not training and yet "running" was killed.
EXIT_CODES: dict[object, int] = {"stopped": STOPPED, "failed": 1, "running": 1}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RunError(f"{message} (python scripts/upload_wandb.py --help lists what is allowed)")


def main(argv: list[str] | None = None) -> int:
    """Uploads the runs. Returns the exit status: 2 after a line on standard error for what could not be sent."""
    parser = Parser(prog="python scripts/upload_wandb.py", description="Sends runs to Weights & Biases.")
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run's folder (its out_dir)")
    parser.add_argument("--project", help="project there (wandb_project of the run)")
    parser.add_argument("--group", help="group there (wandb_group of the run)")
    status = 0
    try:
        args = parser.parse_args(argv)
        if os.environ.get("WANDB_MODE") == "disabled":
            raise RunError("WANDB_MODE=disabled: nothing can be uploaded; unset it, or set it to offline")
        given = {"wandb_project": args.project, "wandb_group": args.group}
        overrides = {key: value for key, value in given.items() if value is not None}
        runs = [(folder, record_of(folder) | overrides) for folder in args.runs]
    except RunError as error:
        fail(str(error))
        return 2
    for folder, record in runs:
        problem = f"{folder.absolute()} is not uploaded"
        tracker = Tracker(record, folder, UPLOAD_SECONDS, without=problem, lacking=problem)
        tracker.finish(EXIT_CODES.get(read_status(folder).get("state"), 0))
        if tracker.problem is not None:
            status = 2
    return status


def record_of(folder: Path) -> dict[str, Any]:
    """What `config.json` says of a run that can be uploaded.

    Raises:
        RunError: no run there, one without rows, one that is training, or a folder that cannot be written.
    """
    where = folder.absolute()
    if not where.is_dir():
        raise RunError(
            f"{where} is {'not a folder' if where.exists() else 'missing'}; give a run's folder (its out_dir)"
        )
    record = read_json(where / "config.json")
    if not record:
        raise RunError(f"{where / 'config.json'} is missing or damaged; give a run's folder (its out_dir)")
    if not read_rows(where / "metrics.jsonl"):
        raise RunError(f"{where / 'metrics.jsonl'} holds no rows; there is nothing to upload")
    if is_locked(where):
        raise RunError(f"{where} is training at this moment; upload it when it has ended")
    if not os.access(where, os.W_OK):
        raise RunError(
            f"{where}: no permission to write there, where wandb.json keeps the id of the run; copy the folder"
        )
    return record


if __name__ == "__main__":
    sys.exit(main())
