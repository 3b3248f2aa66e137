"""Weights & Biases: the real package, offline, and never in the way."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_with_wandb(config: Path, tmp_path: Path) -> Run:
    def run(*overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
        keep = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
        home = {"HOME": str(tmp_path), "WANDB_SILENT": "false"}  # without the login of whoever runs the tests
        return subprocess.run(
            [sys.executable, str(ROOT / "train.py"), str(config), "--wandb_log=True", *overrides],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
            env=keep | home | environment,
        )

    return run


def recording(tmp_path: Path) -> bytes:
    (path,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    return path.read_bytes()


def test_without_a_login_it_records_offline_and_says_how_to_send_it(run_with_wandb: Run, tmp_path: Path) -> None:
    done = run_with_wandb("--optimizer=mars-adamw", "--wandb_x_axis=tokens", "--wandb_run_name=2024")
    assert done.returncode == 0, done.stderr
    assert "no login on this machine, recording offline" in done.stdout
    assert "wandb sync" in done.stderr
    content = recording(tmp_path)
    for key in ("train/loss", "val/loss", "lr", "grad_norm", "tokens_per_sec", "mars/clip_rate", "2024"):
        assert key.encode() in content, key
    assert content.count(b"train/loss") >= 6


@pytest.mark.slow
def test_a_login_without_a_network(run_with_wandb: Run, tmp_path: Path) -> None:
    done = run_with_wandb(WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert "127.0.0.1 cannot be reached" in done.stdout
    assert b"val/loss" in recording(tmp_path)


def test_a_wandb_that_fails_does_not_stop_the_run(run_with_wandb: Run, tmp_path: Path) -> None:
    done = run_with_wandb(WANDB_MODE="nonsense")
    assert done.returncode == 0, done.stderr
    assert "warning: wandb failed, training goes on without it" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "run" / "checkpoints" / "iter-00000006.pt").exists()


@pytest.mark.slow
def test_a_login_behind_a_proxy_that_is_dead(run_with_wandb: Run, tmp_path: Path) -> None:
    """wandb finds out for itself, and the run is recorded all the same."""
    done = run_with_wandb(WANDB_API_KEY="0" * 40, HTTPS_PROXY="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert "wandb: no connection" in done.stdout
    assert b"val/loss" in recording(tmp_path)
