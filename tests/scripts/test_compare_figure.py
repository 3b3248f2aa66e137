"""The figure of scripts/compare.py: what is drawn where, and that it can be told apart."""

import math
from pathlib import Path

import pytest

from scripts import compare
from scripts.comparison import figure, page
from scripts.comparison.groups import make_groups
from scripts.comparison.runs import Run, read_run
from scripts.comparison.style import style
from tests.scripts.written_runs import write_run


@pytest.fixture
def pair(tmp_path: Path) -> list[Run]:
    """adamw ends at 2.0 after 20 updates; mars is there halfway between 10 (2.2) and 20 (1.8), and slower."""
    adamw = write_run(tmp_path / "a", [(0, 5.0), (10, 2.5), (20, 2.0)])
    mars = write_run(tmp_path / "m", [(0, 5.0), (10, 2.2), (20, 1.8)], "mars-adamw", seconds=0.6, learning_rate=0.006)
    return [read_run(adamw), read_run(mars)]


def test_figure_has_labelled_axes_a_legend_and_the_unigram_line(pair: list[Run]) -> None:
    drawn = figure.draw(make_groups(pair))
    assert drawn.get_suptitle() == "tiny · 0.83M parameters · 1,000 tokens an update"
    assert [axes.get_ylabel() for axes in drawn.axes] == (
        ["validation loss (nats per token)"] * 2 + ["training loss (nats per token)"] * 2
    )
    assert [axes.get_xlabel() for axes in drawn.axes] == ["tokens trained", "training time (s)"] * 2
    legend = drawn.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["adamw", "mars-adamw", "unigram model, 3.00"]
    assert legend.get_title().get_text() == (
        "training loss: faint lines are single rows, strong lines the running mean over 2% of a run's rows (at least 5)"
    )
    for axes in drawn.axes:
        levels = [list(line.get_ydata()) for line in axes.get_lines()]
        assert [3.0, 3.0] in levels
        low, high = axes.get_ylim()
        assert low < 1.8
        assert 3.0 < high < 5.0  # the loss before training is cut off
    styles = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in drawn.axes[0].get_lines()}
    assert len(styles) == 3


def test_every_row_is_drawn_where_it_belongs(pair: list[Run]) -> None:
    val_tokens, val_time, train_tokens, _ = figure.draw(make_groups(pair)).axes
    assert val_tokens.get_lines()[1].get_xydata().tolist() == [[0, 5.0], [10_000, 2.2], [20_000, 1.8]]
    assert val_time.get_lines()[1].get_xdata().tolist() == [0, 6, 12]
    assert train_tokens.get_lines()[0].get_ydata()[:2].tolist() == [3.99, 3.98]


def test_what_lies_beyond_the_axis_is_named(tmp_path: Path) -> None:
    evals = [(0, 10.9), (10, 3.0), (50, 2.9), (100, 2.85)]
    run = read_run(write_run(tmp_path / "a", evals, train_rows=0, data={"unigram_loss": 7.6}))
    drawn = figure.draw(make_groups([run]), title="mine")
    assert drawn.get_suptitle() == "mine"
    assert drawn.axes[0].get_ylim()[1] < 4
    assert drawn.legends[0].get_texts()[1].get_text() == "unigram model, 7.60 (above the axis)"


def test_a_run_at_its_start_is_visible(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [(0, 5.6)], max_iters=10, train_rows=4))
    low, high = figure.draw(make_groups([run])).axes[0].get_ylim()
    assert low < 3.0
    assert high > 5.6


def test_losses_that_are_all_not_numbers_can_be_drawn(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [(0, math.nan), (10, math.nan)], train_rows=0))
    figure.save(figure.draw(make_groups([run])), tmp_path / "new" / "x.png")
    assert (tmp_path / "new" / "x.png").stat().st_size > 1000


def test_scales() -> None:
    assert [figure.time_scale(s)[1] for s in (60, 600, 36_000)] == ["s", "min", "h"]
    assert [figure.token_ticks(1.2e6)(x, 0) for x in (0, 2e5, 1e6)] == ["0", "0.2M", "1M"]
    assert figure.token_ticks(49e9)(1e10, 0) == "10B"
    assert len({(s.colour, str(s.line), s.marker) for s in map(style, range(196))}) == 196


# --- several seeds ---


