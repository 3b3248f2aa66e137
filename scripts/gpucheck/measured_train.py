"""Runs train.py in this process and then writes what it took: `python measured_train.py OUT.json TRAIN_ARGUMENTS`."""

import sys
import time

START = time.perf_counter()

from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import train
from training.folder import write_json
from training.processes import leave


def main(out: Path, arguments: list[str]) -> int:
    status = train.main(arguments)
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    figures = {
        "seconds": time.perf_counter() - START,
        "peak_allocated": torch.cuda.max_memory_allocated() if on_gpu else None,
        "peak_reserved": torch.cuda.max_memory_reserved() if on_gpu else None,
    }
    write_json(out, figures)
    return status


if __name__ == "__main__":
    leave(main(Path(sys.argv[1]), sys.argv[2:]))
