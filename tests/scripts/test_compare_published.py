"""--paper: the published values against the tables they come from, and differences worked out by hand."""

import csv
from dataclasses import asdict
from pathlib import Path

import pytest

from configs import load_config
from scripts import compare
from scripts.comparison import figure, published
from scripts.comparison.groups import Group, make_groups
from scripts.comparison.runs import read_run
from tests.conftest import ROOT
from tests.scripts.written_runs import write_run

OWT = {"path": "data/openwebtext", "val_tokens": 4_434_897, "unigram_loss": None}


def paper_run(folder: Path, optimizer: str = "adamw", last: int = 100_000, **config: object) -> Group:
    """A run of the published size and budget: 3.2 at 10,000 updates, 3.0 at 40,000, 2.9 at the end."""
    evals = [
        (k, loss) for k, loss in ((0, 11.0), (10_000, 3.2), (40_000, 3.0), (90_000, 2.89), (100_000, 2.9)) if k <= last
    ]
    rate = 6e-3 if optimizer == "mars-adamw" else 6e-4
    values = {"parameters": 124_373_760, "max_iters": 100_000, "learning_rate": rate, "data": OWT, **config}
    run = write_run(folder, evals, optimizer, train_rows=0, tokens_per_update=491_520, **values)
    return make_groups([read_run(run)])[0]


# Small / medium / large after 10,000, 40,000 and 100,000 updates, as the published code's README prints them.
TABLE = {
    "adamw": "3.193 / 3.084 / 3.013 | 3.024 / 2.821 / 2.741 | 2.885 / 2.691 / 2.561",
    "muon": "3.165 / 3.009 / 2.915 | 3.006 / 2.813 / 2.691 | 2.901 / 2.688 / 2.573",
    "mars-adamw-exact": "3.107 / - / - | 2.980 / - / - | 2.847 / - / -",
    "mars-adamw": "3.108 / 2.969 / 2.876 | 2.981 / 2.763 / 2.647 | 2.849 / 2.636 / 2.518",
}


def test_values_are_the_published_table() -> None:
    for optimizer, line in TABLE.items():
        for column, cell in zip(("5B", "20B", "50B"), line.split(" | "), strict=True):
            for size, value in zip(("small", "medium", "large"), cell.split(" / "), strict=True):
                known = published.load(size).losses.get(optimizer, {}).get(column)
                assert known == (None if value == "-" else float(value))


def test_every_size_loads() -> None:
    assert set(published.sizes()) >= {"gpt2-small", "small", "medium", "large", "gpt2-small-fineweb", "xl-fineweb"}
    for name in published.sizes():
        paper = published.load(name)
        assert len(paper.curves) in (2, 3)
        for known in paper.curves:
            assert len(known.curve) > 80
            assert 2 < known.curve.loss.min() < known.curve.loss.max() < 4
            assert known.older_recipe == ("mars" in known.optimizer and "fineweb" not in paper.name)
    assert published.load("large").losses["adamw"]["best"] == 2.568
    assert published.load("small").losses["adamw"]["best"] == 2.885


