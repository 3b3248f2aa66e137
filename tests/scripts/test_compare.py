"""scripts/compare.py: what is said of single runs."""

import math
from pathlib import Path

import pytest

from scripts.comparison import figure, report, table, wording
from scripts.comparison.groups import make_groups
from scripts.comparison.runs import Run, read_run
from tests.scripts.written_runs import write_run


@pytest.fixture
def pair(tmp_path: Path) -> list[Run]:
    """adamw ends at 2.0 after 20 updates; mars is there halfway between 10 (2.2) and 20 (1.8), and slower."""
    adamw = write_run(tmp_path / "a", [(0, 5.0), (10, 2.5), (20, 2.0)])
    mars = write_run(tmp_path / "m", [(0, 5.0), (10, 2.2), (20, 1.8)], "mars-adamw", seconds=0.6, learning_rate=0.006)
    return [read_run(adamw), read_run(mars)]


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
    lines = table.table(make_groups(pair))
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
    lines = table.table(make_groups(runs))
    assert len(lines) == 5
    assert lines[3].split()[3] == "-"
    assert max(map(len, lines)) <= table.TABLE_WIDTH
    assert lines[3] != lines[4]


def test_sentences_both_ways(pair: list[Run]) -> None:
    # mars is at 2.0 after 15 of its updates: 15,000 of 20,000 tokens, and 9 of adamw's 10 seconds (0.6 and 0.5 each).
    assert report.sentences(make_groups(pair)) == [
        "adamw does not reach mars-adamw's final loss (1.800) within its 20.0K tokens (it ends 0.200 above).",
        "mars-adamw reaches adamw's final loss (2.000) after 15.0K tokens, 75 % of adamw's 20.0K:"
        " 1.33x as fast (at the runs' median speeds, 90 % of its time: 1.11x).",
        "One seed each: differences of a few hundredths can be noise.",
    ]


def sentences_of(folder: Path, *runs: tuple[list[tuple[int, float]], dict]) -> str:
    return "\n".join(
        report.sentences(
            make_groups([read_run(write_run(folder / f"r{i}", evals, **kw)) for i, (evals, kw) in enumerate(runs)])
        )
    )


def test_a_tie_is_said_once(tmp_path: Path) -> None:
    text = sentences_of(tmp_path, ([(0, 5.0), (10, 2.0)], {}), ([(0, 5.0), (20, 2.0001)], {"optimizer": "muon"}))
    assert text.splitlines()[0] == "adamw and muon end level at 2.000, after 10.0K and 20.0K tokens."
    assert len(text.splitlines()) == 2


def test_a_loss_that_rises_again_is_told(tmp_path: Path) -> None:
    runs = ([(0, 5.0), (10, 2.0)], {}), ([(0, 5.0), (10, 1.0), (20, 3.0)], {"optimizer": "muon"})
    assert "muon reaches adamw's final loss (2.000) after 7.50K tokens, 75 % of adamw's 10.0K: 1.33x as fast" in (
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


def test_a_finite_loss_of_a_run_that_diverged_is_short(tmp_path: Path) -> None:
    runs = [
        *(([(0, 5.0), (10, 2.0)], {}), ([(0, 5.0), (10, 1e30)], {"optimizer": "muon"})),
        ([(0, 1.5), (10, math.inf)], {"optimizer": "lion"}),
    ]
    assert sentences_of(tmp_path, *runs).splitlines()[:2] == [
        "muon does not reach adamw's final loss (2.000) within its 10.0K tokens (it ends 1.0e+30 above).",
        "lion is at or below adamw's final loss (2.000) from the start, but it diverged: it ends at a loss that is not"
        " a number.",
    ]
    together = make_groups([read_run(tmp_path / f"r{i}") for i in range(3)])
    lines = table.table(together)
    assert "1.0e+30" in lines[4]
    assert max(map(len, lines)) <= table.TABLE_WIDTH
    assert "r1: diverged: the loss of its last evaluation is 1.0e+30." in report.notes(together)
    assert figure.draw(together).axes[0].get_ylim()[1] < 10


@pytest.mark.parametrize(
    ("data", "same"),
    [
        ({"dataset": "tiny", "fingerprint": "b"}, True),  # the same name, other training data
        ({"dataset": "other", "fingerprint": "a"}, True),  # the same data in another folder
        ({"dataset": "other", "fingerprint": "b"}, False),
        ({"dataset": "other", "fingerprint": None}, False),
        ({"dataset": "tiny", "fingerprint": "a", "tokenizer": "bytes"}, False),
    ],
)
def test_equally_many_tokens_are_not_equal_data(tmp_path: Path, data: dict, same: bool) -> None:
    a = read_run(write_run(tmp_path / "a", [(0, 5.0), (10, 2.0)], data={"fingerprint": "a"}))
    b = write_run(tmp_path / "b", [(0, 5.0), (10, 1.9)], "muon", dataset=data.pop("dataset"), data=data)
    together = make_groups([a, read_run(b)])
    assert bool(report.sentences(together)) == same
    assert any("equal validation data" in line for line in report.warnings(together)) != same


def test_the_same_data_in_two_folders_are_like_for_like(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / n, [(0, 5.0), (10, 2.0)], optimizer=n, dataset=f"data/{n}", data={"fingerprint": "f"})
        for n in ("adamw", "muon")
    ]
    assert report.warnings(make_groups([read_run(run) for run in runs])) == []


