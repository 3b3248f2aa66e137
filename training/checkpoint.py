"""Checkpoints: `checkpoints/iter-00001000.pt`, each whole or not there at all.

A file is written under a temporary name, flushed to disk and renamed. `torch.load(weights_only=True)` opens it; its
keys are `model` (names as in `model.py`), `optimizer`, `scaler`, `config`, `iter`, `best_val_loss`, `best_iter` and
`time`.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

from training import RunError

KEYS = ("model", "optimizer", "scaler", "config", "iter", "best_val_loss", "best_iter", "time")


class CheckpointFolder:
    """The checkpoints of a run: the newest `keep` and the best.

    Args:
        path: the folder; made at the first save.
        keep: how many of the newest to keep.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self.keep = path, keep

    def save(self, checkpoint: dict[str, Any]) -> Path:
        """Writes a checkpoint, then deletes those that are no longer wanted."""
        self.path.mkdir(parents=True, exist_ok=True)
        target = self._file(checkpoint["iter"])
        temporary = target.with_suffix(".tmp")
        with temporary.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        wanted = {*self._files()[-self.keep :], self._file(checkpoint["best_iter"])}
        for old in self._files():
            if old not in wanted:
                old.unlink()
        return target

    def load_newest(self) -> dict[str, Any] | None:
        """The newest checkpoint that can be read, in host memory, or None where there is no file. (On the device it
        would need room beside the model, and step counts that optimizers keep on the host would move there.)

        Raises:
            RunError: there are files, and none of them can be read.
        """
        files = self._files()
        for path in reversed(files):
            try:
                checkpoint = torch.load(path, map_location="cpu", weights_only=True)
                if isinstance(checkpoint, dict) and set(KEYS) <= set(checkpoint):
                    return checkpoint
                problem = f"it lacks {', '.join(sorted(set(KEYS) - set(checkpoint)))}"
            except Exception as error:  # whatever a damaged file makes of the unpickler
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"warning: {path.absolute()} is not a checkpoint, skipped: {problem}", file=sys.stderr, flush=True)
        if files:
            raise RunError(f"{self.path.absolute()}: no checkpoint can be read; choose another --out_dir")
        return None

    def _files(self) -> list[Path]:
        return sorted(path for path in self.path.glob("iter-*.pt") if re.fullmatch(r"iter-\d{8,}\.pt", path.name))

    def _file(self, update: int) -> Path:
        return self.path / f"iter-{update:08}.pt"
