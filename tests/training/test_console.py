"""What becomes of a run's words where nobody can hear them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import compare, evaluate
from tests.conftest import ENVIRONMENT, ROOT, Train

STREAMS = ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")


@pytest.mark.slow
@pytest.mark.parametrize("closing", STREAMS)
def test_closed_streams_are_no_matter(run_train: Train, closing: str) -> None:
    """Nor do files of the run take their descriptors, into which a library could print."""
    command = [sys.executable, str(ROOT / "train.py"), str(run_train.config)]
    done = subprocess.run(["sh", "-c", f'exec "$@" {closing}', "sh", *command], env=ENVIRONMENT, cwd=ROOT, timeout=60)
    assert done.returncode == 0
    assert (run_train.folder("run") / "checkpoints" / "iter-00000006.pt").exists()


@pytest.mark.slow
def test_words_that_the_console_cannot_show(run_train: Train, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), str(run_train.config), f"--out_dir={tmp_path / 'ü 数'}"],
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert "\\xfc \\u6570" in done.stdout
    assert os.path.exists(tmp_path / "ü 数" / "metrics.jsonl")  # noqa: PTH110


def test_line_breaks_in_names_leave_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["a\nb"]) == 2
    assert evaluate.main(["a\rb"]) == 2
    first, second = capsys.readouterr().err.split("\n")[:-1]
    assert first.startswith(f"error: {Path.cwd()}/a\\nb is missing")
    assert second.startswith(f"error: {Path.cwd()}/a\\rb holds no run")
