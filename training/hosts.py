"""What all hosts of a run must have in common: the data, the code, the settings. Found out before the first update:
otherwise some would train on other tokens than the rest, or wait ten minutes for one that has already ended.
"""

from __future__ import annotations

import hashlib
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from configs import TrainConfig
from data import DataError
from data.tokens import Dataset, open_dataset
from training import RunError
from training.processes import Processes

ROOT = Path(__file__).resolve().parents[1]
CODE = ("train.py", "model.py", "configs/**/*.py", "data/*.py", "optim/*.py", "training/*.py")


def open_data(config: TrainConfig, processes: Processes) -> Dataset:
    """Opens the data set on every process, and sees to it that all are of one mind.

    Raises:
        RunError: on every process: the data set cannot be used on a host, or its tokens, code, torch or settings differ
            from those of the first host.
    """
    data, problem = None, None
    try:
        data = open_dataset(config.dataset, config.block_size, config.vocab_size)
        facts = {
            "data": data.fingerprint(),
            "code": code_version(),
            "torch": torch.__version__,
            "config": asdict(config),
        }
    except DataError as error:
        facts, problem = {}, str(error)
    said = processes.gather({"host": platform.node(), "facts": facts, "problem": problem})
    try:
        _compare(said, str(data.path) if data else config.dataset)
    except Exception:
        if data is not None:
            data.close()
        raise
    assert data is not None
    return data


def code_version() -> str:
    """A hash of the files that a run is made of."""
    digest = hashlib.sha256()
    for pattern in CODE:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _compare(said: list[dict[str, Any]], path: str) -> None:
    problems = {item["host"]: item["problem"] for item in said if item["problem"] is not None}
    hosts = {item["host"] for item in said}
    if problems:
        host, problem = next(iter(problems.items()))
        raise RunError(problem if len(problems) == len(hosts) else f"on host {host}: {problem}")
    first = said[0]
    for item in said:
        pair = f"host {item['host']} has", f"host {first['host']}"
        mine, theirs = item["facts"], first["facts"]
        if mine["data"] != theirs["data"]:
            raise RunError(f"{pair[0]} other tokens in {path} than {pair[1]}; copy one prepared data set to all")
        if mine["code"] != theirs["code"]:
            raise RunError(
                f"{pair[0]} other code in {ROOT} ({mine['code']}) than {pair[1]} ({theirs['code']}); check out one "
                "commit on all"
            )
        if mine["torch"] != theirs["torch"]:
            raise RunError(f"{pair[0]} torch {mine['torch']}, {pair[1]} {theirs['torch']}; install one version on all")
        for key, value in mine["config"].items():
            if value != theirs["config"][key]:
                raise RunError(
                    f"{pair[0]} {key}={value!r}, {pair[1]} {theirs['config'][key]!r}; give all the same command"
                )
