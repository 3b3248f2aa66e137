"""Checkpoints: `checkpoints/iter-00001000.pt`, each whole or not there at all.

The loop waits while the state is copied to host memory; a thread writes it from there, under a temporary name, flushes
it to disk and renames it. `torch.load(weights_only=True)` opens a file; its keys are `KEYS` (`model` has the names of
`model.py`).
"""

from __future__ import annotations

import os
import re
import time
import zipfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training import RunError
from training.console import say, warn

# Of the run at the end of update `iter`: `evaluated` is the last update with an evaluation, `time` the seconds of
# training, `skipped` the updates without effect (in all, and at the end in a row), `data` the fingerprint of the data.
KEYS = (
    *("model", "optimizer", "scaler", "config", "data", "iter", "evaluated", "best_val_loss", "best_iter", "time"),
    "skipped",
)


class CheckpointFolder:
    """The checkpoints of a run: the newest `keep`, which include the last, and the best.

    Args:
        path: the folder; made at the first save.
        keep: how many of the newest to keep.
        speaks: whether this process warns of files that cannot be read.
    """

    def __init__(self, path: Path, keep: int, speaks: bool = True) -> None:
        self.path, self.keep, self._speaks = path, keep, speaks
        self.failures: list[str] = []
        """a line for each checkpoint that could not be written"""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._writing: Future[None] | None = None
        self._unreadable: set[Path] = set()

    def save(self, checkpoint: dict[str, Any]) -> None:
        """Copies a checkpoint to host memory and has it written, and those deleted that are no longer wanted. If the
        one before is still being written, waits for that first, so that memory never holds two.

        A checkpoint that cannot be written (a full disk), or whose weights are not finite, is a warning and a line in
        `failures`; the ones before it stay.
        """
        start = time.perf_counter()
        self.wait()
        copy = _to_host(checkpoint)
        self._writing = self._writer.submit(self._write, copy, time.perf_counter() - start)

    def wait(self) -> None:
        """Returns when nothing is being written any more."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def close(self) -> None:
        """Waits, and ends the thread."""
        self.wait()
        self._writer.shutdown()

    def load_newest(self) -> dict[str, Any] | None:
        """The newest checkpoint that can be read, in host memory, or None where there is no file. (On the device it
        would need room beside the model, and step counts that optimizers keep on the host would move there.)

        Raises:
            RunError: there are files, and none of them can be read.
        """
        files = self.files()
        for path in reversed(files):
            try:
                return read_checkpoint(path)
            except RunError as error:
                self._unreadable.add(path)
                if self._speaks:
                    warn(f"skipped: {error}")
        if files:
            raise RunError(f"{self.path.absolute()}: no checkpoint can be read")
        return None

    def delete_leftovers(self) -> None:
        """Deletes what a process left that was killed while it wrote. To be called by the one that will write."""
        for path in self.path.glob("iter-*.tmp"):
            path.unlink(missing_ok=True)

    def _write(self, checkpoint: dict[str, Any], waited: float) -> None:
        start, update, target = time.perf_counter(), checkpoint["iter"], self.file(checkpoint["iter"])
        try:
            check_finite(checkpoint["model"])
            self.path.mkdir(exist_ok=True)  # not the run's folder: if that was moved, this is not the place any more
            _write_whole(target, checkpoint)
            size = target.stat().st_size / 1e6
        except Exception as error:  # torch wraps those of the disk in others
            self.failures.append(f"{target.absolute()}: {_reason(error)}")
            warn(f"update {update}: no checkpoint, training goes on: {self.failures[-1]}")
            return
        self._unreadable.discard(target)
        self._delete_old(update, checkpoint["best_iter"])
        seconds = time.perf_counter() - start
        say(f"update {update}: saved {target} ({size:,.1f} MB in {seconds:.1f} s, training waited {waited:.2f} s)")

    def _delete_old(self, update: int, best: int) -> None:
        """Keeps the newest of those up to this update, and the best. Newer ones, and those that could not be read, do
        not count: they are of no use to this run, but may be to somebody."""
        files = [path for path in self.files() if _update_of(path) <= update]
        files = [path for path in files if path not in self._unreadable and path.is_file()]
        wanted = {*files[-self.keep :], self.file(best)}
        for old in files:
            if old not in wanted:
                with suppress(OSError):
                    old.unlink()

    def files(self) -> list[Path]:
        """All that are there, by their updates."""
        names = [path for path in self.path.glob("iter-*.pt") if re.fullmatch(r"iter-\d{8,}\.pt", path.name)]
        return sorted(names, key=_update_of)

    def file(self, update: int) -> Path:
        """Where the checkpoint of an update is."""
        return self.path / f"iter-{update:08}.pt"


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint, in host memory.

    Raises:
        RunError: the file is missing, damaged or no checkpoint.
    """
    try:
        _check_sums(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(checkpoint, dict) and set(KEYS) <= set(checkpoint):
            return checkpoint
        missing = set(KEYS) - set(checkpoint) if isinstance(checkpoint, dict) else KEYS
        problem = f"it lacks {', '.join(sorted(missing))}"
    except MemoryError:
        raise
    except Exception as error:  # whatever a damaged file makes of the unpickler
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    raise RunError(f"{path.absolute()} is not a checkpoint: {problem}")


def _update_of(path: Path) -> int:
    return int(path.stem.removeprefix("iter-"))


def _write_whole(target: Path, checkpoint: dict[str, Any]) -> None:
    temporary = target.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # some file systems cannot do this for a folder
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name itself
        finally:
            os.close(folder)


def _check_sums(path: Path) -> None:
    """torch itself reads a file with changed bytes without a word, though it writes their sums."""
    with zipfile.ZipFile(path) as archive:
        if (damaged := archive.testzip()) is not None:
            raise RunError(f"its part {damaged} was changed since it was written")


def _to_host(tree: Any) -> Any:
    """A copy of nested dicts, lists and tuples with their tensors in host memory; tensors that share memory (tied
    weights) still do."""
    copies: dict[tuple[Any, ...], Tensor] = {}
    devices: set[torch.device] = set()

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            place = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
            if place not in copies or value.numel() == 0:
                pinned = value.device.type == "cuda"  # so that the copies of many tensors run at full speed
                host = torch.empty_like(value, device="cpu", pin_memory=pinned)
                copies[place] = host.copy_(value.detach(), non_blocking=pinned)
                devices.add(value.device)
            return copies[place]
        if isinstance(value, dict):
            return {key: copy(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(copy(item) for item in value)
        return value

    result = copy(tree)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return result


def check_finite(tensors: dict[str, Tensor]) -> None:
    """Raises RunError where a tensor holds an infinity or NaN."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise RunError(f"{name} is not finite any more")


def _reason(error: BaseException) -> str:
    """What lay behind an error: the disk's own word where there is one."""
    causes: Iterable[BaseException | None] = (error, error.__cause__, error.__context__)
    for cause in causes:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__
