"""metrics.jsonl of a run that goes on: whose rows count."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Train

COMMON = ("--checkpoint_interval=4", "--keep_checkpoints=9", "--max_iters=12", "--eval_interval=3")


def by_update(folder: Path, key: str, name: str = "metrics.jsonl") -> dict[int, Any]:
    rows = map(json.loads, (folder / name).read_text().splitlines())
    return {row["iter"]: row[key] for row in rows if key in row}


@pytest.fixture
def crashed(run_train: Train) -> Path:
    """A run that was killed after update 7 and evaluation 6, with a checkpoint of update 4."""
    run_train(*COMMON)
    folder = run_train.folder("run")
    for path in (folder / "checkpoints").glob("iter-*.pt"):
        if path.name > "iter-00000004.pt":
            path.unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    rows = [line for line in lines if json.loads(line)["iter"] <= 7]
    (folder / "metrics.jsonl").write_text("".join(rows))
    return folder


def test_rows_of_settings_that_no_longer_hold_are_put_aside(run_train: Train, crashed: Path) -> None:
    """A reader of the curve must not see losses of weights that were given up."""
    before = by_update(crashed, "train/loss")
    evaluations = by_update(crashed, "val/loss")
    shutil.copytree(crashed, run_train.folder("copy"))
    done = run_train(*COMMON, "--learning_rate=2e-3", "--resume=auto")
    assert done.status == 0, done.stderr
    rates = by_update(crashed, "lr")
    assert list(rates) == list(range(1, 13))
    assert max(rates[update] for update in range(5, 13)) < 2e-3 < rates[4]
    losses = by_update(crashed, "train/loss")
    assert [losses[update] for update in range(1, 5)] == [before[update] for update in range(1, 5)]
    assert losses[7] != before[7]
    assert by_update(crashed, "train/loss", "metrics.abandoned.jsonl") == {k: before[k] for k in (5, 6, 7)}
    assert by_update(crashed, "val/loss", "metrics.abandoned.jsonl") == {6: evaluations[6]}
    assert sorted(by_update(crashed, "val/loss")) == [0, 3, 6, 9, 12]

    same = run_train(*COMMON, "--log_interval=2", "--resume=auto", out="copy")
    assert by_update(same.folder, "train/loss").items() >= before.items(), "nothing that matters has changed"
    assert not (same.folder / "metrics.abandoned.jsonl").exists()


def test_the_same_without_any_checkpoint(run_train: Train, crashed: Path) -> None:
    shutil.rmtree(crashed / "checkpoints")
    before = by_update(crashed, "train/loss")
    done = run_train(*COMMON, "--learning_rate=2e-3", "--resume=auto")
    assert done.status == 0, done.stderr
    assert "changed     learning_rate: 0.01 until now, 0.002 from here on" in done.stdout
    assert max(by_update(crashed, "lr").values()) == pytest.approx(2e-3)
    assert by_update(crashed, "train/loss", "metrics.abandoned.jsonl") == before


def test_time_never_falls(run_train: Train, crashed: Path) -> None:
    """The first process was slower than the second."""
    rows = [json.loads(line) for line in (crashed / "metrics.jsonl").read_text().splitlines()]
    slow = [json.dumps(row | {"time": row["time"] * 1000}) + "\n" for row in rows]
    (crashed / "metrics.jsonl").write_text("".join(slow))
    done = run_train(*COMMON, "--resume=auto")
    times = [row["time"] for row in done.rows]
    assert times == sorted(times)
    assert len(times) == 12 + 5
