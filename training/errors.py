"""What a person is told when a run ends early, and by which process."""

from __future__ import annotations

import time
import traceback
from pathlib import Path

import torch
from torch import distributed

from configs import ConfigError
from data import DataError
from training import RunError
from training.console import fail, flush
from training.processes import Processes, local_rank_from_environment

# torchrun ends all processes when the first one goes: that must be the one that speaks. Others wait this long for it.
SILENCE = 10.0  # seconds


def report(error: BaseException, processes: Processes | None, asked_to_stop: bool) -> int:
    """Prints what ended the run, on the process whose word it is.

    Args:
        processes: None where not even those are known yet.
        asked_to_stop: torchrun, or somebody, has already asked this process to end.

    Returns:
        the exit status.
    """
    connected = processes is not None and processes.is_connected
    message, status = explain(error)
    if connected and is_lost_connection(error):
        if not asked_to_stop:
            time.sleep(SILENCE)
            fail(str(message))
        return status
    # What is wrong for all processes is said once on each host; what befell one midway, by that process.
    midway = connected and not isinstance(error, ConfigError | RunError)
    if not midway and local_rank_from_environment() > 0:
        time.sleep(SILENCE)  # if it has not gone after this time, it does not share the error
    if message is None:
        traceback.print_exception(error)
        flush()
    else:
        fail(message)
    return status


def explain(error: BaseException) -> tuple[str | None, int]:
    """One line for an error that the user can mend, and the exit status; None for a fault of the program."""
    if isinstance(error, ConfigError | DataError | RunError):
        return str(error), 2
    if isinstance(error, KeyboardInterrupt):
        return "interrupted before training began", 130
    if isinstance(error, OSError):
        place = f"{Path(error.filename).absolute()}: " if error.filename else ""
        return f"{place}{error.strerror or error}", 2
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return f"out of memory; lower --batch_size, or the model's size ({_first_line(error)})", 2
    if is_lost_connection(error):
        return f"another process of this run is gone, or cannot be reached ({_first_line(error)})", 1
    return None, 1


def in_a_line(error: BaseException) -> str:
    """What `status.json` says of it."""
    return explain(error)[0] or f"{type(error).__name__}: {_first_line(error)}"


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective operation failed because another process is gone."""
    # gloo's errors are plain RuntimeErrors that name a file of its source.
    return isinstance(error, distributed.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