@pytest.fixture
def seeds(tmp_path: Path) -> list[Run]:
    """adamw once, muon with two seeds that end at 1.8 and 2.0."""
    runs = [write_run(tmp_path / "a", [(0, 5.0), (10, 2.5), (20, 2.1)])]
    for seed, end in ((1, 1.8), (2, 2.0)):
        runs.append(write_run(tmp_path / f"m{seed}", [(0, 5.0), (10, 2.2), (20, end)], "muon", seed=seed))
    return [read_run(run) for run in runs]


def test_seeds_are_a_mean_a_band_and_a_thin_line_each(seeds: list[Run]) -> None:
    drawn = figure.draw(make_groups(seeds))
    assert [text.get_text() for text in drawn.legends[0].get_texts()][:2] == ["adamw", "muon, 2 seeds"]
    assert "bands go from lowest to highest" in drawn.legends[0].get_title().get_text()
    val, val_time, train, _ = drawn.axes
    muon = [line for line in val.get_lines() if line.get_color() == style(1).colour]
    assert [line.get_ydata()[-1] for line in muon] == pytest.approx([1.8, 2.0, 1.9])
    assert [line.get_linewidth() > 1 for line in muon] == [False, False, True]
    (band,) = val.collections
    corners = band.get_paths()[0].vertices
    assert corners[corners[:, 0] == 20_000][:, 1].min() == 1.8
    assert corners[corners[:, 0] == 20_000][:, 1].max() == 2.0
    assert not val_time.collections  # each seed takes a time of its own
    assert len([line for line in train.get_lines() if line.get_color() == style(1).colour]) == 3


def test_a_run_that_is_not_finished_is_marked(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [(0, 5.0), (1500, 2.0)], max_iters=3000, train_rows=0))
    assert figure.draw(make_groups([run])).legends[0].get_texts()[0].get_text() == "adamw (at update 1,500)"


def test_single_rows_of_many_runs_are_left_out(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / str(i), [(0, 5.0), (20, 2.0)], f"o{i}")) for i in range(5)]
    few, many = figure.draw(make_groups(runs[:4])), figure.draw(make_groups(runs))
    assert len(few.axes[2].get_lines()) == 2 * 4 + 1  # and the unigram model
    assert len(many.axes[2].get_lines()) == 5 + 1
    assert "single rows" in few.legends[0].get_title().get_text()
    assert "single rows" not in many.legends[0].get_title().get_text()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", [30, 54])
def test_the_legend_of_many_runs_leaves_the_panels_their_size(tmp_path: Path, number: int) -> None:
    name = "a-rather-long-name-of-an-experiment-that-somebody-wrote-at-night-"
    runs = [
        read_run(write_run(tmp_path / f"{name}{i}", [(0, 5.0), (20, 2.0)], learning_rate=(1 + i) / 1000))
        for i in range(number)
    ]
    drawn, few = figure.draw(make_groups(runs)), figure.draw(make_groups(runs[:2]))
    for each in (drawn, few):
        each.draw_without_rendering()
    (legend,) = drawn.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert len(set(labels)) == number + 1  # and the unigram model
    assert labels[0].startswith("adamw, lr 1e-3 (")
    assert labels[0].endswith("-night-0)")
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= drawn.bbox.x1
    below = min(axes.get_tightbbox().y0 for axes in drawn.axes)
    assert box.y1 <= below
    heights = [each.axes[0].get_window_extent().height for each in (drawn, few)]
    assert heights[0] > 0.8 * heights[1]
    html = page.page(make_groups(runs), None, [], None)
    assert f"height: {page.HEIGHT + page.ENTRY_HEIGHT * (number - figure.FEW)}px" in html


def test_every_kind_of_file(seeds: list[Run], tmp_path: Path) -> None:
    outs = [tmp_path / "c.png", tmp_path / "c.svg", tmp_path / "c.pdf"]
    arguments = [part for out in outs for part in ("--out", str(out))]
    assert compare.main([*(str(run.folder) for run in seeds), *arguments]) == 0
    assert [out.read_bytes()[:5] for out in outs] == [b"\x89PNG\r", b"<?xml", b"%PDF-"]
    assert not (tmp_path / "comparison.png").exists()


def test_long_curves_do_not_swell_the_file(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [(0, 5.0), (20_000, 2.0)]))
    drawn = figure.draw(make_groups([run]))
    assert all(len(line.get_xdata()) <= figure.MOST_POINTS + 2 for axes in drawn.axes for line in axes.get_lines())
