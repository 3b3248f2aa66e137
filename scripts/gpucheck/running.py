"""Runs the commands of a part within its time, and keeps what came of them."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINES = 25  # of a command that failed, kept of its output
SUCCEEDED, FAILED, CUT_OFF, ABSENT = "succeeded", "failed", "cut off", "absent"


class PartFailed(Exception):
    """A part that did not succeed; the message says why."""

    outcome = FAILED


class CutOff(PartFailed):
    """Its time was over."""

    outcome = CUT_OFF


class Absent(PartFailed):
    """A script that this checkout does not have."""

    outcome = ABSENT


@dataclass(frozen=True)
class Outcome:
    """What came of a part."""

    name: str
    outcome: str
    """succeeded, failed, cut off, or absent"""
    message: str | None
    """why it did not succeed; of a command that failed the end of its output"""
    seconds: float
    limit: float
    """seconds that it might have taken"""
    commands: list[str]
    figures: dict[str, Any]

    @property
    def succeeded(self) -> bool:
        return self.outcome == SUCCEEDED


@dataclass
class Work:
    """What a part works with, and what it leaves."""

    device: str
    """cuda or cpu"""
    folder: Path
    """for its files"""
    end: float
    """until when it may run, by time.monotonic()"""
    environment: dict[str, str]
    """of its commands"""
    commands: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    """what was found; kept also if the part then fails"""

    @property
    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    def python(self, *commands: tuple[object, ...], may_fail: bool = False) -> list[int]:
        """Runs Python programs with their arguments, from the repository's root, all at once. Returns the exit
        statuses.

        Raises:
            CutOff: the part's time was over before all had ended.
            PartFailed: one ended with a status other than 0, unless it `may_fail`.
        """
        running: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
        try:
            for command in commands:
                line = ["python", *map(str, command)]
                self.commands.append(shlex.join(line))
                log = self._log
                with log.open("wb") as output:
                    process = subprocess.Popen(
                        [sys.executable, *line[1:]], stdout=output, stderr=subprocess.STDOUT, cwd=ROOT,
                        env=self.environment, start_new_session=True,
                    )  # fmt: skip
                running.append((self.commands[-1], log, process))
            for line_, log, process in running:
                try:
                    process.wait(max(self.seconds_left, 0.0))
                except subprocess.TimeoutExpired:
                    raise CutOff(f"its time was over during: {line_}\n{end_of(log)}") from None
                if process.returncode != 0 and not may_fail:
                    raise PartFailed(f"status {process.returncode} of: {line_}\n{end_of(log)}")
        finally:
            for _, _, process in running:
                kill(process)
        return [process.returncode for _, _, process in running]

    @property
    def last_output(self) -> str:
        """The end of what the newest command printed."""
        return end_of(self._log)

    @property
    def _log(self) -> Path:
        return self.folder / f"log-{len(self.commands)}.txt"

    def needs(self, script: str) -> None:
        """Raises Absent where the checkout does not have it."""
        if not (ROOT / script).exists():
            raise Absent(f"this checkout has no {script}")


def perform(name: str, run: Callable[[Work], None], work: Work) -> Outcome:
    """Runs a part, whatever comes."""
    start, outcome, message = time.monotonic(), SUCCEEDED, None
    limit = max(work.seconds_left, 0.0)
    try:
        run(work)
    except PartFailed as problem:
        outcome, message = problem.outcome, str(problem)
    except Exception as error:  # so that the other parts are measured
        outcome, message = FAILED, f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    return Outcome(name, outcome, message, round(seconds, 1), round(limit, 1), work.commands, work.figures)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a command, if it still runs, and all that it started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_of(log: Path) -> str:
    """The last lines of a command's output."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LINES:])
