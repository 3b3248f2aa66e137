"""Weights & Biases: the real package, offline or with a small server, and never in the way."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.training.wandb_backend import Server, recordings
from training.tracking import labels

Run = Callable[..., "subprocess.CompletedProcess[str]"]

LOGIN = {"WANDB_API_KEY": "0" * 40}
NEVER = "http://127.0.0.1:9"
HALF = ("--max_iters=3", "--lr_decay_iters=6")  # of a run of 6 updates


@pytest.fixture
def run_with_wandb(config: Path, tmp_path: Path) -> Run:
    def run(*overrides: str, processes: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        keep = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
        home = {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}  # without the login of whoever runs the tests
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        return subprocess.run(
            [
                *(sys.executable, *(torchrun if processes else []), str(ROOT / "train.py"), str(config)),
                *("--wandb_log=True", *overrides),
            ],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
            env=keep | home | environment,
        )

    return run


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def as_sent(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that wandb should have for those of metrics.jsonl."""
    return [row | {"_step": 2 * row["iter"] + ("val/loss" in row)} for row in rows]


def own(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without the times that wandb adds, and without the seconds, which may be those of another process."""
    return [{key: value for key, value in row.items() if key not in ("_timestamp", "_runtime", "time")} for row in rows]


def identity(folder: Path) -> str:
    return json.loads((folder / "wandb.json").read_text())["id"]


def test_an_offline_run_has_everything(run_with_wandb: Run, tmp_path: Path) -> None:
    done = run_with_wandb("--optimizer=mars-adamw", "--wandb_x_axis=tokens", "--wandb_run_name=2024")
    assert done.returncode == 0, done.stderr
    assert "no login on this machine, recording offline" in done.stdout
    folder = tmp_path / "run"
    (part,) = (folder / "wandb").glob("offline-run-*")
    assert done.stdout.endswith(f"wandb: recorded offline; to send it: wandb sync {part}\n")

    (recording,) = recordings(folder)
    assert own(recording.rows) == own(as_sent(rows_of(folder)))
    keys = set().union(*recording.rows)
    assert keys >= {"iter", "tokens", "time", "train/loss", "val/loss", "lr", "grad_norm", "tokens_per_sec"}
    assert keys >= {"mars/clip_rate", "update_ratio/matrices", "update_ratio/embeddings", "update_ratio/vectors"}
    run = recording.run
    assert (run.run_id, run.display_name, run.project) == (identity(folder), "2024", "mars-gpt2")
    assert (run.run_group, run.job_type) == ("gpt2-27.3k data", "mars-adamw")
    assert set(run.tags) == {"mars-adamw", "gpt2-27.3k", "data", "seed 5000"}
    record = json.loads((folder / "config.json").read_text())
    assert {key: recording.config[key] for key in record} == record
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    if commit.returncode == 0:
        assert recording.commit == commit.stdout.strip()
        assert recording.commit.startswith(record["code_version"].removesuffix("-dirty"))
    assert recording.metrics["*"].step_metric == recording.metrics["val/loss"].step_metric == "tokens"
    assert recording.metrics["val/loss"].summary.min
    assert recording.exit_code == 0


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
def test_a_resumed_run_goes_on_offline_and_becomes_one_run_on_the_server(run_with_wandb: Run, tmp_path: Path) -> None:
    """Here with rows that the second process computes again, and an evaluation that the first did not come to."""
    folder = tmp_path / "run"
    common = ("--checkpoint_interval=1", "--keep_checkpoints=9", "--eval_interval=2", "--resume=auto")
    assert run_with_wandb(*HALF, *common).returncode == 0
    (folder / "checkpoints" / "iter-00000003.pt").unlink()
    second = run_with_wandb(*common, "--lr_decay_iters=6", "--wandb_tags=a,b")
    assert second.returncode == 0, second.stderr
    rows = rows_of(folder)
    assert len(rows) == 6 + len([0, 2, 3, 4, 6])
    first, second_part = recordings(folder)
    assert first.run.run_id == second_part.run.run_id == identity(folder)
    assert own(first.rows + second_part.rows) == own(as_sent(rows)), "no row twice, none missing"
    parts = sorted((folder / "wandb").glob("offline-run-*"))
    command = second.stdout.splitlines()[-1].removeprefix("wandb: recorded offline; to send it: ")
    assert command.split() == ["wandb", "sync", *map(str, parts)]
    with Server() as server:
        sync = [sys.executable, "-m", *command.split()]
        environment = os.environ | LOGIN | {"WANDB_BASE_URL": server.url, "HOME": str(tmp_path)}
        sent = subprocess.run(sync, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120)
        assert sent.returncode == 0, sent.stderr
        assert list(server.buckets) == [identity(folder)]
        assert own(server.history(identity(folder))) == own(as_sent(rows))
        bucket = server.buckets[identity(folder)]
    assert (bucket["groupName"], bucket["jobType"]) == ("gpt2-27.3k data", "adamw")
    assert {"a", "b"} <= set(bucket["tags"])


@pytest.mark.slow
def test_online_a_run_goes_on_with_what_the_server_lacks(run_with_wandb: Run, tmp_path: Path) -> None:
    """A segment without wandb, one with it, one whose server went away, and the rest."""
    folder = tmp_path / "run"
    common = ("--checkpoint_interval=1", "--lr_decay_iters=6", "--resume=auto")
    with Server() as server:
        online = LOGIN | {"WANDB_BASE_URL": server.url}
        assert run_with_wandb("--max_iters=1", "--wandb_log=False", *common, **online).returncode == 0
        assert not (folder / "wandb.json").exists()
        started = run_with_wandb("--max_iters=3", *common, **online)
        assert started.returncode == 0, started.stderr
        assert f"/me/mars-gpt2/runs/{identity(folder)}\n" in started.stdout
        assert own(server.history(identity(folder))) == own(as_sent(rows_of(folder)))
        offline = run_with_wandb("--max_iters=5", *common, WANDB_MODE="offline")
        assert offline.returncode == 0, offline.stderr
        assert len(server.history(identity(folder))) < len(rows_of(folder))
        assert run_with_wandb(*common, **online).returncode == 0
        assert list(server.buckets) == [identity(folder)]
        assert own(server.history(identity(folder))) == own(as_sent(rows_of(folder)))


@pytest.mark.slow
def test_another_course_and_a_copy_are_other_runs(run_with_wandb: Run, tmp_path: Path) -> None:
    folder, copy, moved = tmp_path / "run", tmp_path / "copy", tmp_path / "moved"
    common = ("--checkpoint_interval=1", "--keep_checkpoints=9", "--lr_decay_iters=6", "--resume=auto")
    assert run_with_wandb("--max_iters=3", *common).returncode == 0
    before = identity(folder)
    shutil.copytree(folder, copy)
    assert run_with_wandb("--max_iters=4", *common, f"--out_dir={copy}").returncode == 0
    assert identity(copy) != before == identity(folder)
    assert own(recordings(copy)[-1].rows) == own(as_sent(rows_of(copy))), "a run of its own has all rows"

    folder.rename(moved)
    assert run_with_wandb("--max_iters=4", *common, f"--out_dir={moved}").returncode == 0
    assert identity(moved) == before

    (moved / "checkpoints" / "iter-00000004.pt").unlink()
    other = run_with_wandb("--max_iters=4", *common, f"--out_dir={moved}", "--learning_rate=2e-3")
    assert "it goes on as a new run there" in other.stdout
    assert identity(moved) != before
    recording = recordings(moved)[-1]
    assert own(recording.rows) == own(as_sent(rows_of(moved)))
    assert recording.config["learning_rate"] == 2e-3


@pytest.mark.slow
def test_two_processes_are_one_run(run_with_wandb: Run, tmp_path: Path) -> None:
    done = run_with_wandb(processes=2)
    assert done.returncode == 0, done.stderr
    (recording,) = recordings(tmp_path / "run")
    assert own(recording.rows) == own(as_sent(rows_of(tmp_path / "run")))
    assert recording.config["processes"] == 2
    assert recording.exit_code == 0


@pytest.mark.slow
def test_a_login_without_a_network(run_with_wandb: Run, tmp_path: Path) -> None:
    done = run_with_wandb(**LOGIN, WANDB_BASE_URL=NEVER)
    assert done.returncode == 0, done.stderr
    assert "127.0.0.1 cannot be reached" in done.stdout
    assert "val/loss" in recordings(tmp_path / "run")[0].rows[-1]


@pytest.mark.slow
def test_a_login_behind_a_proxy_that_is_dead(run_with_wandb: Run, tmp_path: Path) -> None:
    """wandb finds out for itself, and the run is recorded all the same."""
    done = run_with_wandb(**LOGIN, HTTPS_PROXY=NEVER)
    assert done.returncode == 0, done.stderr
    assert "wandb: no connection" in done.stdout
    assert "val/loss" in recordings(tmp_path / "run")[0].rows[-1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["nonsense", "disabled"])
def test_a_wandb_that_fails_or_is_not_wanted_does_not_stop_the_run(
    run_with_wandb: Run, tmp_path: Path, mode: str
) -> None:
    done = run_with_wandb(WANDB_MODE=mode)
    assert done.returncode == 0, done.stderr
    assert ("warning: wandb failed, training goes on without it" in done.stderr) == (mode == "nonsense")
    assert "Traceback" not in done.stderr
    assert (tmp_path / "run" / "checkpoints" / "iter-00000006.pt").exists()
    assert not list((tmp_path / "run").glob("wandb/*run-*"))
