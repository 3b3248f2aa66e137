"""scripts/upload_wandb.py: what it sends, to which run, and its mistakes."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb

from scripts.upload_wandb import main
from tests.training.wandb_backend import Recording, Server, recordings

CONFIG = {
    "optimizer": "mars-adamw",
    "parameters": 124_373_760,
    "dataset": "openwebtext",
    "seed": 7,
    "exact": False,
    "code_version": "0123456789ab",
    "wandb_project": "from-the-run",
    "wandb_x_axis": "tokens",
}
Upload = Callable[..., int]


def row(update: int, **figures: Any) -> dict[str, Any]:
    return {"iter": update, "tokens": 100 * update, "time": float(update), **figures}


ROWS = [
    row(0, **{"val/loss": 4.0}),
    row(1, **{"train/loss": 3.0, "lr": 1e-3}),
    row(2, **{"train/loss": None, "lr": 1e-3}),
    row(2, **{"val/loss": 2.5, "update_ratio/matrices": 0.1}),
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder whose last line was being written when the process was killed."""
    folder = tmp_path / "it's a run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS) + '{"iter": 3, "tok')
    (folder / "status.json").write_text('{"state": "stopped"}')
    return folder


@pytest.fixture
def upload(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Upload]:
    """The script, in this process, which forgets wandb's settings after each call as a new one would."""
    for key in os.environ:
        if key.startswith("WANDB_"):
            monkeypatch.delenv(key)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")

    def call(*arguments: str | Path) -> int:
        status = main([str(argument) for argument in arguments])
        wandb.teardown()
        return status

    yield call
    wandb.teardown()


def sent(recording: Recording) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in ("_timestamp", "_runtime")} for row in recording.rows]


def with_steps(rows: list[dict[str, Any]], steps: list[int]) -> list[dict[str, Any]]:
    return [row | {"_step": step} for row, step in zip(rows, steps, strict=True)]


def test_offline_everything_is_there(upload: Upload, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert upload(run) == 0
    (recording,) = recordings(run)
    assert [row["_step"] for row in recording.rows] == [2, 4, 7, 8]
    rows = sent(recording)
    assert str(rows[2].pop("train/loss")) in ("nan", "NaN")
    expected = with_steps(ROWS, [2, 4, 7, 8])
    expected[2].pop("train/loss")
    assert rows == expected
    assert (recording.exit_code, recording.preempted) == (75, True), "as status.json says"
    about = recording.run
    assert (about.display_name, about.project) == ("it's a run", "from-the-run")
    assert (about.run_group, about.job_type) == ("gpt2-124M openwebtext", "mars-adamw")
    assert set(about.tags) == {"mars-adamw", "gpt2-124M", "openwebtext", "seed 7"}
    assert {key: recording.config[key] for key in CONFIG} == CONFIG
    assert recording.metrics["*"].step_metric == "tokens"
    (part,) = (run / "wandb").glob("offline-run-*")
    quoted = "'" + str(part).replace("'", "'\"'\"'") + "'"
    assert capsys.readouterr().out.endswith(f"wandb: recorded offline; to send it: wandb sync {quoted}\n")


@pytest.mark.slow
def test_a_second_upload_sends_what_is_new_to_the_same_run(upload: Upload, run: Path) -> None:
    assert upload(run) == 0
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps(row(4, **{"train/loss": 2.0})) + "\n")
    assert upload(run) == 0
    first, second = recordings(run)
    assert first.run.run_id == second.run.run_id
    assert sent(second) == [row(4, **{"train/loss": 2.0}) | {"_step": 13}]
    assert upload(run, "--project=another", "--group=sweep") == 0
    third = recordings(run)[-1]
    assert third.run.run_id != first.run.run_id
    assert (third.run.project, third.run.run_group) == ("another", "sweep")
    assert [row["_step"] for row in third.rows] == [2, 4, 7, 8, 13]


@pytest.mark.slow
def test_online_the_server_says_what_it_lacks(upload: Upload, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an offline recording that never was sent, twice, and once more with a further row."""
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        assert upload(run) == 0
        assert server.buckets == {}
        monkeypatch.setenv("WANDB_MODE", "online")
        assert upload(run) == upload(run) == 0
        (name,) = server.buckets
        assert [row["_step"] for row in server.history(name)] == [2, 4, 7, 8]
        with (run / "metrics.jsonl").open("a") as file:
            file.write("\n" + json.dumps(row(4, **{"train/loss": 2.0})) + "\n")
        assert upload(run) == 0
        assert list(server.buckets) == [name]
        assert [row["_step"] for row in server.history(name)] == [2, 4, 7, 8, 13]
    bucket = server.buckets[name]
    assert (bucket["groupName"], bucket["jobType"]) == ("gpt2-124M openwebtext", "mars-adamw")


def test_mistakes_are_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def complaint(*arguments: str | Path) -> str:
        assert main([str(argument) for argument in arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        return error

    assert f"{tmp_path / 'none'} is missing" in complaint(tmp_path / "none")
    assert "is not a folder" in complaint(run / "config.json")
    assert "--help lists what is allowed" in complaint()
    empty = tmp_path / "empty"
    shutil.copytree(run, empty)
    (empty / "metrics.jsonl").write_text('{"it')
    assert f"{empty / 'metrics.jsonl'} holds no rows" in complaint(run, empty)
    (empty / "config.json").write_text("{")
    assert f"{empty / 'config.json'} is missing or damaged" in complaint(empty)
    assert not (run / "wandb.json").exists(), "nothing is sent when one of the runs cannot be"


def test_a_run_that_is_training_is_left_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main([str(run)]) == 2
    assert "is training at this moment" in capsys.readouterr().err


def test_nothing_is_uploaded_where_wandb_is_disabled(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert main([str(run)]) == 2
    assert capsys.readouterr().err.startswith("error: WANDB_MODE=disabled: ")


@pytest.mark.slow
@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("failed", 1), ("running", 1)])
def test_how_the_run_ended(upload: Upload, run: Path, state: str, code: int) -> None:
    """One that says it is running, and is not, was killed."""
    (run / "status.json").write_text(json.dumps({"state": state}))
    assert upload(run) == 0
    assert recordings(run)[-1].exit_code == code


@pytest.mark.slow
def test_a_project_that_wandb_refuses_leaves_the_run_its_id(upload: Upload, run: Path) -> None:
    assert upload(run) == 0
    before = (run / "wandb.json").read_text()
    assert upload(run, "--project=a/b") == 2
    assert (run / "wandb.json").read_text() == before


def test_a_wandb_that_fails(
    upload: Upload, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    assert upload(run) == 2
    assert f"warning: wandb failed, {run} is not uploaded: " in capsys.readouterr().err
