"""Losses and norms that are read later than they are computed, as on CUDA: the run is the same."""

import math

import pytest
import torch

import train
from tests.conftest import Outcome, Train
from tests.training.background import broken, weights
from tests.training.faulty import fault
from training.outcomes import MOST, Outcomes, defers
from training.processes import Processes

ALONE = Processes(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
FORMS = [("--optimizer=adamw",), ("--optimizer=mars-adamw",), ("--optimizer=mars-adamw", "--exact=true")]
SHORT = ("--max_iters=20", "--log_interval=5", "--eval_interval=8", "--checkpoint_interval=10", "--keep_checkpoints=99")


class Noted:
    """What an `Outcomes` tells, and when."""

    def __init__(self, deferred: bool = True) -> None:
        self.rows: list[tuple[int, float, float]] = []
        self.outcomes = Outcomes(ALONE, self.note, deferred)

    def note(self, update: int, loss: float, grad_norm: float) -> bool:
        self.rows.append((update, loss, grad_norm))
        return math.isfinite(loss + grad_norm)

    def add(self, update: int, loss: float = 2.0, read: bool = False) -> bool | torch.Tensor:
        return self.outcomes.add(update, torch.tensor(loss), torch.tensor(float(update)), read)


def test_nothing_waits_where_it_is_not_deferred() -> None:
    noted = Noted(deferred=False)
    assert [noted.add(1), noted.add(2, math.inf), noted.add(3)] == [True, False, True]
    assert noted.rows == [(1, 2.0, 1.0), (2, math.inf, 2.0), (3, 2.0, 3.0)]


def test_what_waits_is_read_in_order_where_one_is_wanted() -> None:
    noted = Noted()
    assert noted.add(1) is True, "nothing is known of the state before the first update"
    waiting = [noted.add(2), noted.add(3, math.nan), noted.add(4, 2.5)]
    assert all(isinstance(allowed, torch.Tensor) for allowed in waiting)
    assert [bool(allowed) for allowed in waiting] == [True, False, True]
    assert [update for update, *_ in noted.rows] == [1]
    assert noted.add(5, 3.0, read=True) is True
    assert [update for update, *_ in noted.rows] == [1, 2, 3, 4, 5]
    assert math.isnan(noted.rows[2][1])
    assert noted.outcomes.last == noted.rows[-1][1:] == (3.0, 5.0)
    assert isinstance(noted.add(6), torch.Tensor)


def test_after_an_update_that_was_not_made_each_is_looked_at() -> None:
    noted = Noted()
    assert [noted.add(update, math.nan) for update in (1, 2)] == [False, False]
    assert noted.add(3) is True
    assert isinstance(noted.add(4, math.nan), torch.Tensor), "not known yet"
    assert noted.add(5, math.nan, read=True) is False
    assert noted.add(6, math.nan) is False


def test_only_so_many_wait() -> None:
    noted = Noted()
    for update in range(1, 3 * MOST):
        noted.add(update)
    assert len(noted.rows) == 1 + 2 * MOST


def test_cuda_defers_and_a_scaler_does_not() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert [defers(cpu, "float32"), defers(cuda, "bfloat16"), defers(cuda, "float16")] == [False, True, False]


@pytest.fixture
def deferred(run_train: Train, monkeypatch: pytest.MonkeyPatch) -> Train:
    """train.py that defers as on CUDA."""
    monkeypatch.setattr(train, "defers", lambda *_: True)
    return run_train


def figures(outcome: Outcome) -> list[dict[str, object]]:
    """The rows without what comes from a clock."""
    return [
        {k: v for k, v in row.items() if k not in ("time", "tokens_per_sec", "eval_seconds")} for row in outcome.rows
    ]


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_a_run_is_the_same(run_train: Train, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]) -> None:
    at_once = run_train(*form, *SHORT, out="at once")
    monkeypatch.setattr(train, "defers", lambda *_: True)
    later = run_train(*form, *SHORT, out="later")
    assert later.status == 0, later.stderr
    assert figures(later) == figures(at_once)
    for update in (10, 20):
        for name, weight in weights(at_once.folder, update).items():
            assert torch.equal(weights(later.folder, update)[name], weight), name


@pytest.mark.parametrize("kind", ["nan-loss", "inf-gradient"])
@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_updates_that_are_not_finite_are_skipped_and_counted(
    run_train: Train, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...], kind: str
) -> None:
    with fault(kind, {4, 5, 12}):
        at_once = run_train(*form, *SHORT, "--max_bad_updates=0", out="at once")
        monkeypatch.setattr(train, "defers", lambda *_: True)
        later = run_train(*form, *SHORT, "--max_bad_updates=0", out="later")
    assert later.status == 0
    reasons = [[line.rpartition("; ")[2] for line in done.stderr.splitlines()] for done in (later, at_once)]
    assert reasons[0] == reasons[1] == [f"skipped ({k} in a row, {n} in all)" for k, n in ((1, 1), (2, 2), (1, 3))]
    assert later.series("skipped_updates") == at_once.series("skipped_updates") == [2, 2, 3, 3]
    assert later.series("clip_rate") == at_once.series("clip_rate")
    if form == FORMS[0]:
        assert figures(later) == figures(at_once)
    for key in ("train/loss", "val/loss"):  # MARS counts a step that it did not make
        pairs = zip(later.series(key), at_once.series(key), strict=True)
        assert all(a == b if a is None else a == pytest.approx(b, abs=0.1) for a, b in pairs)


def test_a_run_that_has_gone_bad_ends_where_it_is_read(deferred: Train) -> None:
    with fault("nan-loss", range(7, 99)):
        done = deferred("--max_iters=40", "--log_interval=10", "--eval_interval=0", "--checkpoint_interval=5")
    assert done.status == 2
    lines = done.stderr.splitlines()
    assert [line.split(":")[1] for line in lines[:-1]] == [f" update {k}" for k in range(7, 12)]
    assert lines[-1].startswith("error: loss or gradient norm was not finite in 5 updates in a row, up to update 11")
    assert sorted(path.name for path in (done.folder / "checkpoints").iterdir()) == ["iter-00000005.pt"]


def test_a_resume_is_exact(deferred: Train) -> None:
    settings = ("--optimizer=mars-adamw", "--log_interval=4", "--eval_interval=0", "--lr_decay_iters=20")
    straight = deferred(*settings, "--max_iters=20", out="straight")
    deferred(*settings, "--max_iters=7")
    on = deferred(*settings, "--max_iters=20", "--resume=auto")
    assert on.series("val/loss")[-1] == straight.series("val/loss")[-1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nan-loss", "inf-gradient"])
@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_processes_skip_alike_what_is_not_finite_on_one(run_train: Train, form: tuple[str, ...], kind: str) -> None:
    """Only then do their weights stay equal, and the losses of the rest are those of one process."""
    done = broken(run_train, f"{kind},7,1", "--deferred", *form, *SHORT, "--shard_optimizer=true")
    assert done.status == 0, done.stderr
    assert [line[:17] for line in done.stderr.splitlines() if "warning: " in line] == ["warning: update 7"]
    with fault(kind, {7}):
        alone = run_train(*form, *SHORT, out="alone")
    assert done.series("skipped_updates") == alone.series("skipped_updates") == [1, 1, 1]
    assert done.series("val/loss") == pytest.approx(alone.series("val/loss"), abs=0.1)
