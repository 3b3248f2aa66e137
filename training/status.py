"""How a run stands, for scripts: `status.json`."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from training.console import fail, warn
from training.errors import in_a_line
from training.folder import read_status, write_json

State = Literal["running", "finished", "stopped", "failed"]


class Status:
    """`status.json`: how the run stands, for scripts. torchrun ends with 1 whenever its processes end with another
    status than 0, so that its own status says less. What ends a `with` block by an exception is a failure.

    Args:
        folder: the run's.
        max_iters: updates when it is finished.
        writes: whether this process writes.
    """

    def __init__(self, folder: Path, max_iters: int, writes: bool) -> None:
        self._path, self._max_iters, self._writes = folder / "status.json", max_iters, writes
        self.update = 0
        """updates of the last checkpoint"""
        self.ended = False
        """whether the file says how the run ended"""

    def __enter__(self) -> Status:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: object) -> None:
        if error is not None and not self.ended:  # after the end, other processes may be gone
            self.write("failed", self.update, in_a_line(error))

    def write(self, state: State, update: int, reason: str | None = None) -> None:
        """Replaces the file. Where there is no room for it, it goes: scripts must not read an old one.

        Args:
            state: running; finished; stopped, to be started again; failed.
            update: updates done.
            reason: of a stop or a failure.
        """
        self.ended = state != "running"
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
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def give_up(self, reason: str, seconds: float, failed: bool) -> None:
        """Says, and writes, that a request to stop could not be met within so many seconds."""
        fail(
            f"{reason}: no end after {seconds:g} s; what was done since the last checkpoint (update {self.update}, or "
            "the one before) is lost; --stop_seconds= gives more time"
        )
        self.write("failed" if failed else "stopped", self.update, reason)

    def confirm_finished(self, update: int) -> None:
        """Writes that the run is finished, unless the file says so: it does not after a kill at the very end."""
        if read_status(self._path.parent).get("state") != "finished":
            self.write("finished", update)
