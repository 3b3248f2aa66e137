"""How a run stands, for scripts: `status.json` and `scripts/status.py`."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch

from scripts import status
from tests.conftest import ROOT, Train
from training.folder import FolderLock, read_status
from training.processes import Processes
from training.status import State, Status

ALONE = Processes(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
FOREVER = ("--max_iters=1000000", "--lr_decay_iters=60", "--eval_interval=50", "--checkpoint_interval=5")


@pytest.mark.slow
def test_how_a_run_stands_through_its_life(run_train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_train.folder("run")

    def start_and_wait_for(condition: Callable[[], bool], *overrides: str) -> subprocess.Popen[str]:
        run = run_train.start(*FOREVER, *overrides)
        end = time.monotonic() + 60
        while not condition():
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)
        return run

    def end(run: subprocess.Popen[str], number: signal.Signals) -> int:
        run.send_signal(number)
        run.communicate(timeout=60)
        return run.returncode

    def line(expected: int) -> str:
        capsys.readouterr()
        assert status.main([str(folder)]) == expected
        out = capsys.readouterr().out
        assert out.startswith(f"{folder}: ")
        assert out.count("\n") == 1
        return out.removeprefix(f"{folder}: ")

    assert line(1).startswith("not started; no checkpoint")
    run = start_and_wait_for(lambda: len(list((folder / "checkpoints").glob("iter-*.pt"))) > 1)
    running = line(3)
    assert running.startswith("running; ")
    assert " of 1,000,000 updates; last checkpoint iter-000" in running
    assert end(run, signal.SIGTERM) == 75
    stopped = read_status(folder)
    assert (stopped["state"], stopped["reason"], stopped["pid"]) == ("stopped", "SIGTERM", run.pid)
    assert f"stopped; {stopped['iter']} of 1,000,000 updates; last checkpoint iter-{stopped['iter']:08}.pt" in line(75)
    assert "; SIGTERM; 20" in line(75)

    run = start_and_wait_for(lambda: read_status(folder)["pid"] != stopped["pid"], "--resume=auto")
    assert line(3).startswith(f"running; {stopped['iter']} of ")
    assert end(run, signal.SIGKILL) == -signal.SIGKILL
    assert line(1).startswith(f"killed; {stopped['iter']} of 1,000,000 updates; last checkpoint iter-")
    assert read_status(folder)["state"] == "running", "nobody could say otherwise"

    failed = run_train("--resume=auto", "--max_iters=1000000", "--learning_rate=1e30", "--max_bad_updates=2")
    assert failed.status == 2
    assert read_status(folder)["state"] == "failed"
    reason = failed.stderr.splitlines()[-1].removeprefix("error: ")
    assert reason.startswith("loss or gradient norm was not finite in 2 updates in a row")
    assert reason in line(1)

    done = run_train("--resume=auto", f"--max_iters={stopped['iter'] + 200}", *FOREVER[1:])
    assert done.status == 0
    last = stopped["iter"] + 200
    assert line(0).startswith(f"finished; {last} of {last} updates; last checkpoint iter-{last:08}.pt; 20")


def test_of_several_runs_the_worst_one_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for state in get_args(State):
        (tmp_path / state).mkdir()
        Status(tmp_path / state, max_iters=6, writes=True).write(state, 6)
    cases = {
        ("finished",): 0,
        ("finished", "stopped"): 75,
        ("stopped", "finished"): 75,
        ("finished", "running", "stopped"): 3,
        ("finished", "failed", "running", "stopped"): 1,
        ("finished", "nothing here"): 1,
    }
    with FolderLock(tmp_path / "running", ALONE):
        for names, expected in cases.items():
            capsys.readouterr()
            assert status.main([str(tmp_path / name) for name in names]) == expected, names
            lines = capsys.readouterr().out.splitlines()
            assert [text.split(";")[0] for text in lines] == [
                f"{tmp_path / name}: {'not started' if name == 'nothing here' else name}" for name in names
            ]
    assert status.main([str(tmp_path / "running"), str(tmp_path / "finished")]) == 1, "killed"


DAMAGED = (
    *(b"", b'{"state": "fini', b"\xff\xfe\x00", b"[1]", b"[" * 100_000, b'{"state": ["finished"]}'),
    *(b'{"state": "gone"}', b'{"state": "finished", "iter": "six"}', b'{"state": "finished", "iter": 6}'),
    b'{"iter": null, "reason": 5}',
)


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: content[:40].decode("latin-1"))
def test_a_damaged_status_stops_neither_the_script_nor_the_run(run_train: Train, content: bytes) -> None:
    run_train("--max_iters=3")
    folder = run_train.folder("run")
    (folder / "status.json").write_bytes(content)
    assert status.main([str(folder)]) in (0, 1)
    again = run_train("--max_iters=6", "--resume=auto")
    assert (again.status, again.stderr) == (0, "")
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    assert status.main([str(folder)]) == 0


def test_the_script_as_typed(tmp_path: Path) -> None:
    """From another folder."""
    Status(tmp_path, max_iters=6, writes=True).write("stopped", 2_000, "SIGUSR1")
    command = [sys.executable, str(ROOT / "scripts" / "status.py")]
    done = subprocess.run([*command, "."], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (75, "")
    assert done.stdout.startswith(".: stopped; 2,000 of 6 updates; no checkpoint; SIGUSR1; 20")
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 2


def test_a_start_that_fails_is_not_taken_for_the_stop_before(run_train: Train, tmp_path: Path) -> None:
    """Or a script would start it again for ever."""
    run_train("--max_iters=3", "--lr_decay_iters=6")
    folder = run_train.folder("run")
    Status(folder, max_iters=6, writes=True).write("stopped", 3, "SIGTERM")
    assert status.main([str(folder)]) == 75
    newest = folder / "checkpoints" / "iter-00000003.pt"
    newest.write_bytes(newest.read_bytes()[:100])
    (folder / "checkpoints" / "iter-00000000.pt").unlink(missing_ok=True)
    assert run_train("--resume=auto").status == 2
    assert status.main([str(folder)]) == 1


def test_a_stopped_run_has_the_updates_of_its_checkpoint(run_train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """Not of rows that an earlier process wrote before it was killed."""
    run_train()
    folder = run_train.folder("run")
    Status(folder, max_iters=6, writes=True).write("stopped", 3, "SIGTERM")
    status.main([str(folder)])
    assert "stopped; 3 of 6 updates" in capsys.readouterr().out