def test_a_curve_is_its_column_of_the_file() -> None:
    with (published.FOLDER / "curves.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["fwedu_xl_MARS"]]
    paper = published.load("gpt2-xl-fineweb")
    curve = next(known.curve for known in paper.curves if known.optimizer == "mars-adamw")
    assert curve.updates.tolist() == [float(row["step"]) for row in rows]
    assert curve.loss.tolist() == [float(row["fwedu_xl_MARS"]) for row in rows]
    assert curve.tokens[-1] == 49_152_000_000
    # Where there is no table the values are the curve's.
    assert paper.losses["mars-adamw"]["50B"] == curve.loss[-1]
    assert paper.losses["mars-adamw"]["best"] == curve.loss.min()


def test_differences(tmp_path: Path) -> None:
    group = paper_run(tmp_path / "a")
    (row,) = published.against([group], published.load("small"))
    assert row.published == {"5B": 3.193, "20B": 3.024, "50B": 2.885, "best": 2.885}
    assert row.ours == {"5B": 3.2, "20B": 3.0, "50B": 2.9, "best": 2.89}
    assert row.difference == pytest.approx({"5B": 0.007, "20B": -0.024, "50B": 0.015, "best": 0.005})
    words = [line.split() for line in published.lines([group], published.load("small"))]
    assert ["a", "published", "3.193", "3.024", "2.885", "2.885"] in words
    assert ["here", "3.200", "3.000", "2.900", "2.890"] in words
    assert ["difference", "+0.007", "-0.024", "+0.015", "+0.005"] in words


def test_what_is_not_reached_or_published_has_no_difference(tmp_path: Path) -> None:
    going = paper_run(tmp_path / "a", last=40_000)
    exact = paper_run(tmp_path / "b", "mars-adamw", learning_rate=6e-3, exact=True)
    unknown = paper_run(tmp_path / "c", "shampoo")
    rows = published.against([going, exact, unknown], published.load("gpt2-small"))
    assert [(row.name, row.optimizer) for row in rows] == [("a", "adamw"), ("b", "mars-adamw-exact")]
    assert set(rows[0].difference) == {
        "5B",
        "20B",
    }  # the lowest loss of an unfinished run is not set against a whole one
    assert rows[1].published["50B"] == 2.847
    text = "\n".join(published.lines([unknown], published.load("large")))
    assert "none of these optimizers has a published value; known are" in text


def test_warnings(tmp_path: Path) -> None:
    text = "\n".join(published.lines([paper_run(tmp_path / "a")], published.load("small")))
    assert "lowest of about 100 evaluations on 200 random batches" in text
    assert ".006 to .010" in text
    assert "older recipe" in text
    assert "not the published recipe" not in text
    other = paper_run(tmp_path / "b", learning_rate=4e-3, parameters=124_000_000)
    text = "\n".join(published.lines([other], published.load("small")))
    assert (
        "warning: not the published recipe: b: parameters 124,000,000 (124,373,760), learning rate 4e-3 (6e-4)." in text
    )
    assert "read off plots" in "\n".join(published.lines([other], published.load("xl-fineweb")))


def departures(group: Group, size: str = "small") -> list[str]:
    return [line for line in published.lines([group], published.load(size)) if "not the published recipe" in line]


@pytest.mark.parametrize(
    ("optimizer", "config", "told"),
    [
        ("adamw", {"weight_decay": 0.03, "grad_clip": 0.5}, "weight_decay 3e-2 (1e-1), grad_clip 5e-1 (1)"),
        ("adamw", {"beta1": 0.95, "betas_1d": None, "lr_1d": None}, "a: beta1 9.5e-1 (9e-1)."),
        ("adamw", {"warmup_iters": 10, "dropout": 0.1}, "dropout 1e-1 (0), warmup_iters 10 (2,000)"),
        ("mars-adamw", {"gamma": 0.0}, "gamma 0 (2.5e-2)"),
        ("mars-adamw", {"lr_1d": None}, "lr_1d 6e-3 (3e-3)"),
    ],
)
def test_every_setting_of_the_recipe_counts(tmp_path: Path, optimizer: str, config: dict, told: str) -> None:
    (line,) = departures(paper_run(tmp_path / "a", optimizer, **config))
    assert told in line


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "mars"])
@pytest.mark.parametrize("ending", ["", "_official"])
def test_a_run_of_a_preset_departs_from_nothing(tmp_path: Path, optimizer: str, ending: str) -> None:
    path = ROOT / "configs" / f"gpt2_small_{optimizer}{ending}.py"
    if not path.exists():  # the published code's Muon has no preset
        path = ROOT / "configs" / "gpt2_small_muon.py"
    values = asdict(load_config(path))
    values.pop("optimizer")
    group = paper_run(tmp_path / "a", optimizer.replace("mars", "mars-adamw"), **values)
    assert departures(group) == []
    values |= {"max_iters": 99_999}
    (line,) = departures(paper_run(tmp_path / "b", optimizer.replace("mars", "mars-adamw"), **values))
    assert "planned updates 99,999" in line
    assert departures(paper_run(tmp_path / "c", "shampoo", **values)) == []  # nothing is published of it


def test_keys_that_an_optimizer_does_not_read_do_not_count(tmp_path: Path) -> None:
    assert departures(paper_run(tmp_path / "a", gamma=0.0, shampoo_interval=3, dtype="float32", batch_size=2)) == []


