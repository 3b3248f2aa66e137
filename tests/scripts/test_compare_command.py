"""scripts/compare.py: the command, where its files go, and what it makes of odd names and a full disk."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import compare
from scripts.comparison.runs import Run, RunError, read_run
from tests.conftest import ROOT
from tests.scripts.written_runs import write_run


@pytest.fixture
def pair(tmp_path: Path) -> list[Run]:
    """adamw ends at 2.0 after 20 updates; mars is there halfway between 10 (2.2) and 20 (1.8), and slower."""
    adamw = write_run(tmp_path / "a", [(0, 5.0), (10, 2.5), (20, 2.0)])
    mars = write_run(tmp_path / "m", [(0, 5.0), (10, 2.2), (20, 1.8)], "mars-adamw", seconds=0.6, learning_rate=0.006)
    return [read_run(adamw), read_run(mars)]


def test_the_command(pair: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(run.folder) for run in pair]
    assert compare.main([*folders, folders[0]]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"loss curves: {tmp_path / 'comparison.png'}"
    assert "mars-adamw reaches adamw's final loss" in out
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert err == "warning: a run that was given twice is shown once\n"


def test_where_the_figure_goes(pair: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert compare.default_folder([Path("runs/a"), Path("runs/b")]) == Path("runs")
    assert compare.default_folder([Path("a"), Path("runs/b")]) == Path()
    assert compare.main([str(pair[0].folder), "--out", "deep/x.png"]) == 0
    assert Path("deep/x.png").is_file()


def test_figures_that_cannot_be_written(pair: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out in (tmp_path / "x.jpg", pair[0].folder / "config.json" / "x.png"):
        assert compare.main([str(pair[0].folder), "--out", str(out)]) == 2
        assert f"{out} " in capsys.readouterr().err


def test_what_the_tool_itself_left_beside_the_runs_is_no_run(
    pair: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([*(str(run.folder) for run in pair), "--json"]) == 0
    capsys.readouterr()
    everything = sorted(map(str, tmp_path.iterdir()))
    assert len(everything) == 4
    assert compare.main(everything) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"loss curves: {tmp_path / 'comparison.png'}"
    assert err == f"warning: no runs, so not read: {tmp_path / 'comparison.json'}, {tmp_path / 'comparison.png'}\n"
    assert compare.main([str(tmp_path / "comparison.png")]) == 2
    assert "comparison.png is not a folder" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_one_line(pair: list[Run]) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "compare.py"), str(pair[0].folder), "--json", "-"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: standard output cannot be written: No space left on device\n"


def test_a_reader_that_has_seen_enough_is_no_error(pair: list[Run], tmp_path: Path) -> None:
    """One that goes away while the figure is drawn, so that the last line finds nobody."""
    code = (
        "import os, sys; from scripts import compare; from scripts.comparison import figure;"
        "figure.draw = lambda *args: os.close(reader); figure.save = lambda *args: None;"
        "reader, writer = os.pipe(); os.dup2(writer, 1); os.close(writer);"
        "sys.exit(compare.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(pair[0].folder)], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.filterwarnings("error")
def test_names_with_odd_characters_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / os.fsdecode(name) for name in (b"bad\xff", b"line\nbreak", b"\x1b[31mred", "語".encode())]
    for i, folder in enumerate(folders):
        write_run(folder, [(0, 5.0), (10, 2.0)], learning_rate=0.001 * (i + 1), dataset="data/t\x1b")
    outs = [f"--out={tmp_path / 'o' / ('c' + ending)}" for ending in (".png", ".svg")]
    page, csv_file = tmp_path / "o" / "p.html", tmp_path / "o" / "c.csv"
    arguments = [*outs, "--html", str(page), "--csv", str(csv_file), "--title", "語 \udcfe"]
    assert compare.main([*map(str, folders), *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for name in (r"bad\xff", r"line\nbreak", r"\x1b[31mred", "語"):
        assert sum(line.startswith(name) for line in out.splitlines()) >= 1
        assert name in csv_file.read_text(encoding="utf-8")
        assert name in page.read_text(encoding="utf-8")
    assert "\x1b" not in out
    svg = (tmp_path / "o" / "c.svg").read_text(encoding="utf-8")
    assert r"(\u8a9e)" in svg
    assert compare.main([str(tmp_path / os.fsdecode(b"no\xff\x1b"))]) == 2
    assert r"no\xff\x1b is missing" in capsys.readouterr().err


def test_errors_are_of_one_kind() -> None:
    with pytest.raises(RunError, match="RUN"):
        compare.arguments([])


def test_dollar_signs_are_no_formulas(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, [(0, 5.0), (10, 2.0)]) for name in ("cheap $", "$x_{")]
    assert compare.main([*map(str, runs), "--out", str(tmp_path / "c.png"), "--title", r"$x_{ \frac"]) == 0
    assert (tmp_path / "c.png").exists()
