"""scripts/compare.py: values worked out by hand, damaged and unfinished runs, what is said and what is drawn."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts import compare
from scripts.comparison import analysis, figure, report, table, wording
from scripts.comparison.runs import Curve, Run, RunError, read_run

ROOT = Path(__file__).resolve().parents[2]
DATA = {"path": "data/tiny", "train_tokens": 9000, "val_tokens": 800, "val_bytes": 1600, "tokenizer": "gpt2"}


def write_run(
    folder: Path,
    evals: list[tuple[int, float]],
    optimizer: str = "adamw",
    train_rows: int | None = None,
    seconds: float = 0.5,
    data: dict | None = None,
    **config: object,
) -> Path:
    """A run of 1000 tokens and some seconds an update, evaluated at the given updates."""
    last = evals[-1][0] if evals else 0
    values = {
        **{"optimizer": optimizer, "learning_rate": 0.003, "max_iters": last, "seed": 1, "dataset": "data/tiny"},
        **{"parameters": 830_000, "tokens_per_update": 1000, "processes": 1, "device_name": "cpu"},
        "data": DATA | {"unigram_loss": 3.0} | (data or {}),
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(values | config))
    rows = [{"iter": k, **at(k, seconds), "val/loss": loss} for k, loss in evals]
    for k in range(1, (last if train_rows is None else train_rows) + 1):
        # The first five rows are slow, as they are while a model compiles.
        speed = 10 if k <= 5 else 1000 / seconds + k
        row = {"train/loss": 4 - k / 100, "lr": 0.003, "grad_norm": 1.0, "tokens_per_sec": speed}
        rows.append({"iter": k, **at(k, seconds), **row})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def at(update: int, seconds: float) -> dict[str, float]:
    return {"tokens": 1000 * update, "time": seconds * update}


def curve(*points: tuple[float, float]) -> Curve:
    tokens = np.array([x for x, _ in points], dtype=float)
    return Curve(tokens / 1000, tokens, tokens / 100, np.array([y for _, y in points], dtype=float))


@pytest.fixture
def pair(tmp_path: Path) -> list[Run]:
    """adamw ends at 2.0 after 20 updates; mars is there halfway between 10 (2.2) and 20 (1.8), and slower."""
    adamw = write_run(tmp_path / "a", [(0, 5.0), (10, 2.5), (20, 2.0)])
    mars = write_run(tmp_path / "m", [(0, 5.0), (10, 2.2), (20, 1.8)], "mars-adamw", seconds=0.6, learning_rate=0.006)
    return [read_run(adamw), read_run(mars)]


# --- analysis ---


def test_tokens_to_loss_interpolates_between_evaluations() -> None:
    evals = curve((0, 5.0), (1000, 3.0), (2000, 2.0))
    assert analysis.tokens_to_loss(evals, 2.5) == pytest.approx(1500)
    assert analysis.tokens_to_loss(evals, 3.0) == pytest.approx(1000)
    assert analysis.tokens_to_loss(evals, 2.0) == pytest.approx(2000)
    assert analysis.tokens_to_loss(evals, 1.9) is None
    assert analysis.tokens_to_loss(evals, 6.0) == 0


def test_tokens_to_loss_takes_the_first_crossing() -> None:
    assert analysis.tokens_to_loss(curve((0, 4.0), (10, 2.0), (20, 5.0), (30, 1.0)), 3.0) == pytest.approx(5)


def test_tokens_to_loss_passes_over_losses_that_are_not_numbers() -> None:
    assert analysis.tokens_to_loss(curve((0, 4.0), (10, math.nan), (20, 2.0)), 3.0) == pytest.approx(10)
    assert analysis.tokens_to_loss(curve((0, math.nan)), 3.0) is None
    assert analysis.tokens_to_loss(curve(), 3.0) is None


def test_bits_per_byte() -> None:
    # ln 4 nats are two bits a token; a token is four bytes: half a bit a byte.
    assert analysis.bits_per_byte(math.log(4), 100, 400) == pytest.approx(0.5)
    assert analysis.bits_per_byte(math.log(4), 100, None) is None
    assert analysis.bits_per_byte(None, 100, 400) is None


def test_smooth_shortens_its_window_at_the_ends_and_keeps_gaps() -> None:
    assert analysis.smooth(np.array([1.0, 2, 6, 4]), 3) == pytest.approx([1.5, 3, 4, 5])
    smoothed = analysis.smooth(np.array([1.0, np.nan, 3, 5]), 3)
    assert smoothed == pytest.approx([1, np.nan, 4, 4], nan_ok=True)
    assert len(analysis.smooth(np.array([]), 5)) == 0


def test_throughput_leaves_out_the_first_rows() -> None:
    assert analysis.throughput(np.array([1.0] * 5 + [7, 8, 9, 8, 8])) == 8
    assert analysis.throughput(np.array([1.0, 9])) == 9
    assert analysis.throughput(np.array([])) is None


# --- reading ---


def test_a_damaged_line_is_skipped_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a", [(0, 5.0), (10, 2.5)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iter": 20, "tokens": 20000, "val/lo')
    run = read_run(folder)
    assert run.damaged_lines == 1
    assert run.evals.loss.tolist() == [5.0, 2.5]
    assert compare.main([str(folder)]) == 0
    warning = capsys.readouterr().err.splitlines()
    assert len(warning) == 1
    assert str(folder.resolve()) in warning[0]
    assert "1 damaged line" in warning[0]


@pytest.mark.parametrize("line", ["12", "[1]", '{"val/loss": 2.0}', '{"iter": 1, "val/loss": "x"}', "\0\0", "\xff"])
def test_lines_that_are_no_rows_do_not_stop_the_reading(tmp_path: Path, line: str) -> None:
    folder = write_run(tmp_path / "a", [(0, 5.0), (10, 2.5)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    assert len(read_run(folder).evals) == 2


def test_losses_that_are_not_numbers_are_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [(0, 5.0), (10, 2.5), (20, math.nan)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iter": 30, "tokens": 30000, "time": 15, "val/loss": null}\n')
    evals = read_run(folder).evals
    assert np.isnan(evals.loss[2:]).all()
    assert analysis.best_loss(evals) == 2.5


@pytest.mark.parametrize("what", ["no folder", "a file", "no metrics", "no config", "empty", "no rows", "bad config"])
def test_what_cannot_be_compared_is_one_line(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "a", [(0, 5.0)])
    metrics, config = folder / "metrics.jsonl", folder / "config.json"
    if what == "no folder":
        folder = tmp_path / "nowhere"
    elif what == "a file":
        folder = metrics
    elif what == "no metrics":
        metrics.unlink()
    elif what == "no config":
        config.unlink()
    elif what == "bad config":
        config.write_text("[1]")
    else:
        metrics.write_text("" if what == "empty" else "nothing\n")
    assert compare.main([str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {folder.resolve()}")
    assert err.count("\n") == 1
    assert "train.py" in err


def test_the_command_ends_with_status_2_and_no_traceback(tmp_path: Path) -> None:
    script = str(ROOT / "scripts" / "compare.py")
    for args in ([str(tmp_path / "nowhere")], [], ["--color"]):
        done = subprocess.run([sys.executable, script, *args], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


# --- text ---


@pytest.mark.parametrize(
    ("number", "text"),
    [(830_000, "0.83M"), (124_373_760, "124.4M"), (1_228_800, "1.23M"), (49_152_000_000, "49.2B"), (8192, "8.19K")],
)
def test_amount(number: float, text: str) -> None:
    assert wording.amount(number) == text


def test_rate_and_duration() -> None:
    assert [wording.rate(x) for x in (0.006, 0.0006, 0.02, 0.00015, 1.0, 0.0)] == [
        "6e-3",
        "6e-4",
        "2e-2",
        "1.5e-4",
        "1",
        "0",
    ]
    assert [wording.duration(x) for x in (0.4, 61, 600, 7200)] == ["0.4 s", "61 s", "10.0 min", "2.0 h"]


def test_table_cells(pair: list[Run]) -> None:
    lines = table.table(pair)
    words = [" ".join(line.split()) for line in lines]
    assert words[1] == "run optimizer rate params tokens final best final best tokens/s time"
    # Bits per byte: 2.0 / ln 2 / 2 bytes a token = 1.443. Tokens/s: rows 6 to 20 hold 2006 to 2020.
    assert words[3] == "a adamw 3e-3 0.83M 20.0K 2.000 2.000 1.443 1.443 2,013 10 s"
    assert words[4] == "m mars-adamw 6e-3 0.83M 20.0K 1.800 1.800 1.298 1.298 1,680 12 s"
    assert words[5] == "unigram model 3.000 2.164"
    # Columns are flush right under their heads.
    assert lines[1].index("final") + 5 == lines[3].index("2.000") + 5 == lines[5].index("3.000") + 5


def test_table_says_unknown_and_fits_the_terminal(tmp_path: Path) -> None:
    name = "a-rather-long-name-of-a-run-that-somebody-wrote-at-night-"
    data = {"val_bytes": None, "unigram_loss": None}
    runs = [
        read_run(write_run(tmp_path / (name + n), [(0, 5.0)], "mars-shampoo", data=data, parameters=None)) for n in "ab"
    ]
    lines = table.table(runs)
    assert len(lines) == 5
    assert lines[3].split()[3] == "-"
    assert max(map(len, lines)) <= table.TABLE_WIDTH
    assert lines[3] != lines[4]


def test_sentences_both_ways(pair: list[Run]) -> None:
    # mars is at 2.0 after 15 of its updates: 15,000 of 20,000 tokens, and 9 of adamw's 10 seconds (0.6 and 0.5 each).
    assert report.sentences(pair) == [
        "adamw does not reach mars-adamw's final loss (1.800) within its 20.0K tokens (it ends 0.200 above).",
        "mars-adamw reaches adamw's final loss (2.000) after 15.0K tokens, 75 % of adamw's 20.0K"
        " (at the runs' median speeds, 90 % of its time).",
        "One seed each: differences of a few hundredths can be noise.",
    ]


def sentences_of(folder: Path, *runs: tuple[list[tuple[int, float]], dict]) -> str:
    return "\n".join(
        report.sentences([read_run(write_run(folder / f"r{i}", evals, **kw)) for i, (evals, kw) in enumerate(runs)])
    )


def test_a_tie_is_said_once(tmp_path: Path) -> None:
    text = sentences_of(tmp_path, ([(0, 5.0), (10, 2.0)], {}), ([(0, 5.0), (20, 2.0001)], {"optimizer": "muon"}))
    assert text.splitlines()[0] == "adamw and muon end level at 2.000, after 10.0K and 20.0K tokens."
    assert len(text.splitlines()) == 2


def test_a_loss_that_rises_again_is_told(tmp_path: Path) -> None:
    runs = ([(0, 5.0), (10, 2.0)], {}), ([(0, 5.0), (10, 1.0), (20, 3.0)], {"optimizer": "muon"})
    assert "muon reaches adamw's final loss (2.000) after 7.50K tokens, 75 % of adamw's 10.0K" in (
        text := sentences_of(tmp_path, *runs)
    )
    assert "; but it ends 1.000 above" in text


def test_a_run_that_diverged_is_no_goal(tmp_path: Path) -> None:
    text = sentences_of(
        tmp_path, ([(0, 5.0), (10, 2.0)], {}), ([(0, 5.0), (10, 3.0), (20, math.nan)], {"optimizer": "muon"})
    )
    assert text.splitlines()[0] == (
        "muon does not reach adamw's final loss (2.000) within its 20.0K tokens"
        " (it ends at a loss that is not a number)."
    )
    assert "nan" not in text


def test_unfinished_runs_and_runs_without_evaluations(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / "done", [(0, 5.0), (10, 2.0)])),
        read_run(write_run(tmp_path / "going", [(0, 5.0), (5, 2.5)], "muon", max_iters=10)),
        read_run(write_run(tmp_path / "start", [(0, 5.0)], "lion", max_iters=10)),
        read_run(write_run(tmp_path / "blind", [], "sgd", train_rows=3, max_iters=10)),
        read_run(write_run(tmp_path / "bare", [(0, 5.0), (10, 1.9)], "mars-lion", train_rows=0)),
    ]
    text = "\n".join(report.sentences(runs))
    assert "muon's latest loss (2.500)" in text
    assert (
        "muon does not reach adamw's final loss (2.000) within its 5.00K tokens so far (it now stands 0.500 above)"
        in text
    )
    assert "lion" not in text.replace("mars-lion", "")
    assert "sgd" not in text
    notes = "\n".join(report.notes(runs))
    assert "going: stopped or still going at update 5 of 10" in notes
    assert "start: only the evaluation before training" in notes
    assert "blind: no evaluation" in notes
    assert figure.draw(runs).axes


def test_many_runs_are_each_set_against_the_first(tmp_path: Path) -> None:
    runs = [([(0, 5.0), (10, 2.0 + i / 10)], {"optimizer": f"o{i}"}) for i in range(5)]
    lines = sentences_of(tmp_path, *runs).splitlines()
    assert len(lines) == 5
    assert all("o0's final loss (2.000)" in line for line in lines[:4])


def test_runs_that_are_not_alike_are_told(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / "a", [(0, 5.0), (10, 2.0)])),
        read_run(write_run(tmp_path / "b", [(0, 5.0), (10, 2.1)], "muon", tokens_per_update=1001, parameters=830_001)),
        read_run(write_run(tmp_path / "c", [(0, 5.0), (9, 2.2)], "lion", data={"val_tokens": 801}, device_name="gpu")),
    ]
    assert report.warnings(runs[:1] * 2) == []
    alike, equal_data, speed = report.warnings(runs)
    assert alike.startswith("warning: not like for like: different data sets: ")
    assert "different tokens an update: 1,000 (a, c), 1,001 (b)" in alike
    assert "different parameter counts: 830,000 (a, c), 830,001 (b)" in alike
    assert "different planned updates: 10 (a, b), 9 (c)" in alike
    assert "equal validation data" in equal_data
    assert "different devices: cpu (a, b), gpu (c)" in speed
    assert "lion" not in "\n".join(report.sentences(runs))
    assert "of its time" not in "\n".join(
        report.sentences(
            [runs[0], read_run(write_run(tmp_path / "d", [(0, 5.0), (10, 1.9)], "muon", device_name="gpu"))]
        )
    )


def test_equal_optimizers_stay_distinguishable(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / x / "mars", [(0, 5.0), (10, 2.0 + i)], "mars-adamw", learning_rate=0.006, seed=i))
        for i, x in enumerate("ab")
    ]
    assert wording.legend_labels(runs) == ["mars-adamw, lr 6e-3 (a/mars)", "mars-adamw, lr 6e-3 (b/mars)"]
    text = "\n".join(report.sentences(runs))
    assert "a/mars reaches b/mars's final loss (3.000)" in text
    assert "One seed" not in text


# --- figure ---


def test_figure_has_labelled_axes_a_legend_and_the_unigram_line(pair: list[Run]) -> None:
    drawn = figure.draw(pair)
    assert drawn.get_suptitle() == "tiny · 0.83M parameters · 1,000 tokens an update"
    assert [axes.get_ylabel() for axes in drawn.axes] == (
        ["validation loss (nats per token)"] * 2 + ["training loss (nats per token)"] * 2
    )
    assert [axes.get_xlabel() for axes in drawn.axes] == ["tokens trained", "training time (s)"] * 2
    legend = drawn.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["adamw", "mars-adamw", "unigram model, 3.00"]
    assert "running mean over 2%" in legend.get_title().get_text()
    for axes in drawn.axes:
        levels = [list(line.get_ydata()) for line in axes.get_lines()]
        assert [3.0, 3.0] in levels
        low, high = axes.get_ylim()
        assert low < 1.8
        assert 3.0 < high < 5.0  # the loss before training is cut off
    styles = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in drawn.axes[0].get_lines()}
    assert len(styles) == 3


def test_every_row_is_drawn_where_it_belongs(pair: list[Run]) -> None:
    val_tokens, val_time, train_tokens, _ = figure.draw(pair).axes
    assert val_tokens.get_lines()[1].get_xydata().tolist() == [[0, 5.0], [10_000, 2.2], [20_000, 1.8]]
    assert val_time.get_lines()[1].get_xdata().tolist() == [0, 6, 12]
    assert train_tokens.get_lines()[0].get_ydata()[:2].tolist() == [3.99, 3.98]


def test_what_lies_beyond_the_axis_is_named(tmp_path: Path) -> None:
    evals = [(0, 10.9), (10, 3.0), (50, 2.9), (100, 2.85)]
    run = read_run(write_run(tmp_path / "a", evals, train_rows=0, data={"unigram_loss": 7.6}))
    drawn = figure.draw([run], title="mine")
    assert drawn.get_suptitle() == "mine"
    assert drawn.axes[0].get_ylim()[1] < 4
    assert drawn.legends[0].get_texts()[1].get_text() == "unigram model, 7.60 (above the axis)"


def test_a_run_at_its_start_is_visible(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [(0, 5.6)], max_iters=10, train_rows=4))
    low, high = figure.draw([run]).axes[0].get_ylim()
    assert low < 3.0
    assert high > 5.6


def test_losses_that_are_all_not_numbers_can_be_drawn(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [(0, math.nan), (10, math.nan)], train_rows=0))
    figure.save(figure.draw([run]), tmp_path / "new" / "x.png")
    assert (tmp_path / "new" / "x.png").stat().st_size > 1000


def test_scales() -> None:
    assert [figure.time_scale(s)[1] for s in (60, 600, 36_000)] == ["s", "min", "h"]
    assert [figure.token_ticks(1.2e6)(x, 0) for x in (0, 2e5, 1e6)] == ["0", "0.2M", "1M"]
    assert figure.token_ticks(49e9)(1e10, 0) == "10B"
    assert len({(s.colour, str(s.line), s.marker) for s in map(figure.style, range(28))}) == 28


# --- the command ---


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
    assert compare.default_out([Path("runs/a"), Path("runs/b")]) == Path("runs/comparison.png")
    assert compare.default_out([Path("a"), Path("runs/b")]) == Path("comparison.png")
    assert compare.main([str(pair[0].folder), "--out", "deep/x.png"]) == 0
    assert Path("deep/x.png").is_file()


def test_figures_that_cannot_be_written(pair: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out in (tmp_path / "x.jpg", pair[0].folder / "config.json" / "x.png"):
        assert compare.main([str(pair[0].folder), "--out", str(out)]) == 2
        assert f"{out} " in capsys.readouterr().err


def test_errors_are_of_one_kind() -> None:
    with pytest.raises(RunError, match="RUN"):
        compare.arguments([])


def test_dollar_signs_are_no_formulas(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, [(0, 5.0), (10, 2.0)]) for name in ("cheap $", "$x_{")]
    assert compare.main([*map(str, runs), "--out", str(tmp_path / "c.png"), "--title", r"$x_{ \frac"]) == 0
    assert (tmp_path / "c.png").exists()
