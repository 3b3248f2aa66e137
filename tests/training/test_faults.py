"""Runs that something breaks: processes that fail or are killed, data that go away, a log that nobody reads."""

import errno
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import Train
from tests.training.background import FAULTY, Background, broken, how_it_stands, newest, rows, two_hosts
from tests.training.faulty import MESSAGE
from training.folder import read_status

PROMISED = 60  # seconds from the end of one process to the end of the last


def goes_on(run_train: Train) -> None:
    on, straight = (run_train.fresh("--resume=auto", out=out, processes=2) for out in ("run", "straight"))
    assert (on.status, straight.status) == (0, 0), on.stderr + straight.stderr
    for key in ("train/loss", "val/loss"):
        assert on.series(key) == straight.series(key)


@pytest.mark.parametrize("rank", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_a_process_that_fails_ends_all_and_is_the_one_to_speak(run_train: Train, rank: str) -> None:
    done = broken(run_train, f"raise,5,{rank}", "--checkpoint_interval=2", within=PROMISED)
    assert done.status != 0
    assert f"RuntimeError: {MESSAGE}" in done.stderr
    assert done.stderr.startswith("Traceback (most recent call last)")
    assert "Traceback" not in done.stderr[1 : done.stderr.index(MESSAGE)]
    assert "error: " not in done.stderr, "the others are only surprised"
    assert (read_status(done.folder)["state"], how_it_stands(done.folder)) == ("failed", 1)
    assert newest(done.folder) == 4


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_that_is_killed_ends_all(run_train: Train, rank: str) -> None:
    done = broken(run_train, f"kill,5,{rank}", "--checkpoint_interval=2", within=PROMISED)
    assert done.status != 0
    report = done.stderr.index("exitcode: -9")
    assert f"local_rank: {rank}" in done.stderr[report:].splitlines()[0]
    assert "error: " not in done.stderr
    assert "Traceback" not in done.stderr[:report]
    assert how_it_stands(done.folder) == 1
    # An evaluation made the third one; rank 0 may have died while it wrote the fourth.
    assert newest(done.folder) in ((3, 4) if rank == "0" else (4,))
    goes_on(run_train)


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_that_is_killed_ends_those_of_another_host(run_train: Train, rank: str) -> None:
    one, other = two_hosts(run_train, f"--fault=kill,5,{rank}", program=FAULTY)
    with one, other:
        ends = [one.end(within=PROMISED), other.end(within=PROMISED)]
    assert all(end.status != 0 for end in ends)
    assert sum("exitcode: -9" in end.stderr for end in ends) == 1
    assert how_it_stands(one.folder) == 1


@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_data_that_shrink_end_the_run_in_a_line(run_train: Train, dataset: Path, processes: int | None) -> None:
    popen = run_train.start("--max_iters=100000", "--checkpoint_interval=10", "--eval_interval=0", processes=processes)
    with Background(popen, run_train.folder("run")) as run:
        run.wait_for_update(20)
        os.truncate(dataset / "train.bin", 1000)
        done = run.end(within=PROMISED)
    assert done.status == (1 if processes else 2)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert 1 <= len(errors) <= (processes or 1)
    assert all(line.startswith(f"error: {dataset}/train.bin: ends at byte") for line in errors)
    if processes is None:
        assert read_status(done.folder)["reason"] == errors[0].removeprefix("error: ")
    assert how_it_stands(done.folder) == 1
    assert newest(done.folder) >= 20


def test_a_disk_that_fails_ends_the_run_in_a_line(
    run_train: Train, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, reads = os.pread, 0

    def pread(file: int, count: int, offset: int) -> bytes:
        nonlocal reads
        reads += count == 34  # a training window
        if reads > 8 * 4:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(file, count, offset)

    monkeypatch.setattr(os, "pread", pread)
    done = run_train("--checkpoint_interval=2")
    assert (done.status, done.stderr) == (2, f"error: {dataset}/train.bin: cannot be read: Input/output error\n")
    assert newest(done.folder) == 4


@pytest.mark.slow
@pytest.mark.parametrize("processes", [None, 2])
def test_a_log_that_nobody_reads_does_not_end_the_run(run_train: Train, processes: int | None) -> None:
    popen = run_train.start("--max_iters=200", processes=processes)
    assert popen.stdout is not None
    assert popen.stderr is not None
    with Background(popen, run_train.folder("run")) as run:
        run.wait_for_update(10)
        popen.stdout.close()
        popen.stderr.close()
        popen.wait(60)
        assert popen.returncode == 0
    assert newest(run.folder) == 200
    assert read_status(run.folder)["state"] == "finished"


@pytest.mark.slow
def test_a_log_whose_reader_hangs_does_not_keep_a_run_from_ending(run_train: Train) -> None:
    popen = run_train.start("--max_iters=100000", "--eval_interval=0", "--stop_seconds=2")
    assert popen.stdout is not None
    fcntl.fcntl(popen.stdout, fcntl.F_SETPIPE_SZ, 4096)
    with Background(popen, run_train.folder("run")) as run:
        run.wait_for_update(1)
        before = -1
        while before != (before := len(rows(run.folder))):
            time.sleep(1)  # until it waits for somebody to read
        run.send(signal.SIGTERM, "alone")
        assert popen.wait(10) == 75
