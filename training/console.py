"""What a run prints. A log on a full disk, or a reader that is gone, does not end it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TextIO


def prepare() -> None:
    """Makes standard output and error usable where they are closed or cannot hold every character. Descriptors 0 to 2
    must not become those of a checkpoint, into which some library then prints."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 (open until the end)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def say(line: str) -> None:
    """A line, or several, on standard output."""
    _print(line, sys.stdout)


def warn(line: str) -> None:
    """A warning on standard error."""
    _print(f"warning: {_in_one(line)}", sys.stderr)


def fail(line: str) -> None:
    """An error on standard error."""
    _print(f"error: {_in_one(line)}", sys.stderr)


def _in_one(line: str) -> str:
    """Names of files, and values on a command line, may have line breaks in them."""
    return line.replace("\n", "\\n").replace("\r", "\\r")


def flush() -> None:
    """Sends what is still held back, or drops it: Python itself would end with a status of its own."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _drop(stream)


def _print(line: str, stream: TextIO) -> None:
    try:
        stream.write(line + "\n")  # in one call, so that lines of several threads do not mix
        stream.flush()
    except BrokenPipeError:
        _drop(stream)
    except OSError:
        pass


def _drop(stream: TextIO) -> None:
    """Sends a stream nowhere from here on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
