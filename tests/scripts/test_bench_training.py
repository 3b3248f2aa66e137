"""scripts/bench_training.py: what it measures is of the same updates, and what it reports of each way is there."""

import json
from pathlib import Path

import numpy as np
import pytest

from scripts import bench_training
from scripts.benchmarking.corpus import write_words

TINY = ["--layers=2", "--heads=2", "--width=32", "--vocab=2048", "--block=32", "--batch=4", "--threads=1"]


@pytest.mark.slow
def test_ways_make_the_same_updates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert bench_training.main([*TINY, "--rounds=2", "--updates=3", f"--json={file}"]) == 0
    report = json.loads(file.read_text())
    plain, ours, in_float32 = report["ways"]
    assert [way["name"] for way in report["ways"]] == ["plain", "ours", "ours, float32"]
    assert [way["setting"]["config"]["dtype"] for way in (plain, in_float32)] == ["float32", "float32"]
    assert ours["setting"]["config"]["chunked_loss"] is True
    assert len(plain["losses"]) == 6
    assert in_float32["losses"] == pytest.approx(plain["losses"], abs=1e-4)
    assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-2)
    for way in report["ways"]:
        assert way["parts"].pop("sync") == 0, "nobody to wait for"
        assert set(way["parts"]) == {"data", "forward", "backward", "clipping", "optimizer", "logging"}
        assert all(seconds > 0 for seconds in way["parts"].values())
        whole = 4 * 32 / way["tokens_per_second"]
        assert 0.3 * whole < sum(way["parts"].values()) < 3 * whole
        assert way["peak_bytes"] > 0
    assert report["ratios"]["tokens_per_second"] == ours["tokens_per_second"] / plain["tokens_per_second"]
    out = capsys.readouterr().out
    assert "ours over plain" in out
    assert report["machine"] in out


@pytest.mark.slow
def test_two_processes_make_the_updates_of_one(tmp_path: Path) -> None:
    losses = []
    for processes, batch in ((1, 4), (2, 2)):
        file = tmp_path / f"{processes}.json"
        command = [*TINY, f"--processes={processes}", f"--batch={batch}", "--rounds=1", "--updates=4", f"--json={file}"]
        assert bench_training.main(command) == 0
        ways = json.loads(file.read_text())["ways"]
        assert all((way["parts"]["sync"] > 0) == (processes == 2) for way in ways)
        losses.append([way["losses"] for way in ways])
    one, two = losses
    assert two[0] == pytest.approx(one[0], abs=1e-5)
    assert two[1] == pytest.approx(one[1], abs=1e-2)
    assert two[2] == pytest.approx(one[2], abs=1e-5)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--processes=0", "--processes: 0 must be 1 or more"),
        ("--batch=0", "--batch: 0 must be 1 or more"),
        ("--json=/nowhere/x.json", "there is no folder /nowhere"),
    ],
)
def test_mistakes_end_in_a_line(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_training.main([*TINY, argument])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_heads_that_do_not_divide_the_width(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_training.main([*TINY, "--heads=3"]) == 2
    assert "n_embd=32 is not divisible by n_head=3" in capsys.readouterr().err


def test_the_corpus_has_the_frequencies_of_a_text(tmp_path: Path) -> None:
    tokens = np.fromfile(write_words(tmp_path / "train.bin", 1000), "<u2")
    counts = np.bincount(tokens, minlength=1000)
    assert len(tokens) > 100_000
    assert len(counts) == 1000
    assert counts[0] > 10 * counts[100] > 0
