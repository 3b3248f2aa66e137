"""Updates whose loss or gradient is not finite: skipped by all processes alike, counted, and too many end the run."""

import math
from pathlib import Path

import pytest
import torch

import train
from tests.conftest import Train
from tests.training.background import broken, newest, weights
from tests.training.faulty import fault
from training.folder import read_status

EVERY = ("--checkpoint_interval=1", "--keep_checkpoints=99")
TO_4 = (*EVERY, "--lr_decay_iters=6", "--max_iters=4")  # after its last update a run saves also where that was skipped
TO_6 = (*EVERY, "--lr_decay_iters=6", "--max_iters=6", "--resume=auto")
FORMS = [("--optimizer=adamw",), ("--optimizer=mars-adamw",), ("--optimizer=mars-adamw", "--exact=true")]


def unchanged(folder: Path, before: int, after: int) -> bool:
    return all(torch.equal(weight, weights(folder, after)[name]) for name, weight in weights(folder, before).items())


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
@pytest.mark.parametrize("kind", ["nan-loss", "inf-gradient"])
def test_an_update_that_is_not_finite_is_skipped(run_train: Train, form: tuple[str, ...], kind: str) -> None:
    with fault(kind, {4}):
        done = run_train(*form, *TO_4)
    on = run_train(*form, *TO_6)
    assert (done.status, on.status, on.stderr) == (0, 0, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("warning: update 4: loss ")
    assert done.stderr.endswith("; skipped (1 in a row, 1 in all)\n")
    train = [row for row in done.rows if "train/loss" in row]
    assert [row.get("skipped_updates", 0) for row in train] == [0, 0, 0, 1, 1, 1]
    assert (train[3]["train/loss"] is None) == (kind == "nan-loss")
    assert (train[3]["grad_norm"] is None) == (kind == "inf-gradient")
    assert unchanged(done.folder, 3, 4)
    for before, after in ((2, 3), (4, 5), (5, 6)):
        assert not unchanged(done.folder, before, after)
    assert newest(done.folder) == 6
    assert all(math.isfinite(loss) for loss in done.series("val/loss"))


def test_torch_s_adamw_alone_would_not_survive_it(run_train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests around it test something."""
    from training.health import BadUpdates

    monkeypatch.setattr(BadUpdates, "note", lambda *_: True)
    with fault("inf-gradient", {4}):
        done = run_train("--optimizer=adamw", "--grad_clip=0", *EVERY)
    assert "wte.weight is not finite any more" in done.stderr
    assert newest(done.folder) == 3, "nor is such a checkpoint written"


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=" ".join)
@pytest.mark.parametrize("kind", ["nan-loss", "inf-gradient"])
def test_all_processes_skip_what_is_not_finite_on_one(run_train: Train, form: tuple[str, ...], kind: str) -> None:
    done = broken(run_train, f"{kind},4,1", *form, *TO_4, "--shard_optimizer=true")
    on = run_train.fresh(*form, *TO_6, "--shard_optimizer=true", processes=2)
    assert (done.status, on.status) == (0, 0), done.stderr + on.stderr
    assert [line[:17] for line in done.stderr.splitlines() if "warning: " in line] == ["warning: update 4"]
    assert unchanged(done.folder, 3, 4)
    # One process with the same fault: only if both skipped, and stay equal, is the rest alike.
    with fault(kind, {4}):
        run_train(*form, *TO_4, out="alone")
    alone = run_train(*form, *TO_6, out="alone")
    for key in ("train/loss", "val/loss", "grad_norm"):
        assert [x is None for x in done.series(key)] == [x is None for x in alone.series(key)]
        pairs = zip(done.series(key), alone.series(key), strict=True)
        assert all(a == pytest.approx(b, abs=1e-4) for a, b in pairs if a is not None)


@pytest.mark.parametrize(("limit", "end"), [(5, 5), (2, 2), (0, None)])
def test_too_many_in_a_row_end_the_run(run_train: Train, limit: int, end: int | None) -> None:
    with fault("nan-loss", range(4, 99)):
        done = run_train(f"--max_bad_updates={limit}", "--max_iters=20", "--checkpoint_interval=1")
    errors = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
    if end is None:
        assert (done.status, errors) == (0, [])
        assert done.series("skipped_updates")[-1] == 17
        return
    assert (done.status, len(errors)) == (2, 1), errors
    assert errors[0].startswith(f"error: loss or gradient norm was not finite in {end} updates in a row, up to update")
    assert read_status(done.folder)["state"] == "failed"
    assert newest(done.folder) < 4 + end
    # What spoilt the batches is mended.
    assert run_train("--max_iters=20", "--resume=auto").status == 0


@pytest.mark.parametrize("rate", ["1e30", "3.4e38"])
@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_weights_that_overflow_end_the_run_and_are_never_saved(
    run_train: Train, form: tuple[str, ...], rate: str
) -> None:
    """The first rate leads to weights that are finite and of no use, the other one to infinite ones."""
    run_train(*form, "--max_iters=3", *EVERY)
    good = run_train.folder("run") / "checkpoints/iter-00000003.pt"
    before = good.read_bytes()
    hot = (f"--learning_rate={rate}", f"--min_lr={rate}", "--warmup_iters=0", "--grad_clip=0")
    done = run_train(*form, *hot, "--max_iters=40", *EVERY, "--resume=auto")
    assert done.status == 2
    assert done.stderr.splitlines()[-1].startswith("error: loss or gradient norm was not finite in 5 updates in a row")
    assert ("is not finite any more" in done.stderr) == (rate == "3.4e38")
    assert good.read_bytes() == before
    for path in (done.folder / "checkpoints").iterdir():
        saved = torch.load(path, weights_only=True)["model"]
        assert all(torch.isfinite(weight).all() for weight in saved.values()), path.name


def test_the_last_good_checkpoint_outlives_bad_updates(run_train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Update 7 leads to weights that are finite and of no use; checkpoints of them must not displace others."""
    monkeypatch.setattr(train, "learning_rate_at", lambda update, *_: 1e30 if update >= 7 else 1e-3)
    done = run_train("--checkpoint_interval=1", "--keep_checkpoints=2", "--eval_interval=0", "--max_iters=40")
    assert done.status == 2
    good = done.folder / "checkpoints/iter-00000006.pt"
    assert good.exists(), sorted(path.name for path in good.parent.iterdir())
    assert max(weight.abs().max() for weight in weights(done.folder, 6).values()) < 10


@pytest.mark.parametrize("form", FORMS[1:], ids=" ".join)
def test_what_was_skipped_counts_on_after_a_resume(run_train: Train, form: tuple[str, ...]) -> None:
    """And the resume is exact, also right after a skipped update."""
    common = (*form, "--lr_decay_iters=12", "--eval_interval=0")
    with fault("nan-loss", {4, 5, 8}):
        straight = run_train(*common, "--max_iters=10", out="straight")
        run_train(*common, "--max_iters=4")
        limited = run_train(*common, "--max_iters=6", "--max_bad_updates=2", "--resume=auto")
        assert limited.status == 2, "two in a row, one of them before"
        parts = run_train(*common, "--max_iters=10", "--resume=auto")
    assert parts.status == 0, parts.stderr
    assert parts.stderr.endswith("(1 in a row, 3 in all)\n")
    assert parts.series("skipped_updates") == straight.series("skipped_updates") == [1, 2, 2, 2, 3, 3, 3]
    assert parts.series("train/loss") == straight.series("train/loss")
    assert all(
        torch.equal(weight, weights(parts.folder, 10)[name]) for name, weight in weights(straight.folder, 10).items()
    )


@pytest.mark.parametrize("power", [22, 40])
def test_a_scaler_that_looks_for_its_factor_is_not_a_fault(
    run_train: Train, monkeypatch: pytest.MonkeyPatch, power: int
) -> None:
    real = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *a, **k: real(*a, init_scale=2.0**power, **k))
    done = run_train("--max_iters=40", "--dtype=float16")
    assert done.status == 0, done.stderr
    skipped = done.series("grad_norm").count(None)
    assert skipped > (5 if power == 40 else 0), "the test needs overflows"
    assert done.stderr.count("the scaler's factor was too large") == done.stderr.count("\n") == skipped
    assert newest(done.folder) == 40


def test_a_loss_that_is_not_finite_counts_in_float16_too(run_train: Train) -> None:
    with fault("nan-loss", range(3, 99)):
        done = run_train("--max_iters=40", "--dtype=float16", "--checkpoint_interval=1")
    assert done.status == 2
    assert "in 5 updates in a row, up to update 7;" in done.stderr.splitlines()[-1]


def test_a_scaler_does_not_look_for_its_factor_for_ever(run_train: Train) -> None:
    """From 2**16 it halves it 16 times; gradients that are not finite with a factor of 1 have another reason."""
    with fault("inf-gradient", range(3, 99)):
        done = run_train("--max_iters=40", "--dtype=float16")
    assert done.status == 2
    assert f"in 5 updates in a row, up to update {2 + 16 + 5};" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_too_many_on_two_processes_end_both(run_train: Train) -> None:
    hot = ("--learning_rate=1e30", "--min_lr=1e30", "--warmup_iters=0", "--grad_clip=0")
    done = run_train(*hot, "--max_iters=40", processes=2)
    assert done.status != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: loss or gradient norm was not finite in 5 updates in a row")
    assert read_status(done.folder)["state"] == "failed"
