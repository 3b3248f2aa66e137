"""Runs that are asked to stop: all processes finish the update, save and go within 25 s, and a resume goes on as if
nothing had been."""

import os
import resource
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from data.batches import EvaluationBatches
from tests.conftest import ROOT, Outcome, Train
from tests.helpers import write_tokens
from tests.training.background import FAULTY, Background, how_it_stands, rows, start_torchrun, two_hosts
from training.ahead import BatchesAhead
from training.folder import FolderLock, read_status
from training.processes import Processes
from training.stopping import SIGNALS, STOPPED, StopRequest

LONG = ("--max_iters=100000", "--lr_decay_iters=100", "--eval_interval=0")
PROMISED = 25  # seconds from a signal to the end of the last process


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def goes_on(run_train: Train, stopped: Outcome, *settings: str, processes: int = 1) -> None:
    """A stopped run left a checkpoint of where it stopped; with a few more updates it is what one in a piece is."""
    status = read_status(stopped.folder)
    assert status["state"] == "stopped", status
    assert status["reason"]
    assert how_it_stands(stopped.folder) == STOPPED
    assert checkpoints(stopped.folder)[-1] == f"iter-{status['iter']:08}.pt"
    common = (*LONG, *settings, f"--max_iters={status['iter'] + 5}")
    straight = run_train.fresh(*common, out="straight", processes=processes)
    on = run_train.fresh(*common, "--resume=auto", out=stopped.folder.name, processes=processes)
    assert (straight.status, on.status) == (0, 0), straight.stderr + on.stderr
    assert f"going on after update {status['iter']}\n" in on.stdout or status["iter"] == 0
    assert len(on.series("train/loss")) == status["iter"] + 5
    for key in ("train/loss", "grad_norm", "val/loss"):
        assert on.series(key) == straight.series(key)


