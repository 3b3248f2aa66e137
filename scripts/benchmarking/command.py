"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option for the numbers as a file."""
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers there")


def check_device(parser: argparse.ArgumentParser, device: str) -> None:
    """An error of the parser where there is no such device."""
    if device == "cuda":
        import torch  # the benchmark of the preparation needs none

        if torch.cuda.is_available():
            return
        parser.error("argument --device: torch finds no CUDA device here")


def check_json(parser: argparse.ArgumentParser, file: Path | None) -> None:
    """An error of the parser where the file could not be made, before anything is measured."""
    if file and not file.resolve().parent.is_dir():
        parser.error(f"argument --json: there is no folder {file.resolve().parent}")
