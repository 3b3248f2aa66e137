"""kill -9 at any moment, again and again: each time a whole checkpoint is there, and the run goes on from it to the
losses of one that nobody killed, bit for bit."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from scripts.status import state_of
from tests.conftest import Train
from tests.fresh import start_fresh
from training.checkpoint import CheckpointFolder
from training.folder import read_status

KEEP = 2
# A model whose checkpoint takes as long as some updates, so that one is being written most of the time.
SETTINGS = (
    *("--optimizer=mars-adamw", "--n_layer=2", "--n_embd=128", "--lr_decay_iters=2000", "--eval_interval=7"),
    *("--log_interval=1", "--dropout=0.1"),
)
SAVING = ("--checkpoint_interval=1", f"--keep_checkpoints={KEEP}", "--resume=auto")
FOREVER = "--max_iters=1000000"
FILES = {
    "checkpoints",
    "config.json",
    "config.json.tmp",
    "lock",
    "metrics.jsonl",
    "starts.jsonl",
    "status.json",
    "status.json.tmp",
}


def training_rows(folder: Path) -> list[dict[str, Any]]:
    """In the order of the file; a kill may leave half a line."""
    rows: list[dict[str, Any]] = []
    file = folder / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            assert line.startswith('{"iter": '[: len(line)]), "half a row, not a mixture"
    return [row for row in rows if "train/loss" in row]


class Victim:
    """A run that is started and killed over and over."""

    def __init__(self, train: Train, processes: int) -> None:
        self.folder, self.processes = train.folder("killed"), processes
        self.checkpoints = self.folder / "checkpoints"
        self.arguments = [str(train.config), f"--out_dir={self.folder}", *SETTINGS, *SAVING]
        self.logs = train.root / "logs" / "killed"
        self.workers: list[BaseProcess] = []
        self.newest = self.last_row = self.writes_hit = 0

    def start(self) -> None:
        self.workers = start_fresh([*self.arguments, FOREVER], self.logs, self.processes)

    def wait_for(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert all(worker.is_alive() for worker in self.workers), self.stderr()
            assert time.monotonic() < end, "nothing came"
            time.sleep(0.001)

    def has_grown(self) -> Callable[[], bool]:
        """Whether there are new rows since now."""
        file = self.folder / "metrics.jsonl"
        before = file.stat().st_size if file.exists() else 0
        return lambda: file.exists() and file.stat().st_size > before

    def is_writing(self) -> bool:
        return any(self.checkpoints.glob("*.tmp"))

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            pid = self.workers[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        for rank in ranks:
            self.workers[rank].join(30)
            assert self.workers[rank].exitcode == -signal.SIGKILL, self.stderr()

    def stderr(self) -> str:
        return "".join((self.logs / f"stderr-{rank}").read_text() for rank in range(self.processes))

    def end(self) -> None:
        for worker in self.workers:
            worker.kill()

    def check(self, capsys: pytest.CaptureFixture[str], *states: str) -> None:
        """What holds after each kill; `states` are those that the run may be said to be in."""
        if not self.folder.exists():
            assert self.newest == 0
            return
        rows = [row["iter"] for row in training_rows(self.folder)]
        assert rows == list(range(1, len(rows) + 1)), "each update has one row"
        assert len(rows) >= self.last_row
        self.last_row = len(rows)

        self.writes_hit += self.is_writing()
        checkpoints = CheckpointFolder(self.checkpoints, KEEP)
        newest = checkpoints.load_newest()
        checkpoints.close()
        assert capsys.readouterr().err == "", "every file with a checkpoint's name can be read"
        done = newest["iter"] if newest else 0
        assert done >= self.newest, "nothing that was there is lost"
        assert done >= self.last_row - 2, "a save waits for the one before"
        self.newest = done

        names = [path.name for path in self.checkpoints.iterdir()]
        assert len(names) <= KEEP + 2, names  # the best too, and one that is being written or was to be deleted
        assert sum(name.endswith(".tmp") for name in names) <= 1
        assert {path.name for path in self.folder.iterdir()} <= FILES
        assert state_of(self.folder, read_status(self.folder).get("state")) in states


def finish(train: Train, victim: Victim) -> None:
    """Lets the run come to an end, and compares it with one that was not killed."""
    last = f"--max_iters={victim.last_row + 5}"
    done = train.fresh(*SETTINGS, *SAVING, last, out="killed", processes=victim.processes)
    assert (done.status, done.stderr) == (0, "")
    assert not victim.is_writing()
    straight = train.fresh(*SETTINGS, last, out="straight", processes=victim.processes)
    assert straight.status == 0
    pairs = [(row["iter"], row["train/loss"]) for row in training_rows(done.folder)]
    assert pairs == [(row["iter"], row["train/loss"]) for row in training_rows(straight.folder)]
    assert done.series("val/loss") == straight.series("val/loss")
    assert done.series("iter") == straight.series("iter")


def test_what_a_kill_left_is_deleted_at_the_next_start(run_train: Train) -> None:
    """Also where its update is never made again, so that nothing takes its name."""
    first = run_train("--max_iters=3")
    left = first.folder / "checkpoints" / "iter-00000099.tmp"
    left.write_bytes(b"half a checkpoint")
    again = run_train("--max_iters=6", "--resume=auto")
    assert (again.status, again.stderr) == (0, "")
    assert not left.exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fifty_kills_at_any_moment(run_train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    chance, victim = random.Random(0), Victim(run_train, processes=1)
    try:
        for number in range(50):
            grown = victim.has_grown()
            victim.start()
            if number % 5 == 0:  # while it starts, or soon after
                time.sleep(chance.uniform(0, 0.8))
            else:
                victim.wait_for(grown)
                time.sleep(chance.uniform(0, 0.6))
                if number % 5 == 1:  # in a file for certain, anywhere in it
                    victim.wait_for(victim.is_writing)
                    time.sleep(chance.uniform(0, 0.02))
            victim.kill(0)
            victim.check(capsys, "killed", "not started")
    finally:
        victim.end()
    assert victim.writes_hit >= 5, "the test needs kills within a write"
    finish(run_train, victim)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_kills_of_two_processes_or_one_of_them(run_train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """Without torchrun, which would kill the other: it ends by itself."""
    chance, victim = random.Random(1), Victim(run_train, processes=2)
    kills = [(0, 1), (0,), (0, 1), (1,), (0, 1)]
    try:
        for ranks in kills * 2:
            grown = victim.has_grown()
            victim.start()
            victim.wait_for(grown)
            time.sleep(chance.uniform(0, 0.3))
            victim.kill(*ranks)
            for rank in {0, 1} - set(ranks):
                victim.workers[rank].join(25)
                assert victim.workers[rank].exitcode == 1, "it has noticed, and is gone"
                assert "error: another process of this run is gone" in victim.stderr()
            victim.check(capsys, "failed" if ranks == (1,) else "killed")
    finally:
        victim.end()
    assert victim.writes_hit >= 1, "the test needs kills within a write"
    finish(run_train, victim)