@pytest.mark.parametrize(
    ("size", "data", "told"),
    [
        ("small", {"val_tokens": 4_434_898}, "4,434,898 validation tokens (4,434,897)"),
        ("small", {"tokenizer": "bytes"}, "tokenizer bytes (gpt2)"),
        ("small-fineweb", {}, "data set openwebtext (fineweb_edu)"),
        ("small-fineweb", {"tokenizer": "bytes", "name": "fineweb_edu"}, "tokenizer bytes (gpt2)"),
        ("small-fineweb", {"name": "fineweb_edu"}, None),
        ("small", {"tokenizer": None}, None),
    ],
)
def test_other_data_have_no_difference(tmp_path: Path, size: str, data: dict, told: str | None) -> None:
    dataset = data.pop("name", "openwebtext")
    group = paper_run(tmp_path / "a", dataset=dataset, data=OWT | data)
    (row,) = published.against([group], published.load(size))
    assert row.published
    assert row.ours["50B"] == 2.9
    text = published.lines([group], published.load(size))
    if told is None:
        assert set(row.difference) == set(row.published)
        assert not any("other data" in line for line in text)
    else:
        assert row.difference == {}
        assert f"warning: no difference for a: other data: {told}." in text


def test_figure_with_published_curves(tmp_path: Path) -> None:
    groups = [paper_run(tmp_path / "a"), paper_run(tmp_path / "m", "mars-adamw", learning_rate=6e-3)]
    drawn = figure.draw(groups, paper=published.load("small"))
    labels = [text.get_text() for text in drawn.legends[0].get_texts()]
    assert labels == [
        *("adamw", "mars-adamw", "AdamW, published", "Muon, published"),
        *("MARS-AdamW, published (older recipe)", "MARS-AdamW, published table"),
    ]
    lines = {line.get_label(): line for line in drawn.axes[0].get_lines()}
    table = lines["MARS-AdamW, published table"]
    assert table.get_xydata().tolist() == [[4.9152e9, 3.108], [1.96608e10, 2.981], [4.9152e10, 2.849]]
    dashed = [lines[label] for label in labels if label.endswith(("published", "recipe)"))]
    assert len({line.get_color() for line in dashed}) == 3
    assert {line.get_linestyle() for line in dashed} == {"--"}
    assert all(line.get_linewidth() < 1.5 for line in dashed)
    assert all(len({line.get_color()[i : i + 2] for i in (1, 3, 5)}) == 1 for line in dashed)  # grey


def test_published_values_that_are_not_drawn_are_not_in_the_legend(tmp_path: Path) -> None:
    groups = [paper_run(tmp_path / "a", last=0), paper_run(tmp_path / "m", "mars-adamw", last=10_000)]
    small = published.load("small")
    labels = [text.get_text() for text in figure.draw(groups[:1], paper=small).legends[0].get_texts()]
    assert labels == ["adamw (at update 0)"]
    labels = [text.get_text() for text in figure.draw(groups, paper=small).legends[0].get_texts()]
    assert "AdamW, published" in labels
    # Runs far below: the published values lie above the axis.
    low = write_run(
        tmp_path / "low", [(0, 11.0), (10_000, 1.0), (100_000, 0.9)], train_rows=0, tokens_per_update=491_520
    )
    drawn = figure.draw([make_groups([read_run(low)])[0]], paper=small)
    top = drawn.axes[0].get_ylim()[1]
    for line in drawn.axes[0].get_lines():
        if "published" in str(line.get_label()):
            assert line.get_label().endswith("(above the axis)") == (min(line.get_ydata()) > top)


def test_a_young_run_is_not_squeezed_by_the_whole_curve(tmp_path: Path) -> None:
    drawn = figure.draw([paper_run(tmp_path / "a", last=10_000)], paper=published.load("small"))
    assert drawn.axes[0].get_xlim()[1] == pytest.approx(1.02 * 4.9152e9)


def test_an_unknown_size_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", [(0, 5.0)])
    assert compare.main([str(run), "--paper", "gpt3"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --paper gpt3 is not known; known are gpt2-small, ")
    assert err.count("\n") == 1
