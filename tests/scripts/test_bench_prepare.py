"""scripts/bench_prepare.py: its numbers and its text, on very little of it. Never how fast anything is."""

import json
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import bench_prepare as bench
from tests.data.conftest import bpe_cache, bpe_files  # noqa: F401 (fixtures)


@pytest.fixture(scope="module")
def outcome(bpe_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:  # noqa: F811
    """What it prints (`lines`) and writes (`values`)."""
    path = tmp_path_factory.mktemp("bench") / "numbers.json"
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(bpe_cache))
        patch.setattr("builtins.print", lambda *parts, **_: lines.extend(" ".join(parts).split("\n")))
        assert bench.main(["--megabytes=0.05", "--rounds=2", "--workers=2", f"--json={path}"]) == 0
    return SimpleNamespace(lines=lines, values=json.loads(path.read_text()))


def rate(timing: dict[str, float]) -> float:
    return timing["megabytes"] / timing["seconds"]


def test_figures_follow_from_the_times(outcome: SimpleNamespace) -> None:
    alone = [rate(timing) for timing in outcome.values["tiktoken_timings"]]
    assert len(alone) == 5  # before, between and after two rounds of two runs
    assert outcome.values["tiktoken"] == pytest.approx(median(alone))
    runs = outcome.values["runs"]
    assert [run["workers"] for run in runs] == [2, 1]
    for first, run in enumerate(runs):
        assert len(run["timings"]) == 2
        assert run["rate"] == pytest.approx(median(map(rate, run["timings"])))
        around = [(alone[i] + alone[i + 1]) / 2 for i in (first, first + 2)]
        ratios = [rate(t) / (run["workers"] * near) for t, near in zip(run["timings"], around, strict=True)]
        assert run["ratio"] == pytest.approx(median(ratios))
        assert run["peak_megabytes"] == max(t["peak_megabytes"] for t in run["timings"])
        assert 30 < run["peak_megabytes"] < 1000
    times = [[timing["seconds"] for timing in run["timings"]] for run in runs]
    assert outcome.values["speedup"] == pytest.approx(median(one / two for two, one in zip(*times, strict=True)))


def test_targets_are_held_against_what_was_measured(outcome: SimpleNamespace) -> None:
    run, speedup = outcome.values["runs"][0], outcome.values["speedup"]
    values = {found["target"]: found for found in outcome.values["targets"]}
    for target, value in zip(bench.TARGETS, (run["ratio"], speedup, run["peak_megabytes"]), strict=True):
        found = values[target.text]
        assert found["value"] == value
        assert found["reached"] == (value <= target.limit if target.at_most else value >= target.limit)
        word = "reached" if found["reached"] else "missed"
        assert f"{target.text:60}{word}: {value:.3f}" in outcome.lines


def test_what_was_not_measured_is_not_reached() -> None:
    run: dict[str, Any] = {"workers": 1, "ratio": 1.0, "peak_megabytes": 100.0}
    reached = [found["reached"] for found in bench.outcomes({"runs": [run], "speedup": 1.0})]
    assert reached == [True, None, True]


def test_the_text_is_of_the_size_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SAMPLE", 20_000)
    for name in ("a", "b"):
        count, sample = bench.write_corpus(tmp_path / name, 0.1)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    documents = [json.loads(line)["text"] for line in (tmp_path / "a").read_text("utf-8").splitlines()]
    sizes = [len(document.encode()) for document in documents]
    assert sum(sizes[:-1]) < 100_000 <= sum(sizes)
    assert count == len(documents) > len(set(documents)) // 2
    assert sample == documents[: len(sample)]
    assert sum(sizes[: len(sample) - 1]) < 20_000 <= sum(sizes[: len(sample)])


@pytest.mark.parametrize("argument", ["--megabytes=0", "--megabytes=nan", "--rounds=0", "--workers=x", "--json=no/x"])
def test_errors_are_one_line(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([argument]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: argument {argument.partition('=')[0]}: ")


def test_a_failure_of_the_command_is_one_line(
    bpe_cache: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(bpe_cache))
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert bench.main(["--megabytes=0.01", "--rounds=1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: data/prepare.py ended with status 2: ")
