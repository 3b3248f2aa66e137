"""A run's folder as a whole: one run at a time in it, and none written over."""

import errno
import fcntl
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from scripts import status
from tests.conftest import ENVIRONMENT, ROOT, Outcome, Train
from tests.fresh import start_fresh
from training import RunError
from training.folder import FolderLock, is_locked, read_status
from training.processes import Processes

ALONE = Processes(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
COMMON = ("--lr_decay_iters=60", "--eval_interval=50")
FOREVER = (*COMMON, "--max_iters=1000000", "--checkpoint_interval=5")


class Background:
    """Runs in new processes; those that go on are killed at the end of the test."""

    def __init__(self, run_train: Train) -> None:
        self.train, self.workers = run_train, list[BaseProcess]()

    def start(self, *overrides: str, out: str = "run") -> BaseProcess:
        arguments = [str(self.train.config), f"--out_dir={self.train.folder(out)}", *overrides]
        self.workers += start_fresh(arguments, self.train.root / "logs" / out)
        return self.workers[-1]

    def wait_for_update(self, update: int) -> None:
        wait_for(lambda: re.search(rf"update +{update}/", self.output()))

    def output(self, out: str = "run", stream: str = "stdout") -> str:
        file = self.train.root / "logs" / out / f"{stream}-0"
        return file.read_text() if file.exists() else ""


@pytest.fixture
def background(run_train: Train) -> Iterator[Background]:
    runs = Background(run_train)
    yield runs
    for worker in runs.workers:
        worker.kill()
        worker.join()


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.01)


def send(worker: BaseProcess, number: signal.Signals) -> int | None:
    """A signal, and the exit status that follows."""
    assert worker.pid is not None
    os.kill(worker.pid, number)
    worker.join(60)
    return worker.exitcode


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(outcome: Outcome, *parts: str) -> None:
    assert outcome.status == 2
    lines = outcome.stderr.splitlines()
    assert len(lines) == 1, outcome.stderr
    assert lines[0].startswith("error: ")
    for part in parts:
        assert part in lines[0]


def test_a_second_run_is_refused_and_the_first_is_unharmed(
    run_train: Train, background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = run_train(*COMMON, "--max_iters=60", out="straight")
    first, folder = background.start(*FOREVER), run_train.folder("run")
    background.wait_for_update(10)
    monkeypatch.setattr(train, "FolderLock", functools.partial(FolderLock, wait=0.5))
    second = run_train("--max_iters=80", "--resume=auto")
    refused(second, f"{folder}: process {first.pid} on ", "is training there", "--out_dir")
    assert second.stdout == f"waiting for another process in {folder} to end\n"
    refused(run_train("--max_iters=80"), f"{folder} holds a run already", "--resume=auto", "--out_dir")
    background.wait_for_update(70)
    assert read_status(folder)["state"] == "running"
    assert send(first, signal.SIGTERM) == 75
    rows = Outcome(75, "", "", folder)
    assert rows.series("train/loss")[:60] == straight.series("train/loss")
    assert len((folder / "starts.jsonl").read_text().splitlines()) == 1


@pytest.mark.slow
def test_a_run_that_had_to_wait_goes_on_from_where_the_other_ends(run_train: Train, background: Background) -> None:
    """As when a scheduler starts the next job while the last one is still saving."""
    straight = run_train(*COMMON, "--max_iters=300", out="straight")
    first, folder = background.start(*FOREVER), run_train.folder("run")
    background.wait_for_update(10)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGSTOP)
    more = (f"--out_dir={folder}", *COMMON, "--max_iters=300", "--resume=auto")
    second = background.start(*more, out="second")
    wait_for(lambda: "waiting for another process" in background.output("second"))
    os.kill(first.pid, signal.SIGCONT)
    assert send(first, signal.SIGTERM) == 75
    second.join(60)
    assert second.exitcode == 0, background.output("second", "stderr")
    stopped = re.findall(r"stopped after update (\d+)", background.output())
    assert re.findall(r"going on after update (\d+)", background.output("second")) == stopped
    done = Outcome(0, "", "", folder)
    assert done.series("train/loss") == straight.series("train/loss")
    assert done.series("iter") == straight.series("iter")


def test_a_new_run_that_had_to_wait_does_not_write_over_the_other(run_train: Train, background: Background) -> None:
    """Both were started at once in an empty folder, without --resume."""
    other = run_train("--max_iters=3", out="other")
    folder = run_train.folder("run")
    folder.mkdir()
    with FolderLock(folder, ALONE):
        late = background.start("--max_iters=6")
        wait_for(lambda: "waiting for another process" in background.output())
        shutil.copytree(other.folder, folder, dirs_exist_ok=True)
        before = everything(folder)
    late.join(60)
    refused(Outcome(late.exitcode or 0, "", background.output(stream="stderr"), folder), "--resume=auto", "--out_dir")
    assert everything(folder) == before


@pytest.mark.parametrize("trace", ["checkpoints/iter-00000006.pt", "config.json", "metrics.jsonl"])
def test_each_trace_of_a_run_protects_its_folder(run_train: Train, trace: str) -> None:
    done = run_train()
    keep = done.folder / trace
    for path in list(everything(done.folder)):
        if path != keep:
            path.unlink()
    before = everything(done.folder)
    assert list(before) == [keep]
    for overrides in ((), ("--resume=never",), ("--resume=none",)):
        refused(run_train(*overrides), f"{done.folder} holds a run already", "--resume=auto", "--out_dir")
    assert everything(done.folder) == before


def test_resume_auto_starts_where_there_is_nothing_yet(run_train: Train) -> None:
    new = run_train("--resume=auto", out="new")
    run_train.folder("empty").mkdir()
    empty = run_train("--resume=auto", out="empty")
    for run in (new, empty):
        assert (run.status, run.stderr) == (0, "")
        assert "going on" not in run.stdout
    assert new.series("train/loss") == empty.series("train/loss") == run_train(out="none").series("train/loss")


HOLDER = """
import sys, time, torch
from pathlib import Path
from training.folder import FolderLock
from training.processes import Processes
with FolderLock(Path(sys.argv[1]), Processes(rank=0, local_rank=0, size=1, device=torch.device("cpu"))):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    assert is_locked(tmp_path) is None, "nobody was ever there"
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            assert is_locked(tmp_path) is True
            with pytest.raises(RunError, match="is training there"), FolderLock(tmp_path, ALONE, wait=0.5):
                pass
        finally:
            holder.kill()
    assert is_locked(tmp_path) is False
    with FolderLock(tmp_path, ALONE, wait=0):
        assert is_locked(tmp_path) is True
    assert is_locked(tmp_path) is False


def test_a_file_system_without_locks_is_no_obstacle(run_train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    done = run_train()
    assert (done.status, done.stderr) == (0, "")
    assert is_locked(done.folder) is None
    assert status.main([str(done.folder)]) == 0
