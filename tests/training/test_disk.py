"""A disk that is full: the run goes on to its end with the last checkpoint as it was, and says what was not written."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import status
from tests.conftest import ENVIRONMENT, ROOT, Outcome, Train
from training.checkpoint import CheckpointFolder
from training.metrics import MetricsFile
from training.status import Status

COMMON = ("--optimizer=mars-adamw", "--lr_decay_iters=120", "--eval_interval=20", "--checkpoint_interval=20")

# Runs train.py where no file may grow beyond a size. Python ignores the signal (SIGXFSZ) that would end it then.
LIMITED = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, ({{limit}}, {{limit}}))
import train
train.leave(train.main(sys.argv[1:]))
"""

# On a disk of 3 MB: a run to update 40, then one to 120 with so little room that neither a checkpoint nor all rows
# fit, then the same again with room. What is there after each part is copied out: the disk goes with the last process.
FULL_DISK = """
set -u
mount -t tmpfs -o size=3m tmpfs "$DISK"
"$@" --max_iters=40
echo $? > "$COPY/status-1"
cp -r "$DISK/run" "$COPY/part-1"
head -c $(($(df -P -k "$DISK" | awk 'END {print $4}') * 1024 - 8192)) /dev/zero > "$DISK/ballast"
"$@" --max_iters=120 --resume=auto > "$COPY/stdout" 2> "$COPY/stderr"
echo $? > "$COPY/status-2"
cp -r "$DISK/run" "$COPY/part-2"
rm "$DISK/ballast"
"$@" --max_iters=120 --resume=auto
echo $? > "$COPY/status-3"
cp -r "$DISK/run" "$COPY/part-3"
"""


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "checkpoints").iterdir()}


def losses(folder: Path, kind: str = "train/loss") -> dict[int, float]:
    """By update, without half-written lines."""
    found: dict[int, float] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if kind in row:
            assert row["iter"] not in found
            found[row["iter"]] = row[kind]
    return found


def newest(folder: Path) -> dict[str, Any]:
    checkpoints = CheckpointFolder(folder / "checkpoints", 9)
    loaded = checkpoints.load_newest()
    checkpoints.close()
    assert loaded is not None
    return loaded


def run_limited(run_train: Train, tmp_path: Path, limit: int, *overrides: str, out: str) -> Outcome:
    program = tmp_path / "limited.py"
    program.write_text(LIMITED.format(limit=limit))
    process = run_train.start(*overrides, out=out, program=program)
    stdout, stderr = process.communicate(timeout=60)
    return Outcome(process.returncode, stdout, stderr, run_train.folder(out))


