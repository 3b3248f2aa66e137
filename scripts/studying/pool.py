"""Makes a study's runs: so many at once, each a `train.py` of its own, until nothing is left to do.

Several of these may work on one study, on one machine or on many that see one folder: a run is started by who holds the
lock of its folder. What is known is read from the folders alone, so that a second start goes on.
"""

from __future__ import annotations

import fcntl
import fnmatch
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from scripts.studying.cells import ROOT, Cell, State, state_of
from scripts.studying.declaration import Study
from scripts.studying.plan import Plan
from training.folder import is_locked

LOCK, LOG = "study.lock", "log.txt"
STOPPED = 75  # of a run, and of a study, that was asked to stop
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
POLL = 0.2  # seconds between looks at the runs
ELSEWHERE = 5.0  # seconds between looks at what others do


class Store:
    """What is known of a study's cells, read from their folders.

    Args:
        study: what is declared.
        folder: where the cells lie.
    """

    def __init__(self, study: Study, folder: Path) -> None:
        self.study, self.folder = study, folder
        self._done: dict[Cell, State] = {}

    def path(self, cell: Cell) -> Path:
        return self.folder / cell.name

    def state(self, cell: Cell) -> State:
        """How it stands. What is done stays so."""
        if cell in self._done:
            return self._done[cell]
        state = state_of(cell, self.path(cell))
        if state.done:
            self._done[cell] = state
        return state

    def plan(self) -> Plan:
        return Plan(self.study, lambda cell: self.state(cell).loss)


@dataclass(frozen=True)
class Slot:
    """A place for a run: threads of a CPU, or a GPU."""

    device: str
    environment: dict[str, str]


