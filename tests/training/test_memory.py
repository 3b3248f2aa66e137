"""The memory of a long run: the same from its beginning to its end, whatever the size of the data."""

import json
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import VOCABULARY, Train

UPDATES, SETTLED = 5000, 200
TOKENS, CHUNK = 500_000_000, 10_000_000  # 1 GB
MB = 1024  # /proc counts in kB


def write_a_gigabyte(path: Path) -> None:
    chance = np.random.default_rng(0)
    with path.open("wb") as file:
        for _ in range(TOKENS // CHUNK):
            file.write(chance.integers(0, VOCABULARY, size=CHUNK, dtype=np.uint16).tobytes())


def memory_of(process: subprocess.Popen[str]) -> dict[str, int] | None:
    """RssAnon, RssFile and the like in kB; None when it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return None
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    return sizes if "RssAnon" in sizes else None


def last_update(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return json.loads(lines[-1])["iter"] if lines else 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_stays_flat_over_5000_updates_on_a_gigabyte(run_train: Train, dataset: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc here to read a process's memory from")
    write_a_gigabyte(dataset / "train.bin")
    run = run_train.start(
        *("--optimizer=mars-adamw", f"--max_iters={UPDATES}", "--eval_interval=1000", "--checkpoint_interval=500"),
        "--log_interval=100",
    )
    samples: list[tuple[int, dict[str, int]]] = []
    try:
        while run.poll() is None:
            memory = memory_of(run)
            if memory is not None:
                samples.append((last_update(run_train.folder("run")), memory))
            time.sleep(0.1)
        _, stderr = run.communicate()
    finally:
        run.kill()
        (dataset / "train.bin").unlink()
    assert (run.returncode, stderr) == (0, "")
    assert last_update(run_train.folder("run")) == UPDATES

    settled = next(memory for update, memory in samples if update >= SETTLED)
    later = [memory for update, memory in samples if update > SETTLED]
    assert len(later) >= 50, "the test needs samples"
    anonymous = max(memory["RssAnon"] for memory in later)
    files = max(memory["RssFile"] for memory in later)
    assert anonymous <= 1.05 * settled["RssAnon"], f"{settled['RssAnon']:,} kB grew to {anonymous:,} kB"
    assert files <= settled["RssFile"] + 20 * MB, f"files in memory: {settled['RssFile']:,} kB grew to {files:,} kB"
    # The check of the vocabulary, at the start, reads the whole file.
    start = max(memory["VmHWM"] for _, memory in samples)
    assert start < settled["VmRSS"] + 300 * MB, "the file was never in memory as a whole"
