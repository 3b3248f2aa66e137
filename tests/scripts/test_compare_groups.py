"""Several seeds of one setting: which runs belong together, their mean and spread, paired differences, speed-ups."""

import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from configs import TrainConfig
from scripts.comparison import figure, groups, milestones, report, statistics, table, wording
from scripts.comparison.groups import Group, difference, make_groups
from scripts.comparison.runs import Run, read_run
from tests.scripts.written_runs import write_run

Evals = list[tuple[int, float]]


def seeds(folder: Path, optimizer: str, ends: list[float], first: int = 1, **config: object) -> Group:
    """Runs of seeds 1, 2, … that are at 3.0 after 10 updates and at these losses after 20."""
    runs = [
        read_run(write_run(folder / f"{optimizer}-{i}", [(0, 5.0), (10, 3.0), (20, end)], optimizer, seed=i, **config))
        for i, end in enumerate(ends, first)
    ]
    (group,) = make_groups(runs)
    return group


# --- statistics ---


def test_spread() -> None:
    # Deviations -1, 0, 1: the sum of squares is 2, over n - 1 = 2.
    assert statistics.spread([1.0, 2.0, 3.0]) == statistics.Spread(2.0, 1.0, 3)
    assert statistics.spread([2.0]) == statistics.Spread(2.0, None, 1)
    assert statistics.spread([]) is None
    assert statistics.spread([1.0, None]) is None


def test_paired_difference() -> None:
    # Differences 1, 2, 3: mean 2, sd 1; half the interval is 4.303 / sqrt(3) = 2.4843.
    result = statistics.paired_difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert result is not None
    assert (result.mean, result.sd, result.n) == (2.0, 1.0, 3)
    assert (result.low, result.high) == pytest.approx((-0.4843, 4.4843), abs=1e-4)
    assert not result.more_than_chance
    clear = statistics.paired_difference([2.0, 2.1], [1.0, 1.11])
    assert clear is not None
    assert clear.more_than_chance
    assert statistics.paired_difference([1.0], [2.0]) is None
    assert statistics.paired_difference([1.0, math.nan], [2.0, 3.0]) is None


def test_the_quantiles_are_students() -> None:
    """Against the distribution itself: its density, integrated to the quantile, is 0.475 on either side."""
    for df, quantile in enumerate(statistics.T_QUANTILES, 1):
        x = np.linspace(0, quantile, 20_001)
        norm = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
        density = norm * (1 + x**2 / df) ** (-(df + 1) / 2)
        area = float(np.sum((density[1:] + density[:-1]) / 2 * np.diff(x)))
        assert area == pytest.approx(0.475, abs=4e-5)


def test_many_pairs_take_the_last_quantile() -> None:
    values = [0.0, 1.0] * 50
    result = statistics.paired_difference(values, [0.0] * 100)
    assert result is not None
    assert result.high - result.mean == pytest.approx(2.042 * np.std(values, ddof=1) / 10)


# --- which runs belong together ---


def test_neutral_keys_are_keys_of_a_config() -> None:
    assert {field.name for field in fields(TrainConfig)} > groups.NEUTRAL_KEYS
    assert "seed" not in groups.SETTING_KEYS
    assert {"n_layer", "eps", "dtype", "max_iters", "weight_decay_embedding"} < set(groups.SETTING_KEYS)


@pytest.mark.parametrize(
    "config",
    [
        *({"learning_rate": 0.004}, {"max_iters": 21}, {"eps": 1e-6}, {"gamma": 0.0}, {"n_layer": 3}, {"lr_1d": 0.001}),
        *({"dtype": "bfloat16"}, {"betas_1d": [0.9, 0.99]}, {"optimizer": "nadamw"}, {"tokens_per_update": 1001}),
        *({"data": {"val_tokens": 801}}, {"data": {"train_tokens": 9001}}, {"exact": True}, {"parameters": 830_001}),
    ],
)
def test_other_settings_are_other_groups(tmp_path: Path, config: dict) -> None:
    a = read_run(write_run(tmp_path / "a", [(0, 5.0), (20, 2.0)], seed=1))
    b = read_run(write_run(tmp_path / "b", [(0, 5.0), (20, 2.0)], **{"seed": 2} | config))
    assert [len(group.runs) for group in make_groups([a, b])] == [1, 1]


