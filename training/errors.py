"""What a person is told when a run ends early."""

from __future__ import annotations

from pathlib import Path

import torch

from configs import ConfigError
from data import DataError
from training import RunError


def explain(error: BaseException) -> tuple[str | None, int]:
    """One line for an error that the user can mend, and the exit status; None for a fault of the program."""
    if isinstance(error, ConfigError | DataError | RunError):
        return f"error: {error}", 2
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; --resume=auto goes on from the last checkpoint", 130
    if isinstance(error, OSError):
        place = f"{Path(error.filename).absolute()}: " if error.filename else ""
        return f"error: {place}{error.strerror or error}", 2
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return f"error: out of memory; lower --batch_size, or the model's size ({str(error).splitlines()[0]})", 2
    return None, 1