CASES = [
    pytest.param(number, to, marks=[] if number == signal.SIGTERM and to in ("alone", "torchrun") else pytest.mark.slow)
    for number in SIGNALS
    for to in ("alone", "torchrun", "0", "1")
] + [pytest.param(signal.SIGKILL, "torchrun", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("number", "to"), CASES)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on(run_train: Train, number: signal.Signals, to: str) -> None:
    processes = None if to == "alone" else 2
    with Background(run_train.start(*LONG, processes=processes), run_train.folder("run")) as run:
        run.wait_for_update(20)
        run.send(number, to)
        stopped = run.end(within=PROMISED)
    assert "error: " not in stopped.stderr
    if to == "alone":
        assert (stopped.status, stopped.stderr) == (STOPPED, "")
    elif to == "torchrun" and number in (signal.SIGUSR1, signal.SIGKILL):
        assert stopped.status == -number, "the test needs a torchrun that this signal ends at once"
        assert read_status(stopped.folder)["reason"] == "the end of torchrun"
    else:
        assert stopped.status != 0
    goes_on(run_train, stopped, processes=processes or 1)


@pytest.mark.slow
def test_torchrun_may_be_told_to_pass_on_sigusr1(run_train: Train) -> None:
    torchrun = ("--standalone", "--nproc_per_node=2", "--signals_to_handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    with start_torchrun(run_train, *torchrun, "--", *LONG, program=ROOT / "train.py") as run:
        run.wait_for_update(20)
        run.send(signal.SIGUSR1, "torchrun")
        stopped = run.end(within=PROMISED)
    assert stopped.status == 1
    assert read_status(stopped.folder)["reason"] != "the end of torchrun"
    goes_on(run_train, stopped, processes=2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_request_to_one_host_stops_the_other_too(run_train: Train, number: signal.Signals) -> None:
    one, other = two_hosts(run_train, *LONG)
    with one, other:
        other.wait_for_update(20)
        other.send(number, "torchrun")
        ends = [one.end(within=PROMISED), other.end(within=PROMISED)]
    assert all(end.status != 0 for end in ends)
    goes_on(run_train, ends[0], processes=2)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_run_that_a_signal_ended_leaves_its_caller_s_handlers(
    run_train: Train, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    whole = BatchesAhead.micro_batch

    def micro_batch(self: BatchesAhead, update: int, step: int) -> object:
        if (update, step) == (4, 0):
            os.kill(os.getpid(), number)
            time.sleep(0.2)  # until the listening thread has it
        return whole(self, update, step)

    monkeypatch.setattr(BatchesAhead, "micro_batch", micro_batch)
    stopped = run_train()
    assert stopped.status == STOPPED
    assert "stopped after update 4; --resume=auto goes on from there" in stopped.stdout
    status = read_status(stopped.folder)
    assert (status["state"], status["iter"], status["reason"]) == ("stopped", 4, number.name)
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "stop requests"]


def test_a_run_under_nohup_outlives_its_terminal(run_train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = BatchesAhead.micro_batch

    def micro_batch(self: BatchesAhead, update: int, step: int) -> object:
        os.kill(os.getpid(), signal.SIGHUP)
        return whole(self, update, step)

    monkeypatch.setattr(BatchesAhead, "micro_batch", micro_batch)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_train().status == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_in_a_thread_needs_no_signals(run_train: Train) -> None:
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(run_train()))
    thread.start()
    thread.join(60)
    assert [outcome.status for outcome in outcomes] == [0], outcomes


@pytest.mark.parametrize("update", [0, 3])
def test_an_evaluation_is_broken_off_and_comes_first_on_resume(
    run_train: Train, monkeypatch: pytest.MonkeyPatch, update: int
) -> None:
    """The one before update 1 as well: it leaves a checkpoint of the start."""
    straight = run_train(out="straight")
    whole = EvaluationBatches.__getitem__
    evaluated: list[int] = []

    def batch(self: EvaluationBatches, index: int) -> object:
        evaluated.append(index)
        if evaluated.count(2) == 1 + update // 3 and index == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # until the listening thread has it
        return whole(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(EvaluationBatches, "__getitem__", batch)
        stopped = run_train()
    assert stopped.status == STOPPED
    assert evaluated[-1] == 2
    assert checkpoints(stopped.folder) == [f"iter-{update:08}.pt"]
    assert update not in [row["iter"] for row in stopped.rows if "val/loss" in row]
    on = run_train("--resume=auto")
    assert on.status == 0, on.stderr
    for key in ("iter", "train/loss", "val/loss"):
        assert on.series(key) == straight.series(key)


@pytest.mark.slow
@pytest.mark.parametrize(("to", "update"), [("alone", 10), ("torchrun", 0), ("1", 10)])
def test_a_signal_during_a_long_evaluation(run_train: Train, tmp_path: Path, to: str, update: int) -> None:
    tokens = [k * k % 64 for k in range(60_000)]
    long = (f"--dataset={write_tokens(tmp_path / 'long', tokens[:5000], tokens)}", "--eval_interval=10")
    processes = None if to == "alone" else 2
    with Background(run_train.start(*LONG, *long, processes=processes), run_train.folder("run")) as run:
        run.wait_for_start()
        if update:
            run.wait_for_update(update)
        time.sleep(0.1)
        run.send(signal.SIGTERM, to)
        stopped = run.end(within=PROMISED)
    assert read_status(stopped.folder)["iter"] == update
    assert update not in [row["iter"] for row in rows(stopped.folder) if "val/loss" in row], "too late for the test"
    goes_on(run_train, stopped, *long, processes=processes or 1)


def stuck(run_train: Train, *settings: str) -> Background:
    """A run whose sixth update takes a minute."""
    popen = run_train.start(*LONG, "--checkpoint_interval=2", "--fault=sleep,6,all", *settings, program=FAULTY)
    return Background(popen, run_train.folder("run"))


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(run_train: Train) -> None:
    with stuck(run_train, "--stop_seconds=50") as run:
        run.wait_for_update(5)
        run.send(signal.SIGINT, "alone")
        time.sleep(0.2)
        run.send(signal.SIGINT, "alone")  # torchrun's, after that of the terminal, is not a second wish
        time.sleep(1.3)
        assert run.popen.poll() is None
        run.send(signal.SIGINT, "alone")
        stopped = run.end(within=5)
    assert (stopped.status, stopped.stderr) == (
        130,
        "error: interrupted again: ended at once; what was not saved yet is lost\n",
    )
    assert "SIGINT: finishing this update, then saving; once more ends at once\n" in stopped.stdout


@pytest.mark.slow
def test_an_update_that_takes_too_long_is_given_up(run_train: Train) -> None:
    with stuck(run_train, "--stop_seconds=2") as run:
        run.wait_for_update(5)
        run.send(signal.SIGTERM, "alone")
        time.sleep(1)
        assert run.popen.poll() is None
        stopped = run.end(within=5)
    assert stopped.status == STOPPED
    assert stopped.stderr.startswith(
        "error: SIGTERM: no end after 2 s; what was done since the last checkpoint (update 4,"
    )
    assert stopped.stderr.count("\n") == 1
    assert checkpoints(stopped.folder) == ["iter-00000002.pt", "iter-00000004.pt"]
    goes_on(run_train, stopped)


@pytest.mark.slow
def test_an_update_that_takes_too_long_on_one_of_two(run_train: Train) -> None:
    """Within torchrun's own patience too, so that it kills nobody."""
    settings = (*LONG, "--checkpoint_interval=2", "--fault=sleep,6,1", "--stop_seconds=2")
    popen = run_train.start(*settings, processes=2, program=FAULTY)
    with Background(popen, run_train.folder("run")) as run:
        run.wait_for_update(5)
        time.sleep(0.5)
        run.send(signal.SIGTERM, "torchrun")
        stopped = run.end(within=15)
    assert stopped.status != 0
    errors = [line for line in stopped.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: SIGTERM: no end after 2 s; what was done since the last checkpoint (update 4,")
    assert checkpoints(stopped.folder)[-1] == "iter-00000004.pt"


def test_a_request_is_heard_with_a_thousand_files_open() -> None:
    """A data set of many shards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with StopRequest(30, lambda reason: None, announce=False) as stop:
            assert max(files) >= 1024
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
            assert stop.reason == "SIGTERM"
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_processes_whose_torchrun_ends_while_they_wait_do_not_train(run_train: Train) -> None:
    folder = run_train.folder("run")
    folder.mkdir()
    with FolderLock(folder, Processes(0, 0, 1, torch.device("cpu"))):
        popen = run_train.start(*LONG, processes=2)
        assert popen.stdout is not None
        assert popen.stdout.readline().startswith("waiting for another process")
        popen.send_signal(signal.SIGUSR1)
        popen.wait(10)
    with Background(popen, folder) as run:
        run.end(within=25)
    assert checkpoints(folder) in ([], ["iter-00000000.pt"])


@pytest.mark.parametrize("under_torchrun", [True, False])
def test_the_end_of_the_parent_counts_under_torchrun_only(
    monkeypatch: pytest.MonkeyPatch, under_torchrun: bool
) -> None:
    """A run that was started in the background of a shell outlives the shell."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if under_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with StopRequest(30, lambda reason: None, announce=False) as stop:
        time.sleep(0.6)
        assert stop.reason is None
        monkeypatch.setattr(os, "getppid", lambda: 1)
        time.sleep(1.5)
    assert stop.reason == ("the end of torchrun" if under_torchrun else None)