@pytest.mark.parametrize(
    "config",
    [
        *(
            {"out_dir": "x"},
            {"host": "y"},
            {"device_name": "gpu"},
            {"processes": 8},
            {"batch_size": 3},
            {"compile": True},
        ),
        *({"wandb_run_name": "z"}, {"dataset": "/elsewhere/tiny"}, {"command": "train.py"}, {"eval_interval": 7}),
        # What stands for itself, and what an older config lacks.
        *({"lr_decay_iters": 20}, {"weight_decay_embedding": 0.1, "weight_decay": 0.1}, {"lr_1d": 0.003}),
        *({"betas_1d": [0.9, 0.95]}, {"mars_last_grad": "full"}),
    ],
)
def test_paths_names_and_machines_are_no_settings(tmp_path: Path, config: dict) -> None:
    a = read_run(write_run(tmp_path / "a", [(0, 5.0), (20, 2.0)], seed=1))
    b = read_run(write_run(tmp_path / "b", [(0, 5.0), (20, 2.0)], seed=2, **config))
    assert [len(group.runs) for group in make_groups([a, b])] == [2]


def test_a_second_run_of_a_seed_stays_alone(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / n, [(0, 5.0), (20, 2.0)], seed=s)) for n, s in (("a", 1), ("b", 1), ("c", 2))]
    assert [[run.folder.name for run in group.runs] for group in make_groups(runs)] == [["a", "c"], ["b"]]


def test_a_second_run_of_a_seed_takes_no_name_and_no_caution(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / n, [(0, 5.0), (20, 2.0)], seed=s)) for n, s in (("a", 1), ("b", 1), ("c", 2))]
    muon = read_run(write_run(tmp_path / "m", [(0, 5.0), (20, 1.9)], "muon"))
    together = make_groups([*runs, muon])
    assert wording.names(together).rows == ["adamw (2 seeds)", "b", "m"]
    assert "b: not in the mean of its setting's seeds, nor in a paired difference: seed 1 is in it already." in (
        report.notes(together)
    )
    assert "One seed only of b, m: differences of a few hundredths can be noise." in report.sentences(together)


def test_a_seed_that_ended_early_does_not_spoil_the_mean(tmp_path: Path) -> None:
    whole = seeds(tmp_path, "adamw", [2.0, 2.2])
    killed = read_run(write_run(tmp_path / "k", [(0, 5.0), (10, 4.0)], seed=3, max_iters=20))
    group, apart = make_groups([*whole.runs, killed])
    assert group.runs == whole.runs
    assert group.best is not None
    assert group.best.mean == pytest.approx(2.1)
    assert apart.runs == (killed,)
    told = "k: not in the mean of its setting's seeds, nor in a paired difference: it has 10 of 20 updates."
    assert told in report.notes([group, apart])
    assert difference(group, seeds(tmp_path, "muon", [1.9, 2.0])) is not None


def test_seeds_that_are_all_going_are_averaged_unless_one_is_far_behind(tmp_path: Path) -> None:
    def going(name: str, *updates: int) -> Run:
        evals = [(0, 5.0), *((k, 4.0 - k / 10) for k in updates)]
        return read_run(write_run(tmp_path / name, evals, seed=int(name), max_iters=100))

    runs = [going("1", 10, 20), going("2", 10), going("3", 9)]
    assert [[run.folder.name for run in group.runs] for group in make_groups(runs)] == [["1", "2"], ["3"]]
    (group,) = make_groups(runs[:2])
    # Both are at 3.0 after 10 updates: the 2.0 that only one has is not their best.
    assert (group.best, group.final) == (statistics.Spread(3.0, 0.0, 2), statistics.Spread(3.0, 0.0, 2))
    assert (
        "3: not in the mean of its setting's seeds, nor in a paired difference: its evaluations do not go as far."
        in (report.notes(make_groups(runs)))
    )


# --- mean and spread ---


def test_a_group_is_the_mean_of_its_runs(tmp_path: Path) -> None:
    group = seeds(tmp_path, "adamw", [2.0, 2.2, 2.4])
    assert group.seeds == [1, 2, 3]
    assert group.evals.loss == pytest.approx([5.0, 3.0, 2.2])
    low, high = group.band
    assert low.tolist() == [5.0, 3.0, 2.0]
    assert high.tolist() == [5.0, 3.0, 2.4]
    assert group.final is not None
    assert (group.final.mean, group.final.sd, group.final.n) == pytest.approx((2.2, 0.2, 3))
    halfway = group.loss_at(15_000)
    assert halfway is not None
    assert (halfway.mean, halfway.sd) == pytest.approx((2.6, 0.1))


