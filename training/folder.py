"""A run's folder as a whole: whose it is, who is training in it, and how the run stands (`status.json`)."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from training import RunError
from training.console import say, warn

if TYPE_CHECKING:  # scripts that only look at a folder need no torch
    from configs import TrainConfig
    from training.processes import Processes

WAIT = 40.0  # seconds; longer than a run that was asked to stop takes, with the default stop_seconds

State = Literal["running", "finished", "stopped", "failed"]


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
        file = os.open(folder / "lock", os.O_RDWR)
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


class Status:
    """`status.json`: how the run stands, for scripts. torchrun ends with 1 whenever its processes end with another
    status than 0, so that its own status says less.

    Args:
        folder: the run's.
        max_iters: updates when it is finished.
        writes: whether this process writes.
    """

    def __init__(self, folder: Path, max_iters: int, writes: bool) -> None:
        self._path, self._max_iters, self._writes = folder / "status.json", max_iters, writes

    def write(self, state: State, update: int, reason: str | None = None) -> None:
        """Replaces the file. A disk that is full leaves it as it was.

        Args:
            state: running; finished; stopped, to be started again; failed.
            update: updates done.
            reason: of a stop or a failure.
        """
        if not self._writes:
            return
        content = {
            "state": state,
            "iter": update,
            "max_iters": self._max_iters,
            "reason": reason,
            "host": platform.node(),
            "pid": os.getpid(),
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        try:
            write_json(self._path, content)
        except OSError as error:
            warn(f"{self._path.absolute()} could not be written: {error.strerror}")

    def confirm_finished(self, update: int) -> None:
        """Writes that the run is finished, unless the file says so: it does not after a kill at the very end."""
        if read_status(self._path.parent).get("state") != "finished":
            self.write("finished", update)


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
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
