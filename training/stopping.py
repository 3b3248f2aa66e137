"""Requests to stop: the signals that a scheduler, torchrun or a person sends, and the end of torchrun itself.

SIGTERM, SIGINT, SIGUSR1 and SIGHUP do not end the process; they ask it to finish the update, to save, and to go. A
thread takes them, since Python's own handlers wait as long as the main thread is in one call, and a collective
operation with a process that is gone can be a long one. Another ends the process when stopping takes too long, since
torchrun kills its processes 30 s after SIGTERM. torchrun itself dies at once of SIGUSR1 (unless started with
`--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1`) and of SIGKILL; its processes then see that their parent
has changed.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from training.console import fail, flush, say

# Exit statuses, of sysexits.h.
STOPPED = 75  # EX_TEMPFAIL: not finished, to be started again
UNSAVED = 74  # EX_IOERR: something could not be written

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
ORPHANED = "the end of torchrun"
REASONS = (*(number.name for number in SIGNALS), ORPHANED)
PARENT = os.getppid()  # now: later it could be gone already
ENOUGH = 1.0  # seconds after which a second Ctrl-C is meant: torchrun passes on the first


class StopRequest:
    """Listens within a `with` block.

    Args:
        seconds: from a request to the end of the process, whatever it is doing then.
        at_deadline: called with the reason before that end, from another thread; returns the exit status.
        announce: whether to print that a request has come.
    """

    def __init__(self, seconds: float, at_deadline: Callable[[str], int], announce: bool = True) -> None:
        self.reason: str | None = None
        """SIGTERM, SIGINT, SIGUSR1, SIGHUP or "the end of torchrun"; None as long as nothing asks to stop"""
        self._seconds, self._at_deadline, self._announce = seconds, at_deadline, announce
        self._since = 0.0
        self._end: threading.Timer | None = None

    def votes(self) -> list[float]:
        """The reason as numbers that can be summed over processes; for `agreed_reason`."""
        return [float(self.reason == reason) for reason in REASONS]

    def __enter__(self) -> StopRequest:
        self._before: dict[signal.Signals, Any] = {}
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            for number in SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # nohup
                self._before[number] = signal.signal(number, lambda *_: None)
                signal.siginterrupt(number, False)
            self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._look_for_parent()
        self._thread = threading.Thread(target=self._listen, name="stop requests", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._before.items():
                signal.signal(number, handler)
        if self._end is not None:
            self._end.cancel()
        os.close(self._writing)
        self._thread.join(1.0)
        if not self._thread.is_alive():  # it could still be waiting for whoever reads what it prints
            os.close(self._reading)

    def _listen(self) -> None:
        poll = select.poll()  # select.select fails from the 1024th open file on
        poll.register(self._reading, select.POLLIN)
        while True:
            if poll.poll(500):
                numbers = os.read(self._reading, 64)
                if not numbers:  # closed at the end of the block
                    return
                for number in numbers:
                    self._take(number)
            self._look_for_parent()

    def _look_for_parent(self) -> None:
        if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != PARENT:
            self._ask(ORPHANED)

    def _take(self, number: int) -> None:
        if number not in SIGNALS:
            return
        if number == signal.SIGINT and self.reason is not None and time.monotonic() - self._since > ENOUGH:
            fail("interrupted again: ended at once; what was not saved yet is lost")
            flush()
            os._exit(128 + signal.SIGINT)
        self._ask(signal.Signals(number).name)

    def _ask(self, reason: str) -> None:
        if self.reason is None:
            self._since = time.monotonic()
            self.reason = reason
            self._end = threading.Timer(self._seconds, self._end_now, [reason])
            self._end.daemon = True
            self._end.start()
            if self._announce:
                again = "; once more ends at once" if reason == "SIGINT" else ""
                say(f"{reason}: finishing this update, then saving{again}")

    def _end_now(self, reason: str) -> None:
        # In a thread of its own: a log that nobody reads must not keep the process alive.
        codes: list[int] = []
        last_words = threading.Thread(target=lambda: codes.append(self._at_deadline(reason)), daemon=True)
        last_words.start()
        last_words.join(1.0)
        os._exit(codes[0] if codes else STOPPED)


def agreed_reason(votes: list[float]) -> str | None:
    """The reason that one process or more had, the same on all; None where none was asked to stop."""
    return next((reason for reason, count in zip(REASONS, votes, strict=True) if count > 0), None)