def test_unfinished_runs_and_runs_without_evaluations(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / "done", [(0, 5.0), (10, 2.0)])),
        read_run(write_run(tmp_path / "going", [(0, 5.0), (5, 2.5)], "muon", max_iters=10)),
        read_run(write_run(tmp_path / "start", [(0, 5.0)], "lion", max_iters=10)),
        read_run(write_run(tmp_path / "blind", [], "sgd", train_rows=3, max_iters=10)),
        read_run(write_run(tmp_path / "bare", [(0, 5.0), (10, 1.9)], "mars-lion", train_rows=0)),
    ]
    text = "\n".join(report.sentences(make_groups(runs)))
    assert "muon's latest loss (2.500)" in text
    assert (
        "muon does not reach adamw's final loss (2.000) within its 5.00K tokens so far (it now stands 0.500 above)"
        in text
    )
    assert "lion" not in text.replace("mars-lion", "")
    assert "sgd" not in text
    notes = "\n".join(report.notes(make_groups(runs)))
    assert "going: stopped or still going at update 5 of 10" in notes
    assert "start: only the evaluation before training" in notes
    assert "blind: no evaluation" in notes
    assert figure.draw(make_groups(runs)).axes


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
    assert report.warnings(make_groups(runs[:1] * 2)) == []
    alike, equal_data, speed = report.warnings(make_groups(runs))
    assert alike.startswith("warning: not like for like: different data sets: ")
    assert "different tokens an update: 1,000 (a, c), 1,001 (b)" in alike
    assert "different parameter counts: 830,000 (a, c), 830,001 (b)" in alike
    assert "different planned updates: 10 (a, b), 9 (c)" in alike
    assert "equal validation data" in equal_data
    assert "different devices: cpu (a, b), gpu (c)" in speed
    assert "lion" not in "\n".join(report.sentences(make_groups(runs)))
    assert "of its time" not in "\n".join(
        report.sentences(
            make_groups(
                [runs[0], read_run(write_run(tmp_path / "d", [(0, 5.0), (10, 1.9)], "muon", device_name="gpu"))]
            )
        )
    )


def test_equal_optimizers_stay_distinguishable(tmp_path: Path) -> None:
    runs = [
        read_run(
            write_run(tmp_path / x / "mars", [(0, 5.0), (10, 2.0 + i)], "mars-adamw", learning_rate=0.006, gamma=i)
        )
        for i, x in enumerate("ab")
    ]
    assert wording.names(make_groups(runs)).legend == ["mars-adamw, lr 6e-3 (a/mars)", "mars-adamw, lr 6e-3 (b/mars)"]
    text = "\n".join(report.sentences(make_groups(runs)))
    assert "a/mars reaches b/mars's final loss (3.000)" in text
    assert "One seed each" in text