def cpu_slots(workers: int, threads: int) -> list[Slot]:
    """Places on a CPU, with so many threads each."""
    return [Slot("cpu", {"OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""})] * workers


def gpu_slots(gpus: list[str], threads: int) -> list[Slot]:
    """A place on each of these GPUs, named as in CUDA_VISIBLE_DEVICES."""
    return [Slot("cuda", {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": str(threads)}) for gpu in gpus]


@dataclass
class Running:
    """A run that goes on here."""

    cell: Cell
    slot: Slot
    process: subprocess.Popen[bytes]
    lock: int
    start: float = field(default_factory=time.monotonic)


@dataclass
class Pool:
    """Runs cells until nothing is left to do, or until asked to stop.

    Args:
        store: the study and its folder.
        slots: places for runs.
        only: patterns of names of cells; no other is run.
        waits: whether to wait where all that is left is at work elsewhere.
        tell: called with a line for each event.
        look: called between looks at the runs.
    """

    store: Store
    slots: list[Slot]
    only: list[str] = field(default_factory=lambda: ["*"])
    waits: bool = True
    tell: Callable[[str], None] = print
    look: Callable[[Pool], None] = lambda pool: None
    running: list[Running] = field(default_factory=list)
    failed: dict[Cell, str] = field(default_factory=dict)
    """why, in a line"""
    elsewhere: set[Cell] = field(default_factory=set)
    """at work in another process"""
    stopping: str | None = None
    """the signal that asked to stop"""
    plan: Plan = field(init=False)

    def run(self) -> int:
        """Returns the exit status: 0 where all that was asked for is done, 1 where something failed, 75 where it was
        asked to stop, or did not wait for what is at work elsewhere."""
        before = {number: signal.signal(number, self._stop) for number in SIGNALS}
        self.plan, told = self.store.plan(), set[str]()
        try:
            while True:
                for line in self.plan.notes:
                    if line not in told:
                        told.add(line)
                        self.tell(line)
                if not self.stopping:
                    self._fill()
                if not self.running and (self.stopping or not self.elsewhere or not self.waits):
                    break
                self._wait()
        finally:
            for each in self.running:
                each.process.terminate()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.failed:
            return 1
        return STOPPED if self.stopping or self.elsewhere else 0

    def wanted(self) -> list[Cell]:
        """The cells that are to be run and not done."""
        return [cell for cell in self.chosen() if not self.store.state(cell).done]

    def chosen(self) -> list[Cell]:
        """The cells that `only` lets through."""
        return [cell for cell in self.plan.cells if any(fnmatch.fnmatchcase(cell.name, part) for part in self.only)]

    def _fill(self) -> None:
        """Starts runs in the free places."""
        free = list(self.slots)
        for each in self.running:
            free.remove(each.slot)
        here = {each.cell for each in self.running}
        self.elsewhere = set()
        for cell in self.wanted():
            if cell in here or cell in self.failed:
                continue
            if not free:
                break
            if self._start(cell, free[0]):
                free.pop(0)

    def _start(self, cell: Cell, slot: Slot) -> bool:
        """Starts a run, unless it is at work elsewhere, done by now, or cannot be."""
        folder = self.store.path(cell)
        folder.mkdir(parents=True, exist_ok=True)
        lock = _take(folder / LOCK)
        if lock is None or is_locked(folder):
            self.elsewhere.add(cell)
            if lock is not None:
                os.close(lock)
            return False
        state = self.store.state(cell)  # it may have been done until now
        if state.done or state.problem:
            os.close(lock)
            if state.problem:
                self._fail(cell, state.problem)
            return False
        command = [sys.executable, *cell.command(folder.absolute(), slot.device)]
        with (folder / LOG).open("ab") as log:
            # A session of its own: Ctrl-C in the terminal reaches this process, which passes one request on. The child
            # keeps the lock, should this process be killed.
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=os.environ | slot.environment,
                start_new_session=True, pass_fds=(lock,),
            )  # fmt: skip
        self.running.append(Running(cell, slot, process, lock))
        self.tell(f"{'goes on' if state.kind == 'begun' else 'started'}: {cell.name}")
        return True

    def _wait(self) -> None:
        """Until something has happened."""
        end = time.monotonic() + ELSEWHERE
        while time.monotonic() < end and not self.stopping:
            if any(each.process.poll() is not None for each in self.running):
                break
            self.look(self)
            time.sleep(POLL)
        if self.stopping:
            for each in self.running:
                with suppress(ProcessLookupError):
                    each.process.send_signal(signal.SIGTERM)
            for each in self.running:
                each.process.wait()
        for each in [each for each in self.running if each.process.poll() is not None]:
            self.running.remove(each)
            os.close(each.lock)
            self._end(each)
        self.plan = self.store.plan()

    def _end(self, each: Running) -> None:
        state, seconds = self.store.state(each.cell), time.monotonic() - each.start
        if state.done:
            loss = "diverged" if state.kind == "diverged" else f"loss {state.loss:.4f}"
            self.tell(f"finished: {each.cell.name}, {loss}, {seconds:.0f} s")
        elif each.process.returncode == STOPPED:
            self.tell(f"stopped: {each.cell.name}")
            self.stopping = self.stopping or "the end of a run"
        elif not self.stopping:
            log = self.store.path(each.cell) / LOG
            self._fail(each.cell, f"{_last_error(log, each.process.returncode)} ({log})")

    def _fail(self, cell: Cell, why: str) -> None:
        self.failed[cell] = why
        self.tell(f"failed: {cell.name}: {why}")

    def _stop(self, number: int, _: object) -> None:
        self.stopping = self.stopping or signal.Signals(number).name


def _take(path: Path) -> int | None:
    """The lock, held by its descriptor as long as that is open anywhere; None where another process has it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    except OSError:
        pass  # a file system without locks; train.py's own lock has none there either
    return file


def _last_error(log: Path, status: int) -> str:
    """The last line of a log that says what was wrong, else its last one."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines[-50:] if line.startswith("error: ")]
    return (errors or lines or [f"status {status}"])[-1].removeprefix("error: ")
