"""Weights & Biases: the real package, offline or with a small server, and never in the way."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from tests.conftest import ROOT, Outcome, Train
from tests.training.wandb_backend import Server, recordings
from training.tracking import Tracker, labels

Start = Callable[..., Outcome]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

NEVER = "http://127.0.0.1:9"


@pytest.fixture
def without_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings and no login of whoever runs the tests."""
    for key in os.environ:
        if key.startswith("WANDB_"):
            monkeypatch.delenv(key)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def start(run_train: Train, without_login: None) -> Iterator[Start]:
    """train.py with wandb, in this process, which forgets wandb's settings after each run as a new one would."""

    def run(*overrides: str, out: str = "run") -> Outcome:
        done = run_train("--wandb_log=True", *overrides, out=out)
        wandb.teardown()
        assert done.status == 0, done.stderr
        return done

    yield run
    wandb.teardown()


@pytest.fixture
def run_process(config: Path, without_login: None) -> Run:
    """The same in a new process, or under torchrun."""

    def run(*overrides: str, processes: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        command = [*(torchrun if processes else []), str(ROOT / "train.py"), str(config), "--wandb_log=True"]
        return python(*command, *overrides, **environment)

    return run


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def login(monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    for key, value in (environment | {"WANDB_API_KEY": "0" * 40}).items():
        monkeypatch.setenv(key, value)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def as_sent(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that wandb should have for those of metrics.jsonl."""
    kinds = ("variance/noise_scale", "train/loss", "val/loss")
    return [row | {"_step": 3 * row["iter"] + next(n for n in range(3) if kinds[n] in row)} for row in rows]


def own(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without the times that wandb adds, and without the seconds, which may be those of another process."""
    return [{key: value for key, value in row.items() if key not in ("_timestamp", "_runtime", "time")} for row in rows]


def identity(folder: Path) -> str:
    return json.loads((folder / "wandb.json").read_text())["id"]


def test_an_offline_run_has_everything(start: Start) -> None:
    done = start("--optimizer=mars-adamw", "--wandb_x_axis=tokens", "--wandb_run_name=2024", "--log_variance=2")
    assert "no login on this machine, recording offline" in done.stdout
    (part,) = (done.folder / "wandb").glob("offline-run-*")
    assert done.stdout.endswith(f"wandb: recorded offline; to send it: wandb sync {part}\n")

    (recording,) = recordings(done.folder)
    assert own(recording.rows) == own(as_sent(done.rows))
    keys = set().union(*recording.rows)
    assert keys >= {"iter", "tokens", "time", "train/loss", "val/loss", "lr", "grad_norm", "tokens_per_sec"}
    assert keys >= {"mars/clip_rate", "update_ratio/matrices", "update_ratio/embeddings", "update_ratio/vectors"}
    assert keys >= {"variance/noise_scale", "variance/corrected_error", "variance/average_cosine", "variance_seconds"}
    run = recording.run
    assert (run.run_id, run.display_name, run.project) == (identity(done.folder), "2024", "mars-gpt2")
    assert (run.run_group, run.job_type) == ("gpt2-27.3k data", "mars-adamw")
    assert set(run.tags) == {"mars-adamw", "gpt2-27.3k", "data", "seed 5000"}
    record = json.loads((done.folder / "config.json").read_text())
    assert {key: recording.config[key] for key in record} == record
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    if commit.returncode == 0:
        assert recording.commit == commit.stdout.strip()
        assert recording.commit.startswith(record["code_version"].removesuffix("-dirty"))
    assert recording.metrics["*"].step_metric == recording.metrics["val/loss"].step_metric == "tokens"
    assert recording.metrics["val/loss"].summary.min
    assert (recording.exit_code, recording.preempted) == (0, False)


def test_group_job_type_and_tags() -> None:
    record = {"parameters": 124_373_760, "dataset": "openwebtext", "optimizer": "mars-adamw", "seed": 1, "exact": True}
    tags = ["mars-adamw", "gpt2-124M", "openwebtext", "seed 1", "exact"]
    assert labels(record) == {"group": "gpt2-124M openwebtext", "job_type": "mars-adamw", "tags": tags}
    adamw = labels(record | {"optimizer": "adamw", "exact": False})
    assert (adamw["group"], adamw["job_type"]) == ("gpt2-124M openwebtext", "adamw")
    sizes = {354_599_936: "355M", 773_582_080: "774M", 1_556_840_000: "1.56B", 834_000: "834k"}
    for parameters, size in sizes.items():
        assert labels(record | {"parameters": parameters})["group"] == f"gpt2-{size} openwebtext"
    moved = record | {"data": {"path": "/elsewhere/fineweb_edu"}, "dataset": "../x"}
    assert labels(moved)["group"] == "gpt2-124M fineweb_edu"
    assert len(max(labels(record | {"dataset": "d" * 90})["tags"], key=len)) == 64
    chosen = {"wandb_group": "sweep", "wandb_job_type": "baseline", "wandb_tags": ["a", "b"]}
    assert labels(record | chosen) == {"group": "sweep", "job_type": "baseline", "tags": ["a", "b"]}


@pytest.mark.slow
def test_a_resumed_run_goes_on_offline_and_becomes_one_run_on_the_server(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here with a row that the second process computes again, and one that the first could not send."""
    common = ("--checkpoint_interval=1", "--keep_checkpoints=9", "--eval_interval=2", "--lr_decay_iters=6")
    folder = start("--max_iters=3", *common).folder
    (folder / "checkpoints" / "iter-00000003.pt").unlink()
    note = json.loads((folder / "wandb.json").read_text())
    assert note["sent"]["iter"] == 3
    assert "val/loss" in note["sent"]
    again = start(*common, "--resume=auto", "--wandb_tags=a,b")
    assert len(again.rows) == 6 + len([0, 2, 3, 4, 6])
    first, second = recordings(folder)
    assert first.run.run_id == second.run.run_id == identity(folder)
    assert own(first.rows + second.rows) == own(as_sent(again.rows)), "no row twice, none missing"

    parts = sorted((folder / "wandb").glob("offline-run-*"))
    command = again.stdout.splitlines()[-1].removeprefix("wandb: recorded offline; to send it: ")
    assert command.split() == ["wandb", "sync", *map(str, parts)]
    with Server() as server:
        login(monkeypatch, WANDB_BASE_URL=server.url)
        monkeypatch.chdir(folder)  # where the command leaves its log
        sent = python("-m", *command.split())
        assert sent.returncode == 0, sent.stderr
        assert list(server.buckets) == [identity(folder)]
        assert own(server.history(identity(folder))) == own(as_sent(again.rows))
        bucket = server.buckets[identity(folder)]
    assert (bucket["groupName"], bucket["jobType"]) == ("gpt2-27.3k data", "adamw")
    assert {"a", "b"} <= set(bucket["tags"])


@pytest.mark.slow
def test_another_course_and_a_copy_are_other_runs(start: Start, tmp_path: Path) -> None:
    common = ("--checkpoint_interval=1", "--keep_checkpoints=9", "--lr_decay_iters=6", "--resume=auto")
    folder = start("--max_iters=3", *common).folder
    before = identity(folder)
    shutil.copytree(folder, tmp_path / "copy")
    copy = start("--max_iters=4", *common, out="copy")
    assert identity(copy.folder) != before == identity(folder)
    assert own(recordings(copy.folder)[-1].rows) == own(as_sent(copy.rows)), "a run of its own has all rows"

    (tmp_path / "link").symlink_to(folder)
    assert identity(start("--max_iters=4", *common, out="link").folder) == before, "a link is no copy"
    folder.rename(tmp_path / "moved")
    (tmp_path / "link").unlink()
    moved = start("--max_iters=5", *common, out="moved").folder
    assert identity(moved) == before

    (moved / "checkpoints" / "iter-00000005.pt").unlink()
    other = start("--max_iters=5", *common, "--learning_rate=2e-3", out="moved")
    assert "it goes on as a new run there" in other.stdout
    assert identity(moved) != before
    recording = recordings(moved)[-1]
    assert own(recording.rows) == own(as_sent(other.rows))
    assert recording.config["learning_rate"] == 2e-3

    known = json.loads((moved / "wandb.json").read_text())
    (moved / "wandb.json").write_text(json.dumps(known | {"id": "a/b?"}))
    start("--max_iters=6", *common, "--learning_rate=2e-3", out="moved")
    assert re.fullmatch(r"\w+", identity(moved)), "an id that wandb would refuse is a damaged one"


def ended_by_a_signal(run_train: Train, when: str, *overrides: str) -> tuple[int, str, str]:
    """A run with wandb gets SIGTERM once status.json says `when`. Returns the exit status, errors, and what the file
    says then."""
    command = [sys.executable, str(ROOT / "train.py"), str(run_train.config), f"--out_dir={run_train.folder('run')}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--wandb_log=True", *overrides], stderr=subprocess.PIPE, text=True, env=environment
    )
    file, deadline = run_train.folder("run") / "status.json", time.monotonic() + 60
    while not file.exists() or json.loads(file.read_text())["state"] != when:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr, json.loads(file.read_text())["state"]


@pytest.mark.slow
def test_a_signal_while_wandb_starts_leaves_the_status_of_a_stop(
    run_train: Train, without_login: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes connections and never answers, longer than there is time to stop."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        login(monkeypatch, WANDB_BASE_URL=f"http://127.0.0.1:{silent.getsockname()[1]}")
        code, stderr, state = ended_by_a_signal(run_train, "running", "--stop_seconds=3")
    assert (code, state) == (75, "stopped")
    assert "error: SIGTERM: no end after 3 s" in stderr


@pytest.mark.slow
def test_a_signal_while_wandb_ends_leaves_the_status_of_the_run(
    run_train: Train, without_login: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server() as server:
        login(monkeypatch, WANDB_BASE_URL=server.url)
        server.takes_rows = False
        code, stderr, state = ended_by_a_signal(run_train, "finished", "--stop_seconds=2")
    assert (code, state) == (0, "finished"), stderr


@pytest.mark.slow
def test_online_a_run_goes_on_with_what_the_server_lacks(
    run_train: Train, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a process without wandb, of one whose network was lost, and of one that comes to its end."""
    common = ("--checkpoint_interval=1", "--lr_decay_iters=6", "--resume=auto")
    folder = run_train("--max_iters=1", *common).folder
    assert not (folder / "wandb.json").exists()
    with Server() as server:
        login(monkeypatch, WANDB_BASE_URL=server.url)
        server.takes_rows = False
        lost = start("--max_iters=3", *common)
        assert "not all was sent within 10 s; python scripts/upload_wandb.py" in lost.stderr
        assert f"/me/mars-gpt2/runs/{identity(folder)}\n" in lost.stdout
        assert server.history(identity(folder)) == []

        server.takes_rows = True
        done = start(*common)
        assert list(server.buckets) == [identity(folder)]
        assert own(server.history(identity(folder))) == own(as_sent(done.rows))
        assert json.loads(server.buckets[identity(folder)]["config"])["max_iters"] == {"value": 6}


@pytest.mark.slow
def test_two_processes_are_one_run(run_process: Run, tmp_path: Path) -> None:
    done = run_process(processes=2)
    assert done.returncode == 0, done.stderr
    (recording,) = recordings(tmp_path / "run")
    assert own(recording.rows) == own(as_sent(rows_of(tmp_path / "run")))
    assert recording.config["processes"] == 2
    assert recording.exit_code == 0


KILLED = """
import json, os, signal, sys
from pathlib import Path
from training.tracking import Tracker

folder = Path(sys.argv[1])
tracker = Tracker({"optimizer": "adamw"}, folder)
with (folder / "metrics.jsonl").open("w") as file:
    for number in range(500):
        row = {"iter": number, "train/loss": 1.0, "padding": number * 1e-9}
        file.write(json.dumps(row) + "\\n")
        tracker.log(row)
while (json.loads((folder / "wandb.json").read_text())["sent"] or {"iter": -1})["iter"] < 499:
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_that_an_upload_does_not_mend(
    without_login: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb writes rows to its file from time to time only, so that some are lost, and a record may be cut in two."""
    assert python("-c", KILLED, str(tmp_path), WANDB_MODE="offline", PYTHONPATH=str(ROOT)).returncode == -9
    rows = rows_of(tmp_path)
    assert len(recordings(tmp_path)[0].rows) < len(rows) == 500
    name = identity(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iter": 500, "train/loss": 1.0}\n')
    record = {"optimizer": "adamw"}
    Tracker(record, tmp_path).finish()
    wandb.teardown()
    command = f"with a network: python scripts/upload_wandb.py {tmp_path}\n"
    assert capsys.readouterr().out.endswith(f"to send it: {command}"), "wandb sync would stop at the first part"
    with Server() as server:
        login(monkeypatch, WANDB_BASE_URL=server.url)
        Tracker(record, tmp_path).finish()
        wandb.teardown()
        assert [row["iter"] for row in server.history(name)] == list(range(501))


HUNG = """
import signal, sys, time
from pathlib import Path
import wandb
from training import tracking
from training.processes import leave

tracking.GRACE_SECONDS = 1.0
tracker = tracking.Tracker({"optimizer": "adamw"}, Path(sys.argv[1]), upload_seconds=1.0)
wandb.setup()._connection._proc._process.send_signal(signal.SIGSTOP)
for number in range(20_000):  # more than the pipe between the processes holds
    tracker.log({"iter": number, "train/loss": 1.0, "padding": "x" * 100})
print("logged", flush=True)
if sys.argv[2] == "finish":
    tracker.finish()
    leave(74)
raise ValueError("training failed")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [("finish", 74), ("raise", 1)])
def test_a_wandb_that_hangs_delays_neither_training_nor_its_end(
    without_login: None, tmp_path: Path, end: str, status: int
) -> None:
    """Its process is stopped, so that it answers nothing more; the status is that of training."""
    done = python("-c", HUNG, str(tmp_path), end, WANDB_MODE="offline", PYTHONPATH=str(ROOT))
    assert done.returncode == status, done.stderr
    assert "logged" in done.stdout
    assert "warning: wandb failed, it lacks the last rows of the run: not all was sent within 1 s" in done.stderr


@pytest.mark.slow
def test_a_login_without_a_network(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    login(monkeypatch, WANDB_BASE_URL=NEVER)
    done = start()
    assert "127.0.0.1 cannot be reached" in done.stdout
    assert own(recordings(done.folder)[0].rows) == own(as_sent(done.rows))


@pytest.mark.slow
def test_a_login_behind_a_proxy_that_is_dead(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb finds out for itself, and the run is recorded all the same."""
    monkeypatch.setattr("training.tracking.INIT_SECONDS", 3.0)
    login(monkeypatch, HTTPS_PROXY=NEVER)
    done = start()
    assert "wandb: no connection" in done.stdout
    assert own(recordings(done.folder)[0].rows) == own(as_sent(done.rows))


@pytest.mark.parametrize("mode", ["nonsense", "disabled"])
def test_a_wandb_that_fails_or_is_not_wanted_does_not_stop_the_run(
    start: Start, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    done = start()
    assert ("warning: wandb failed, training goes on without it" in done.stderr) == (mode == "nonsense")
    assert "Traceback" not in done.stderr
    assert (done.folder / "checkpoints" / "iter-00000006.pt").exists()
    assert not list(done.folder.glob("wandb/*run-*"))