@pytest.mark.slow
def test_no_room_for_checkpoints(run_train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    straight = run_train(*COMMON, "--max_iters=120", out="straight")
    first = run_train(*COMMON, "--max_iters=40", out="run")
    before = files(first.folder)
    done = run_limited(run_train, tmp_path, 100_000, *COMMON, "--max_iters=120", "--resume=auto", out="run")
    assert done.status == 74
    assert files(done.folder) == before, "nothing was deleted, changed or left behind"
    assert newest(done.folder)["iter"] == 40
    for update in (60, 80, 100, 120):
        line = f"{done.folder}/checkpoints/iter-{update:08}.pt: File too large"
        assert done.stderr.count(f"warning: update {update}: no checkpoint, training goes on: {line}\n") == 1
        assert done.stderr.count(f"error: not written: {line}\n") == 1
    assert done.stderr.count("\n") == 8, done.stderr
    assert losses(done.folder) == losses(straight.folder), "it went on to the end"
    assert status.main([str(done.folder)]) == 1, "not finished: the last weights are nowhere"

    again = run_train(*COMMON, "--max_iters=120", "--resume=auto", out="run")
    assert (again.status, again.stderr) == (0, "")
    assert "going on after update 40" in again.stdout
    assert losses(again.folder) == losses(straight.folder)
    assert losses(again.folder, "val/loss") == losses(straight.folder, "val/loss")
    weights = newest(again.folder)["model"]
    for name, weight in newest(straight.folder)["model"].items():
        assert torch.equal(weights[name], weight)
    assert "no checkpoint can be read" not in capsys.readouterr().err


@pytest.mark.slow
def test_no_room_for_rows(run_train: Train, tmp_path: Path) -> None:
    first = run_train(*COMMON, "--max_iters=40", out="run")
    size = (first.folder / "metrics.jsonl").stat().st_size
    done = run_limited(run_train, tmp_path, size + 1000, *COMMON, "--max_iters=120", "--resume=auto", out="run")
    assert done.status == 74
    assert done.stderr.count("rows wait in memory until there is room") == 1
    assert f"error: not written: {done.folder}/metrics.jsonl: File too large\n" in done.stderr
    assert (done.folder / "metrics.jsonl").stat().st_size == size + 1000
    assert done.stdout.count("update 120/120") == 1


def unshared() -> list[str]:
    """How to start a process with mounts of its own: as root, or with a user namespace."""
    for command in (["unshare", "-m"], ["unshare", "-rm"]):
        try:
            trial = subprocess.run([*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
        except OSError:
            break
        if trial.returncode == 0:
            return command
    pytest.skip("a disk of 3 MB needs root, or user namespaces")


@pytest.mark.slow
def test_a_disk_that_is_full(run_train: Train, tmp_path: Path) -> None:
    command = unshared()
    straight = run_train(*COMMON, "--max_iters=120", out="straight")
    places = {"DISK": tmp_path / "disk", "COPY": tmp_path / "copy"}
    for place in places.values():
        place.mkdir()
    train = [sys.executable, str(ROOT / "train.py"), str(run_train.config), f"--out_dir={places['DISK']}/run", *COMMON]
    done = subprocess.run(
        [*command, "sh", "-c", FULL_DISK, "sh", *train],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT | {name: str(place) for name, place in places.items()},
    )
    copy = places["COPY"]
    statuses = [(copy / f"status-{part}").read_text().strip() for part in (1, 2, 3)]
    assert statuses == ["0", "74", "0"], done.stderr + (copy / "stderr").read_text()
    stderr = (copy / "stderr").read_text()
    for update in (60, 80, 100, 120):
        assert stderr.count(f"warning: update {update}: no checkpoint, training goes on: ") == 1
    assert stderr.count("No space left on device") >= 9
    assert stderr.count("rows wait in memory until there is room") >= 1
    assert "Traceback" not in stderr
    assert files(copy / "part-2") == files(copy / "part-1")
    assert newest(copy / "part-2")["iter"] == 40
    assert "update 120/120" in (copy / "stdout").read_text()
    assert losses(copy / "part-2").items() < losses(straight.folder).items(), "not all of the rows had room"
    assert losses(copy / "part-3") == losses(straight.folder)
    assert losses(copy / "part-3", "val/loss") == losses(straight.folder, "val/loss")
    assert not list((copy / "part-3").rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("streams", [("stdout",), ("stdout", "stderr")], ids="+".join)
def test_a_log_without_room_is_no_matter(run_train: Train, streams: tuple[str, ...]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    out = run_train.folder("run")
    command = [sys.executable, str(ROOT / "train.py"), str(run_train.config), f"--out_dir={out}"]
    with open("/dev/full", "w") as full:  # noqa: PTH123
        where: dict[str, Any] = {name: full if name in streams else subprocess.PIPE for name in ("stdout", "stderr")}
        done = subprocess.run([*command, "--max_iters=40"], **where, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=60)
    assert done.returncode == 0
    assert not done.stderr
    assert list(losses(out)) == list(range(1, 41))
    assert newest(out)["iter"] == 40


class Disk:
    """Stands for `os.write`, with room for some bytes more."""

    def __init__(self, room: int) -> None:
        self.room, self._write = room, os.write

    def __call__(self, file: int, content: bytes) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = content[: self.room]
        self.room -= len(part)
        return self._write(file, part)


def row(update: int) -> dict[str, Any]:
    return {"iter": update, "train/loss": update / 7}


def test_rows_wait_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, disk = tmp_path / "metrics.jsonl", Disk(room=100)
    metrics = MetricsFile(path)
    monkeypatch.setattr(os, "write", disk)
    for update in range(1, 10):
        assert metrics.append(row(update))
    assert path.stat().st_size == 100, "as much as there was room for"
    assert capsys.readouterr().err.count("rows wait in memory until there is room") == 1
    disk.room = 1000
    metrics.append(row(10))
    disk.room = 10
    metrics.append(row(11))
    metrics.append(row(12))
    assert capsys.readouterr().err.count("rows wait in memory until there is room") == 1, "a warning each time"
    disk.room = 1000
    assert metrics.close() is None
    assert [json.loads(line) for line in path.read_text().splitlines()] == [row(update) for update in range(1, 13)]


def test_rows_without_room_at_the_end_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next process computes them again, on a line of their own."""
    path, disk = tmp_path / "metrics.jsonl", Disk(room=100)
    metrics = MetricsFile(path)
    monkeypatch.setattr(os, "write", disk)
    for update in range(1, 10):
        metrics.append(row(update))
    assert metrics.close() == f"{path}: No space left on device"
    disk.room = 1000
    metrics = MetricsFile(path)
    new = [metrics.append(row(update)) is not None for update in range(1, 10)]
    assert metrics.close() is None
    lines = path.read_text().splitlines()
    whole = new.index(True)
    assert 0 < whole < 9
    assert lines[whole] == json.dumps(row(whole + 1))[: 100 - sum(len(line) + 1 for line in lines[:whole])]
    del lines[whole]
    assert [json.loads(line) for line in lines] == [row(update) for update in range(1, 10)]


def test_a_status_without_room_goes_lest_it_be_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = Status(tmp_path, max_iters=6, writes=True)
    written.write("running", 3)

    def full(path: Path, text: str, **_: Any) -> int:
        path.write_bytes(text.encode()[:20])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    written.write("finished", 6)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err == (
        f"warning: {tmp_path}/status.json could not be written: No space left on device\n"
    )
