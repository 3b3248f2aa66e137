"""scripts/study.py: what can be declared, which runs are wanted, how they are made, and what is told of them."""

import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from scripts import study as program
from scripts.studying.cells import Cell, state_of
from scripts.studying.declaration import Study, load_study
from scripts.studying.plan import Plan
from scripts.studying.pool import Store
from tests.conftest import ENVIRONMENT, ROOT
from tests.scripts.written_runs import write_run

DECLARED = """
arms = {
    "a": dict(config="tiny.py", learning_rates=(1e-3, 2e-3, 4e-3)),
    "b": dict(config="tiny.py", around="a", optimizer="mars-adamw"),
}
baseline = "a"
seeds = (1, 2, 3)
scaled = {"min_lr": 0.1}
"""
Declare = Callable[..., Path]


@pytest.fixture
def declare(config: Path) -> Declare:
    """Writes a study beside the tiny config."""

    def write(text: str = DECLARED) -> Path:
        path = config.with_name("tried.py")
        path.write_text(text)
        return path

    return write


def make_all(study: Study, loss: Callable[[Cell], float]) -> tuple[Plan, list[Cell]]:
    """The plan when all that was wanted has been done, with the losses of a function."""
    done: dict[Cell, float] = {}
    while True:
        plan = Plan(study, done.get)
        new = [cell for cell in plan.cells if cell not in done]
        if not new:
            return plan, list(done)
        done |= {cell: loss(cell) for cell in new}


