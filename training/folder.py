"""A run's folder as a whole: whose it is, who is training in it, and what its JSON files say. Needs no torch."""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import RunError
from training.console import say

if TYPE_CHECKING:  # scripts that only look at a folder need no torch
    from configs import TrainConfig
    from training.processes import Processes

WAIT = 40.0  # seconds; longer than a run that was asked to stop takes, with the default stop_seconds


def check_folder(config: TrainConfig) -> None:
    """Refuses to mix a new run into the folder of another.

    Raises:
        RunError: the folder holds a run and `resume` is not auto, or it cannot be written.
    """
    folder = Path(config.out_dir).absolute()
    checkpoints = folder / "checkpoints"
    traces = (folder / name for name in ("metrics.jsonl", "config.json"))
    if config.resume != "auto" and (any(path.exists() for path in traces) or any(checkpoints.glob("iter-*.pt"))):
        raise RunError(f"{folder} holds a run already; --resume=auto continues it, or choose another --out_dir")
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{checkpoints}: cannot be made: {error.strerror}; choose another --out_dir") from None
    for place in (folder, checkpoints):
        if not os.access(place, os.W_OK | os.X_OK):
            raise RunError(f"{place}: no permission to write there; choose another --out_dir")


class FolderLock:
    """Keeps a second run out of the folder, within a `with` block. The system releases it when the process ends,
    however it ends.

    Args:
        folder: which exists.
        processes: the main one takes the lock for all.
        wait: seconds to wait for a process that may be about to end.

    Raises:
        RunError: on every process, when another run is still there after that time.
    """

    def __init__(self, folder: Path, processes: Processes, wait: float = WAIT) -> None:
        self._path, self._processes, self._wait = folder / "lock", processes, wait
        self._file: int | None = None

    def __enter__(self) -> FolderLock:
        taken = self._take() if self._processes.is_main else True
        if self._processes.any(not taken):
            folder = self._path.parent
            status = read_status(folder)
            raise RunError(
                f"{folder.absolute()}: process {status.get('pid')} on {status.get('host')} is training there; "
                "choose another --out_dir"
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)

    def _take(self) -> bool:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        end, said = time.monotonic() + self._wait, False
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > end:
                    return False
            except OSError:
                return True  # a file system without locks
            if not said:
                say(f"waiting for another process in {self._path.parent.absolute()} to end")
                said = True
            time.sleep(0.2)


def is_locked(folder: Path) -> bool | None:
    """Whether a run is going on in a folder; None where that cannot be known."""
    try:
        file = os.open(folder / "lock", os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(file)
    return False


def read_status(folder: Path) -> dict[str, Any]:
    """What `status.json` says; nothing where it is missing or damaged."""
    return read_json(folder / "status.json")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; nothing where it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replaces a JSON file, whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