def test_unequal_lengths_and_gaps(tmp_path: Path) -> None:
    evals: list[Evals] = [[(0, 5.0), (10, 3.0), (20, 2.0)], [(0, 5.0), (5, 4.0), (10, 2.0)], [(0, 5.0), (10, math.nan)]]
    runs = [
        read_run(write_run(tmp_path / str(i), points, seed=i, max_iters=30, train_rows=0))
        for i, points in enumerate(evals)
    ]
    (group,) = make_groups(runs[:2])
    assert not group.finished
    assert group.evals.updates.tolist() == [0, 10]
    assert group.final is not None
    assert group.final.mean == 2.5
    assert group.tokens == 10_000
    (diverged,) = make_groups(runs)
    assert diverged.final is not None
    assert math.isnan(diverged.final.mean)
    assert wording.names([diverged]).legend == ["adamw, 3 seeds (at update 10)"]
    assert figure.draw([diverged]).axes
    assert "nan" not in "\n".join(report.sentences([diverged, seeds(tmp_path, "muon", [2.0, 2.1])]))


def test_table_of_seeds(tmp_path: Path) -> None:
    runs = [*seeds(tmp_path, "adamw", [2.0, 2.2]).runs, *seeds(tmp_path, "muon", [1.9], max_iters=30).runs]
    words = [" ".join(line.split()) for line in table.table(make_groups(runs))[3:]]
    # sd of 2.0 and 2.2: 0.1 times the root of 2.
    assert words[0].startswith("adamw (2 seeds) adamw 3e-3 0.83M 20.0K 2.100±.141 2.100±.141 1.515 1.515")
    assert words[1].startswith("adamw-1 adamw 3e-3 0.83M 20.0K 2.000 2.000")
    assert words[2].startswith("adamw-2 adamw 3e-3 0.83M 20.0K 2.200 2.200")
    assert words[3].startswith("muon-1 * muon 3e-3 0.83M 20.0K 1.900 1.900")
    notes = "\n".join(report.notes(make_groups(runs)))
    assert "* muon-1: stopped or still going at update 20 of 30" in notes
    assert "Several seeds: mean ± sample standard deviation" in notes


def test_settings_name_groups_of_one_optimizer(tmp_path: Path) -> None:
    a = seeds(tmp_path / "a", "adamw", [2.0, 2.1])
    b = seeds(tmp_path / "b", "adamw", [2.2, 2.3], learning_rate=0.006)
    c = seeds(tmp_path / "c", "adamw", [2.2, 2.3], learning_rate=0.006, grad_clip=0.5)
    assert wording.names([a, b]).rows == ["adamw, lr 3e-3 (2 seeds)", "adamw, lr 6e-3 (2 seeds)"]
    called = wording.names([a, b, c])
    assert len(set(called.rows)) == len(set(called.sentences)) == len(set(called.legend)) == 3
    assert called.sentences[2] == "adamw, lr 6e-3, grad_clip 5e-1"
    other_data = seeds(tmp_path / "d", "adamw", [2.0, 2.1], data={"val_tokens": 801})
    assert wording.names([a, other_data]).rows == [
        *("adamw, a/adamw-1 and others (2 seeds)", "adamw, d/adamw-1 and others (2 seeds)"),
    ]


# --- differences ---


def test_paired_sentence(tmp_path: Path) -> None:
    # Differences -0.1, -0.2, -0.3: mean -0.2, sd 0.1, half the interval 4.303 * 0.1 / sqrt(3) = 0.2484.
    a, b = seeds(tmp_path, "adamw", [2.0, 2.2, 2.4]), seeds(tmp_path, "muon", [1.9, 2.0, 2.1])
    assert report.sentences([a, b])[-1] == (
        "muon minus adamw after 20.0K tokens, paired over 3 seeds: -0.2000 (sd 0.1000);"
        " 95 % t-interval -0.4484 to +0.0484: 0 lies within it, so it may be chance."
    )
    assert "One seed" not in "\n".join(report.sentences([a, b]))
    c = seeds(tmp_path, "lion", [1.90, 2.11, 2.30])
    assert report.sentences([a, c])[-1].endswith("more than chance between seeds.")


def test_differences_pair_equal_seeds_only(tmp_path: Path) -> None:
    a, b = seeds(tmp_path, "adamw", [2.0, 2.2, 2.4]), seeds(tmp_path, "muon", [2.1, 2.5, 9.0], first=2)
    found = difference(a, b)
    assert found is not None
    result, paired, tokens = found
    assert paired == [2, 3]
    assert tokens == 20_000
    assert result.mean == pytest.approx((2.2 - 2.1 + 2.4 - 2.5) / 2)
    found = difference(a, seeds(tmp_path, "nadamw", [9.0, 2.1, 2.5], first=0))
    assert found is not None
    assert found[1] == [1, 2]
    assert found[0].mean == pytest.approx((2.0 - 2.1 + 2.2 - 2.5) / 2)
    assert difference(a, seeds(tmp_path, "lion", [2.0, 2.0], first=3)) is None
    assert difference(a, seeds(tmp_path, "sgd", [2.0, 2.0], data={"val_tokens": 801})) is None


