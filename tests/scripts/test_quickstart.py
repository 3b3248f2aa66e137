"""scripts/quickstart.sh, shortened, in a copy of the checkout."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_quickstart_compares_two_runs_and_keeps_earlier_ones(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for name in ("train.py", "model.py", "requirements.txt"):
        checkout.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    for name in ("configs", "optim", "training", "scripts"):
        shutil.copytree(ROOT / name, checkout / name)
    (checkout / "data").mkdir()
    for path in (ROOT / "data").glob("*.py"):
        shutil.copy(path, checkout / "data")
    # The environment of these tests stands for the one that the script would make.
    (checkout / ".venv").symlink_to(Path(sys.prefix), target_is_directory=True)

    def quickstart() -> str:
        command = ["bash", str(checkout / "scripts/quickstart.sh"), "--max_iters=20", "--eval_interval=10"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=250)
        assert done.returncode == 0, done.stderr
        assert (checkout / "runs/quickstart/comparison.png").stat().st_size > 10_000
        return done.stdout

    first = quickstart()
    table = first[first.index("4/4  comparison") :]
    for row in ("adamw ", "mars-adamw ", "unigram model"):
        assert f"\n{row}" in table
    assert "making .venv" not in first
    assert "written to" in first

    second = quickstart()
    assert "installing" not in second
    assert "already prepared" in second
    assert "an earlier quickstart was moved to runs/quickstart-before-" in second
    (earlier,) = (checkout / "runs").glob("quickstart-before-*")
    assert (earlier / "adamw" / "metrics.jsonl").exists()
    strip = second[second.index("4/4  comparison") :].split("\n")[4].split()[:8]
    assert strip == table.split("\n")[4].split()[:8], "a second run gives the same losses"