def valley(lowest: float) -> Callable[[Cell], float]:
    """Losses with their lowest at a learning rate."""
    return lambda cell: abs(math.log2(cell.learning_rate / lowest))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("1e-3, 2e-3, 4e-3", "1e-3, -2e-3", "arms['a']: learning_rates[1] = -0.002: "),
        ('baseline = "a"', 'baseline = "c"', "baseline = 'c': no arm is called so; arms are a, b"),
        ('around="a"', 'around="x"', "arms['b']: around = 'x': no arm is called so"),
        ("4e-3)", "4e-3), gama=0", "unknown key; did you mean gamma?"),
        ('optimizer="mars-adamw"', "seed=1", "arms['b']: seed = 1: the study sets this key itself"),
        ("learning_rates=(1e-3, 2e-3, 4e-3)", "", "arms['a']: expected either learning_rates or around"),
        ("seeds = (1, 2, 3)", "seeds = (1, 1)", "one is there twice"),
        ("seeds = (1, 2, 3)", "seeds =", "line 7: "),
        ("tiny.py", "gone.py", "gone.py: cannot read this config file"),
    ],
)
def test_a_mistake_is_one_line(
    declare: Declare, capsys: pytest.CaptureFixture[str], old: str, new: str, told: str
) -> None:
    path = declare(DECLARED.replace(old, new))
    assert program.main([str(path), "--dry-run", "--devices=cpu", f"--runs={path.parent / 'runs'}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert told in error


def test_the_best_learning_rate_is_run_with_all_seeds(declare: Declare) -> None:
    plan, cells = make_all(load_study(declare()), valley(2e-3))
    expected = {(arm, 2e-3, seed) for arm in "ab" for seed in (1, 2, 3)} | {("a", 1e-3, 1), ("a", 4e-3, 1)}
    assert {(cell.arm, cell.learning_rate, cell.seed) for cell in cells} == expected
    assert plan.complete
    assert plan.notes == []
    assert cells[0].config.min_lr == pytest.approx(1e-4)


def test_the_grid_goes_on_at_its_edge_up_to_a_limit(declare: Declare) -> None:
    study = load_study(declare())
    found = make_all(study, valley(1.6e-2))[0].tunings[None, "a"]
    assert (found.added, found.best, found.at_edge) == ((8e-3, 1.6e-2, 3.2e-2), 1.6e-2, False)
    plan, _ = make_all(study, lambda cell: cell.learning_rate)
    assert plan.tunings[None, "a"].added == (1.25e-4, 2.5e-4, 5e-4)
    assert plan.tunings[None, "a"].at_edge
    assert any("at the grid's edge, so the grid goes on: 1.25e-4, 2.5e-4, 5e-4" in line for line in plan.notes)


def test_a_larger_size_starts_from_the_best_of_the_first(declare: Declare) -> None:
    sizes = 'sizes = {"big": dict(n_layer=3, arms=("a",), factors=(0.5, 1.0), seeds=(1, 2))}\n'
    plan, cells = make_all(load_study(declare(DECLARED + sizes)), valley(2e-3))
    big = [cell for cell in cells if cell.size == "big"]
    assert {cell.learning_rate for cell in big} == {1e-3, 2e-3, 4e-3}  # 4e-3: 2e-3 was at the edge
    assert big[0].config.n_layer == 3
    assert big[0].name == "big-a-lr1e-3-seed1"
    assert plan.complete


def write_cell(store: Store, cell: Cell, losses: list[float], state: str = "finished") -> None:
    """A run as train.py would leave it, of 6 updates with two evaluations."""
    config = asdict(cell.config)
    optimizer = config.pop("optimizer")
    write_run(store.path(cell), list(zip((0, 3, 6), losses, strict=True)), optimizer=optimizer, **config)
    (store.path(cell) / "status.json").write_text(json.dumps({"state": state, "iter": 6}))


def test_the_report_is_what_a_plain_computation_says(declare: Declare, capsys: pytest.CaptureFixture[str]) -> None:
    path = declare()
    store = Store(load_study(path), path.parent / "runs")
    final = {("a", 1): 2.0, ("a", 2): 2.2, ("a", 3): 2.1, ("b", 1): 1.8, ("b", 2): 1.9, ("b", 3): 2.0}
    while wanted := [cell for cell in store.plan().cells if not store.state(cell).done]:
        for cell in wanted:
            write_cell(store, cell, [4.0, 3.0, final[cell.arm, cell.seed] + valley(2e-3)(cell)])
    assert program.main([str(path), "--report", f"--runs={store.folder}"]) == 0
    table = capsys.readouterr().out
    a, b = json.loads((store.folder / "outcome.json").read_text())["arms"]
    half = 4.303 * statistics.stdev([-0.2, -0.3, -0.1]) / math.sqrt(3)
    assert b["difference"]["mean"] == pytest.approx(-0.2)
    assert b["difference"]["low"] == pytest.approx(-0.2 - half)
    assert (a["final_loss"]["mean"], a["final_loss"]["sd"]) == pytest.approx((2.1, 0.1))
    assert (a["best_learning_rate"], a["excess_at_half"], a["excess_at_double"]) == (2e-3, 1.0, 1.0)
    # From 3.0 at 3000 tokens down to 1.9 at 6000: the line is at 2.1 after 0.9 / 1.1 of the way.
    assert b["tokens_to_loss_of_against"] == pytest.approx(3000 + 3000 * 0.9 / 1.1)
    assert f"{-0.2 - half:+.4f} to {-0.2 + half:+.4f}" in table
    assert {"tuning.png", "final.png"} <= {file.name for file in store.folder.iterdir()}

    thin = path.parent / "thin"
    assert program.main([str(path), f"--thin={thin}", f"--runs={store.folder}"]) == 0
    capsys.readouterr()
    assert program.main([str(path), "--report", f"--runs={thin}", f"--out={store.folder}"]) == 0
    assert capsys.readouterr().out.splitlines()[:5] == table.splitlines()[:5]


def test_a_report_of_nothing_is_an_empty_table(declare: Declare, capsys: pytest.CaptureFixture[str]) -> None:
    path = declare()
    assert program.main([str(path), "--report", f"--runs={path.parent / 'runs'}"]) == 0
    assert "0/3" in capsys.readouterr().out
    assert not json.loads((path.parent / "runs" / "outcome.json").read_text())["complete"]


def test_what_counts_as_done(declare: Declare) -> None:
    path = declare()
    study = load_study(path)
    store, cell = Store(study, path.parent / "runs"), Cell(study, None, "a", 1e-3, 1)
    write_cell(store, cell, [4.0, 3.0, 2.0], state="running")
    assert state_of(cell, store.path(cell)).kind == "begun"
    (store.path(cell) / "status.json").write_text('{"state": "finished"}')
    assert state_of(cell, store.path(cell)).loss == 2.0
    changed = load_study(declare(DECLARED.replace("seeds =", "beta1 = 0.8\nseeds =")))
    other = state_of(Cell(changed, None, "a", 1e-3, 1), store.path(cell))
    assert (other.kind, other.done) == ("other", False)
    assert "beta1=0.9, where the study says 0.8" in str(other.problem)
    reason = "loss or gradient norm was not finite in 5 updates in a row"
    (store.path(cell) / "status.json").write_text(json.dumps({"state": "failed", "reason": reason}))
    assert state_of(cell, store.path(cell)).loss == math.inf


SMALL = """
arms = {
    "a": dict(config="tiny.py", learning_rates=(1e-2,)),
    "broken": dict(config="tiny.py", learning_rates=(1e-2,), block_size=100_000),
}
baseline = "a"
seeds = (1, 2)
scaled = {"min_lr": 0.1}
max_iters = 300
sensitivity_seeds = 0
"""


def start(path: Path, *options: str, folder: str = "runs") -> subprocess.Popen[str]:
    command = ["scripts/study.py", str(path), f"--runs={path.parent / folder}", "--devices=cpu", *options]
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    )


def losses_of(folder: Path) -> dict[str, list[float]]:
    """Every loss of every run of arm a."""
    found = {}
    for file in sorted(folder.glob("a-*/metrics.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        found[file.parent.name] = [row.get("train/loss", row.get("val/loss")) for row in rows]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_midway_begun_again_and_two_at_once(declare: Declare, number: signal.Signals) -> None:
    """What was stopped midway and goes on in two processes at once ends where a straight study does, bit for bit. A run
    that fails is reported and does not stop the others."""
    path = declare(SMALL)
    first = start(path, "--workers=1")
    rows = path.parent / "runs" / "a-lr1e-2-seed1" / "metrics.jsonl"
    end = time.monotonic() + 100
    while not (rows.exists() and rows.read_text().count("\n") > 20):
        assert time.monotonic() < end
        time.sleep(0.05)
    first.send_signal(number)
    text = first.communicate(timeout=100)[0]
    if number == signal.SIGTERM:
        assert first.returncode == 75, text
        assert "stopped: a-lr1e-2-seed1" in text
    both = [start(path, "--workers=1") for _ in range(2)]
    texts = [each.communicate(timeout=200)[0] for each in both]
    assert 1 in [each.returncode for each in both], texts
    assert sum(text.count("finished: a-lr1e-2-seed2,") for text in texts) == 1
    text = next(text for text in texts if "failed: broken-lr1e-2-seed1: " in text)
    assert str(path.parent / "runs" / "broken-lr1e-2-seed1" / "log.txt") in text
    straight = start(path, "--workers=2", "--only=a-*", folder="straight")
    straight.communicate(timeout=200)
    assert straight.returncode == 0
    whole = losses_of(path.parent / "straight")
    assert len(whole) == 2
    assert losses_of(path.parent / "runs") == whole