def test_differences_are_taken_where_all_have_an_evaluation(tmp_path: Path) -> None:
    a = seeds(tmp_path, "adamw", [2.0, 2.2])
    going = [
        read_run(write_run(tmp_path / f"m{i}", [(0, 5.0), (10, 2.9 - i / 10)], "muon", seed=i, max_iters=20))
        for i in (1, 2)
    ]
    found = difference(*[make_groups(list(runs))[0] for runs in (a.runs, going)])
    assert found is not None
    assert found[2] == 10_000
    assert found[0].mean == pytest.approx((3.0 - 2.8 + 3.0 - 2.7) / 2)


# --- milestones and races ---


def test_milestones_appear_where_they_are_reached(tmp_path: Path) -> None:
    short = write_run(tmp_path / "a", [(0, 9.0), (9_000, 3.2), (11_000, 3.0)], train_rows=0, tokens_per_update=491_520)
    long = write_run(tmp_path / "b", [(0, 9.0), (40_000, 2.9), (100_000, 2.8)], train_rows=0, tokens_per_update=491_520)
    one = make_groups([read_run(short)])
    assert list(milestones.reached(one)) == ["5B"]
    assert " ".join(table.table(one)[1].split()).startswith("run optimizer rate params tokens 5B final best")
    both = make_groups([read_run(short), read_run(long)])
    heads, cells = table.cells(both)
    assert heads[5] == ("validation loss at", ["5B", "20B", "50B"])
    # 10,000 updates lie halfway between 9,000 and 11,000, and a quarter of the way to 40,000.
    assert cells[0][5:8] == ["3.100", "-", "-"]
    assert cells[1][5:8] == ["7.475", "2.900", "2.800"]
    assert "20B is 19.66B (40,000)" in "\n".join(report.notes(both))


def test_races_to_a_given_loss(tmp_path: Path) -> None:
    adamw = make_groups([read_run(write_run(tmp_path / "a", [(0, 5.0), (20, 3.0), (40, 2.0)]))])[0]
    mars = make_groups([read_run(write_run(tmp_path / "m", [(0, 5.0), (20, 2.5), (40, 2.1)], "muon", seconds=1.0))])[0]
    # To 2.5: adamw 30,000 tokens, muon 20,000; half the speed makes it slower in time.
    result = milestones.race(mars, adamw, 2.5)
    assert (result.tokens, result.other_tokens) == (20_000, 30_000)
    assert result.speed_up == pytest.approx(1.5)
    assert result.time_speed_up == pytest.approx(1.5 * mars.throughput / adamw.throughput)
    assert milestones.race(adamw, mars, 2.5).speed_up == pytest.approx(1 / 1.5)
    unreached = milestones.race(mars, adamw, 2.05)
    assert unreached.tokens is None
    assert unreached.speed_up is None
    lines = report.losses_table([adamw, mars], [2.5, 2.05])
    words = [line.split() for line in lines]
    assert words[2][:2] == ["muon", "20.0K"]
    assert words[2][-2:] == ["1.50x", "0.76x"]
    assert words[5] == ["muon", "not", "reached", "(lowest", "2.100)"]


def test_races_against_the_first_that_was_evaluated(tmp_path: Path) -> None:
    none = write_run(tmp_path / "none", [], train_rows=3, max_iters=20)
    base = write_run(tmp_path / "base", [(0, 5.0), (20, 3.0)], "muon")
    other = write_run(tmp_path / "other", [(0, 5.0), (20, 2.0)], "lion", data={"val_tokens": 801})
    lines = report.losses_table(make_groups([read_run(run) for run in (none, base, other)]), [4.0])
    words = [" ".join(line.split()) for line in lines]
    assert words[1] == "adamw not evaluated"
    assert words[2].startswith("muon 10.0K")
    assert words[2].endswith("1.00x 1.00x")
    assert words[3] == "lion other validation data"
    assert words[4].endswith("against muon.")
    assert report.losses_table(make_groups([read_run(none)]), [4.0]) == [
        "no evaluation so far, so no tokens to a loss."
    ]


def test_times_of_different_machines_are_not_compared(tmp_path: Path) -> None:
    a = make_groups([read_run(write_run(tmp_path / "a", [(0, 5.0), (20, 2.0)]))])[0]
    b = make_groups([read_run(write_run(tmp_path / "b", [(0, 5.0), (20, 2.0)], "muon", device_name="gpu"))])[0]
    assert milestones.race(a, b, 3.0).time_speed_up is None
    assert milestones.race(a, b, 3.0).speed_up == 1.0
