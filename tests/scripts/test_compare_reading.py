"""Reading of runs and curves: values worked out by hand, damaged files, and pyarrow held against Python's parser."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts import compare
from scripts.comparison import analysis, curves, metrics
from scripts.comparison.curves import Curve
from scripts.comparison.metrics import Metrics
from scripts.comparison.runs import read_run
from tests.conftest import ROOT
from tests.scripts.written_runs import curve, write_run


def test_tokens_to_loss_interpolates_between_evaluations() -> None:
    evals = curve((0, 5.0), (1000, 3.0), (2000, 2.0))
    assert curves.tokens_to_loss(evals, 2.5) == pytest.approx(1500)
    assert curves.tokens_to_loss(evals, 3.0) == pytest.approx(1000)
    assert curves.tokens_to_loss(evals, 2.0) == pytest.approx(2000)
    assert curves.tokens_to_loss(evals, 1.9) is None
    assert curves.tokens_to_loss(evals, 6.0) == 0


def test_tokens_to_loss_takes_the_first_crossing() -> None:
    assert curves.tokens_to_loss(curve((0, 4.0), (10, 2.0), (20, 5.0), (30, 1.0)), 3.0) == pytest.approx(5)


def test_tokens_to_loss_passes_over_losses_that_are_not_numbers() -> None:
    assert curves.tokens_to_loss(curve((0, 4.0), (10, math.nan), (20, 2.0)), 3.0) == pytest.approx(10)
    assert curves.tokens_to_loss(curve((0, math.nan)), 3.0) is None
    assert curves.tokens_to_loss(curve(), 3.0) is None


def test_bits_per_byte() -> None:
    # ln 4 nats are two bits a token; a token is four bytes: half a bit a byte.
    assert analysis.bits_per_byte(math.log(4), 100, 400) == pytest.approx(0.5)
    assert analysis.bits_per_byte(math.log(4), 100, None) is None
    assert analysis.bits_per_byte(None, 100, 400) is None


def test_smooth_shortens_its_window_at_the_ends_and_keeps_gaps() -> None:
    assert curves.smooth(np.array([1.0, 2, 6, 4]), 3) == pytest.approx([1.5, 3, 4, 5])
    smoothed = curves.smooth(np.array([1.0, np.nan, 3, 5]), 3)
    assert smoothed == pytest.approx([1, np.nan, 4, 4], nan_ok=True)
    assert len(curves.smooth(np.array([]), 5)) == 0


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


@pytest.mark.parametrize(
    "line",
    [
        '{"iter": NaN, "tokens": 1, "time": 1, "val/loss": 2}',
        "12",
        "[1]",
        '{"val/loss": 2.0}',
        '{"iter": 1, "val/loss": "x"}',
        "\0\0",
        "\xff",
    ],
)
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


# --- pyarrow against Python's parser ---


def rows(number: int = 30) -> list[str]:
    """Lines as training/reporter.py writes them, an evaluation after every tenth update."""
    draw = random.Random(0)
    lines = ['{"iter": 0, "tokens": 0, "time": 0.0, "val/loss": 10.9}']
    for k in range(1, number + 1):
        place = {"iter": k, "tokens": k * 491520, "time": k * 0.3 + draw.random()}
        rate = {"train/loss": draw.gauss(3, 1), "lr": 6e-4, "grad_norm": draw.random(), "tokens_per_sec": draw.random()}
        lines.append(json.dumps(place | rate))
        if k % 10 == 0:
            lines.append(json.dumps(place | {"val/loss": draw.gauss(3, 1)}))
    return lines


def equal(a: Metrics, b: Metrics) -> bool:
    def columns(m: Metrics) -> list[np.ndarray]:
        return [c for x in (m.train, m.evals) for c in (x.updates, x.tokens, x.time, x.loss)] + [m.tokens_per_sec]

    same = all(np.array_equal(x, y, equal_nan=True) for x, y in zip(columns(a), columns(b), strict=True))
    return same and a.damaged_lines == b.damaged_lines and all(c.dtype == np.float64 for c in columns(a))


PLAIN = [
    '{"val/loss": 2.5, "time": 9, "tokens": 40, "iter": 31}',  # other order
    '{"iter": 31, "tokens": 40, "time": 9, "val/loss": 3, "update_ratio/wte": 0.001, "x": [1, {"iter": 7}], "y": null}',
    '{"iter": 31, "tokens": 123456789012345678901234567890, "time": 9, "train/loss": 1e-320}',  # no tokens_per_sec
    '{"iter": 31, "tokens": 9007199254740993, "time": 9, "train/loss": 2, "note": "Σ 文 \\u2028 \\"quoted\\""}',
    '{"iter": 31, "tokens": 4e4, "time": -0.0, "train/loss": 2, "val/loss": 3, "tokens_per_sec": null}',  # both kinds
    '{"iter": 31, "tokens": 40, "time": 9, "lr": 0.1}',  # neither
]
DOUBTFUL = [
    '{"iter": 31, "tokens": 40, "time": 9, "train/loss": null, "lr": 0.1}',
    '{"iter": 31, "tokens": 40, "time": 9, "val/loss": NaN}',
    '{"iter": 31, "tokens": 40, "time": 9, "val/loss": Infinity}',
    '{"iter": 31, "tokens": 40, "time": 9, "val/loss": 1e999}',
    '{"iter": 31, "tokens": 1' + 400 * "0" + ', "time": 9, "val/loss": 2}',
    '{"iter": NaN, "tokens": 40, "time": 9, "val/loss": 2}',
    '{"iter": 31, "tokens": 40, "time": 1e999, "val/loss": 2}',
    '{"iter": 31, "tokens": 40, "val/loss": 2}',
    '{"iter": 31, "tokens": null, "time": 9, "val/loss": 2}',
    '{"iter": "31", "tokens": true, "time": 9, "val/loss": 2}',
    '{"iter": 31, "tokens": 40, "time": 9, "val/loss": {"x": 1}}',
    '{"iter": 31, "tokens": 40, "time": 9, "val/loss": 2} {"iter": 32, "tokens": 40, "time": 9, "val/loss": 2}',
    '{"iter": 31, "tokens": 40, "time": 9, "val/loss": 2, "val/loss": 3}',
    '{"iter": 31, "tokens": 40, "time": 9, "val/lo',
    *("[1]", "12", '"train/loss"', "\0\0", "   ", "\ufeff{}", "// no"),
]


@pytest.mark.parametrize("line", PLAIN)
def test_pyarrow_reads_what_pythons_parser_reads(line: str) -> None:
    for content in ("\n".join([*rows(), line]), "\n".join([*rows(), line, *rows()]) + "\n", "\r\n".join([line, line])):
        quick = metrics.by_arrow(content.encode())
        assert quick is not None
        assert equal(quick, metrics.by_line(content.encode()))


@pytest.mark.parametrize("line", DOUBTFUL)
def test_pyarrow_leaves_doubtful_files_to_pythons_parser(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "SMALL", 0)
    for place in (0, 20, 34):
        lines = rows()
        content = "\n".join([*lines[:place], line, *lines[place:]]).encode()
        assert metrics.by_arrow(content) is None
        assert equal(metrics.read_metrics(content), metrics.by_line(content))


def test_bytes_that_are_no_text_change_nothing() -> None:
    content = "\n".join(rows()).encode() + b'\n{"iter": 31, "tokens": 40, "time": 9, "val/loss": 2, "note": "\xff"}'
    quick = metrics.by_arrow(content)
    assert quick is not None
    assert equal(quick, metrics.by_line(content))
    assert quick.evals.loss[-1] == 2


def test_large_files_go_through_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "a", [(0, 5.0), (9000, 2.0)])
    assert (folder / "metrics.jsonl").stat().st_size > metrics.SMALL
    expected = metrics.by_line((folder / "metrics.jsonl").read_bytes())
    monkeypatch.setattr(metrics, "by_line", lambda content: pytest.fail("read line by line"))
    run = read_run(folder)
    assert equal(Metrics(run.train, run.evals, run.tokens_per_sec, run.damaged_lines), expected)
    assert len(run.train) == 9000


def test_abandoned_rows_are_not_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [(0, 5.0), (10, 2.5)])
    (folder / "metrics.abandoned.jsonl").write_text('{"iter": 20, "tokens": 20000, "time": 10, "val/loss": 1.0}\n')
    assert read_run(folder).evals.loss.tolist() == [5.0, 2.5]


# --- curves ---


def test_loss_at_is_an_evaluation_or_on_the_line_between_two() -> None:
    evals = curve((0, 5.0), (1000, 3.0), (2000, 2.0))
    assert [curves.loss_at(evals, x) for x in (0, 1000, 1250, 2000, 2001)] == [5.0, 3.0, 2.75, 2.0, None]
    assert curves.loss_at(curve((500, 3.0)), 400) is None
    assert curves.loss_at(curve(), 0) is None


def test_loss_at_does_not_look_across_a_divergence() -> None:
    evals = curve((0, 4.0), (10, math.nan), (20, 2.0))
    assert math.isnan(curves.loss_at(evals, 15))
    assert math.isnan(curves.loss_at(evals, 10))
    assert curves.loss_at(evals, 20) == 2.0


def test_mean_curve_keeps_to_what_all_have() -> None:
    a, b = curve((0, 5.0), (1000, 3.0), (2000, 2.0)), curve((0, 6.0), (500, 9.0), (2000, 1.0), (3000, 0.5))
    mean, losses = curves.mean_curve([a, b])
    assert mean.updates.tolist() == [0, 2]
    assert mean.tokens.tolist() == [0, 2000]
    assert mean.loss.tolist() == [5.5, 1.5]
    assert losses.tolist() == [[5.0, 2.0], [6.0, 1.0]]
    assert len(curves.mean_curve([a, curve()])[0]) == 0


def test_thinning_keeps_every_stretchs_extremes_and_gaps() -> None:
    loss = np.zeros(10_000)
    loss[1234], loss[6001], loss[7000] = 9, -9, math.nan
    places = np.arange(10_000.0)
    thin = curves.thinned(Curve(places, places, places, loss), 100)
    assert len(thin) <= 104
    assert {0, 1234, 6001, 7000, 9999} <= set(thin.updates.tolist())
    assert (np.diff(thin.updates) > 0).all()
    assert (thin.loss == loss[thin.updates.astype(int)])[thin.updates != 7000].all()


def test_thinning_leaves_short_curves_and_odd_lengths() -> None:
    short = curve((0, 5.0), (10, 4.0))
    assert curves.thinned(short, 2) is short
    for length in (3, 7, 101, 1003):
        values = np.arange(float(length))
        thin = curves.thinned(Curve(values, values, values, values), 4)
        assert thin.loss[0] == 0
        assert thin.loss[-1] == length - 1
        assert len(thin) <= 6
