"""Runs that go on from a checkpoint: the bits that stay the same, what may be another, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from optim.build import BUILDERS
from tests.conftest import Outcome, Train
from training.folder import read_status

UPDATES, STOPS = 20, (7, 13, 20)  # 7 + 6 + 7 updates; stops are no multiples of the interval of evaluations
COMMON = ("--batch_size=2", f"--lr_decay_iters={UPDATES}", "--eval_interval=4")
EXACT = ("--exact=true", "--gamma=0.3")
SHARDED = "--shard_optimizer=true"
# The scaler's first factor is too large for this multiplier: updates are skipped while it is halved.
FLOAT16 = ("--dtype=float16", "--gradient_multiplier=20000")

CASES = {name: (f"--optimizer={name}",) for name in BUILDERS} | {
    f"{name} exact": (f"--optimizer={name}", *EXACT) for name in BUILDERS if name.startswith("mars-")
}
FAST = ("adamw, 1 of float32", "mars-adamw exact, 2 of bfloat16")


def case(name: str, processes: int, dtype: str, *more: str) -> Any:
    full = ", ".join([name, f"{processes} of {dtype}", *(["sharded"] if SHARDED in more else [])])
    settings = (*CASES[name], *(FLOAT16 if dtype == "float16" else (f"--dtype={dtype}",)), *more)
    return pytest.param(settings, processes, id=full, marks=[] if full in FAST else [pytest.mark.slow])


EXACT_RESUMES = [
    *(case(name, processes, dtype) for name in CASES for processes in (1, 2) for dtype in ("float32", "bfloat16")),
    *(case(name, 2, "bfloat16", SHARDED) for name in ("adamw", "mars-adamw", "mars-adamw exact", "shampoo")),
    *(case(name, processes, "float16") for name in ("adamw", "mars-adamw exact") for processes in (1, 2)),
]


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two nested states differ, in structure, type or a single bit."""
    if type(one) is not type(other):
        return [f"{place}: {type(one)}, {type(other)}"]
    if isinstance(one, Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return [f"{place}: {one.dtype} {one.shape}, {other.dtype} {other.shape}"]
        # As bytes a NaN, which stands for "unknown" in references, is equal to itself.
        first, second = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
        return [] if torch.equal(first, second) else [place]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{place}: {one.keys()}, {other.keys()}"]
        return [line for key in one for line in differences(one[key], other[key], f"{place}/{key}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{place}: {len(one)}, {len(other)} items"]
        pairs = enumerate(zip(one, other, strict=True))
        return [line for number, pair in pairs for line in differences(*pair, f"{place}/{number}")]
    return [] if one == other else [f"{place}: {one}, {other}"]


def checkpoint(folder: Path, update: int) -> dict[str, Any]:
    return torch.load(folder / f"checkpoints/iter-{update:08}.pt", weights_only=True)


def validation(outcome: Outcome) -> dict[int, float]:
    return {row["iter"]: row["val/loss"] for row in outcome.rows if "val/loss" in row}


def files(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """But for status.json, which says how the last start ended."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != "status.json"]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def fresh(run_train: Train, *settings: str, out: str, processes: int = 1) -> Outcome:
    done = run_train.fresh(*COMMON, *settings, "--resume=auto", out=out, processes=processes)
    assert done.status == 0, done.stderr
    return done


def assert_same(parts: Outcome, straight: Outcome) -> None:
    assert len(straight.series("train/loss")) == UPDATES
    assert parts.series("train/loss") == straight.series("train/loss")
    assert list(validation(straight)) == [0, 4, 8, 12, 16, 20]
    # The end of each part is evaluated as well.
    assert {update: validation(parts)[update] for update in validation(straight)} == validation(straight)
    one, other = checkpoint(parts.folder, UPDATES), checkpoint(straight.folder, UPDATES)
    for key in ("model", "optimizer", "scaler", "skipped", "iter", "evaluated", "data"):
        assert differences(one[key], other[key]) == [], key


@pytest.mark.parametrize(("settings", "processes"), EXACT_RESUMES)
def test_parts_are_bit_for_bit_the_run_in_one_go(run_train: Train, settings: tuple[str, ...], processes: int) -> None:
    settings = (*settings, "--dropout=0.1")
    straight = fresh(run_train, *settings, f"--max_iters={UPDATES}", out="straight", processes=processes)
    for stop in STOPS:
        parts = fresh(run_train, *settings, f"--max_iters={stop}", out="parts", processes=processes)
    assert_same(parts, straight)
    if "--dtype=float16" in settings:
        assert None in straight.series("grad_norm"), "the test needs an overflow"
        assert checkpoint(straight.folder, UPDATES)["scaler"]["scale"] < 2.0**16


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        (("--dtype=float32",), 1),
        pytest.param(("--dtype=bfloat16",), 2, marks=pytest.mark.slow),
        pytest.param(("--dtype=bfloat16", SHARDED), 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_parts_of_a_run_that_crashed(run_train: Train, settings: tuple[str, ...], processes: int) -> None:
    """With a gamma that depends on max_iters: each part wants all updates, and dies after its checkpoint."""
    settings = (*settings, "--optimizer=mars-adamw", "--gamma=linear:0.4:0", "--mars_last_grad=bfloat16")
    settings = (
        *settings,
        "--dropout=0.1",
        f"--max_iters={UPDATES}",
        "--checkpoint_interval=1",
        "--keep_checkpoints=99",
    )
    straight = fresh(run_train, *settings, out="straight", processes=processes)
    for stop in STOPS:
        parts = fresh(run_train, *settings, out="parts", processes=processes)
        for path in (parts.folder / "checkpoints").iterdir():
            if int(path.stem.removeprefix("iter-")) > stop:
                path.unlink()
        kept = [json.dumps(row) + "\n" for row in parts.rows if row["iter"] <= stop]
        (parts.folder / "metrics.jsonl").write_text("".join(kept))
    assert_same(parts, straight)


def test_a_checkpoint_and_the_data_are_all_that_is_needed(run_train: Train, dataset: Path) -> None:
    """In other places than before, with nothing left in the old ones."""
    settings = ("--optimizer=mars-adamw", *EXACT, "--dropout=0.1")
    straight = fresh(run_train, *settings, f"--max_iters={UPDATES}", out="straight")
    old, new = fresh(run_train, *settings, "--max_iters=7", out="old").folder, run_train.folder("new")
    new.mkdir()
    (old / "checkpoints").rename(new / "checkpoints")
    shutil.rmtree(old)
    moved = dataset.rename(dataset.with_name("moved"))
    parts = fresh(run_train, *settings, f"--dataset={moved}", f"--max_iters={UPDATES}", out="new")
    assert [row["iter"] for row in parts.rows if "train/loss" in row] == list(range(8, UPDATES + 1))
    assert parts.series("train/loss") == straight.series("train/loss")[7:]
    assert validation(parts) == {update: loss for update, loss in validation(straight).items() if update > 7}
    for key in ("model", "optimizer"):
        assert differences(checkpoint(new, UPDATES)[key], checkpoint(straight.folder, UPDATES)[key]) == []
    assert f"changed     dataset: {dataset} until now, {moved} from here on" in parts.stdout


THERE_AND_BACK = ((2, "--batch_size=2"), (1, "--batch_size=4"), (2, "--batch_size=1"))
AND_THE_OTHER_WAY = ((1, "--batch_size=8"), (2, "--batch_size=4"), (1, "--batch_size=1"))


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(THERE_AND_BACK, id="2-1-2"),
        pytest.param(AND_THE_OTHER_WAY, id="1-2-1", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("settings", "shard"),
    [
        pytest.param(("--optimizer=adamw",), (), marks=pytest.mark.slow, id="adamw"),
        pytest.param(("--optimizer=mars-adamw",), (), marks=pytest.mark.slow, id="mars-adamw"),
        pytest.param(("--optimizer=mars-adamw",), (SHARDED,), marks=pytest.mark.slow, id="mars-adamw sharded"),
        pytest.param(("--optimizer=mars-adamw", *EXACT), (SHARDED,), id="mars-adamw exact sharded"),
    ],
)
def test_a_run_goes_on_with_other_processes_and_micro_batches(
    run_train: Train, settings: tuple[str, ...], shard: tuple[str, ...], layouts: tuple[tuple[int, str], ...]
) -> None:
    """Another batch anywhere would change a loss by a thousand times as much."""
    settings = (*settings, "--eval_interval=1")
    straight = run_train(*COMMON, *settings, f"--max_iters={UPDATES}", out="straight")
    for stop, (processes, batch) in zip(STOPS, layouts, strict=True):
        sharing = shard if processes > 1 else ()
        parts = fresh(run_train, *settings, batch, *sharing, f"--max_iters={stop}", out="parts", processes=processes)
    assert len(parts.series("val/loss")) == UPDATES + 1
    for key in ("train/loss", "val/loss"):
        np.testing.assert_allclose(parts.series(key), straight.series(key), rtol=0, atol=1e-5)


@pytest.mark.parametrize("settings", [("--optimizer=shampoo",), ("--optimizer=mars-adamw", *EXACT)], ids=str)
def test_determinism_changes_no_bit_on_a_cpu_and_ends_with_the_run(
    run_train: Train, settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC"):
        monkeypatch.setenv(name, "")  # so that what the run sets is gone after the test
    settings = (*settings, "--dropout=0.1")
    strict = run_train(*settings, "--deterministic=true", out="strict")
    assert torch.are_deterministic_algorithms_enabled()
    free = run_train(*settings, out="free")
    assert not torch.are_deterministic_algorithms_enabled()
    assert strict.series("train/loss") == free.series("train/loss")
    assert strict.series("val/loss") == free.series("val/loss")
    for key in ("model", "optimizer"):
        assert differences(checkpoint(strict.folder, 6)[key], checkpoint(free.folder, 6)[key]) == []


def test_the_start_says_what_a_resume_promises(run_train: Train) -> None:
    lines = run_train("--max_iters=1").stdout.splitlines()
    promise = "resume      exact to the last bit, with the same processes, micro-batch and machine"
    assert [line for line in lines if line.startswith("resume")] == [promise]


@pytest.mark.parametrize(
    ("key", "before", "now"),
    [
        ("n_layer", 2, 3),
        ("block_size", 16, 8),
        ("seed", 5000, 5001),
        ("total_batch_size", 8, 16),
        ("optimizer", "mars-adamw", "mars-lion"),
        ("exact", True, False),
    ],
)
def test_another_model_data_or_optimizer_is_refused(run_train: Train, key: str, before: Any, now: Any) -> None:
    begun = run_train("--optimizer=mars-adamw", *EXACT, "--max_iters=2")
    untouched = files(begun.folder)
    done = run_train("--optimizer=mars-adamw", *EXACT, "--max_iters=4", "--resume=auto", f"--{key}={now}")
    assert (done.status, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {begun.folder} was trained with {key}={before!r}, now it is {now!r}; ")
    assert f"--{key}={before}" in done.stderr
    assert files(begun.folder) == untouched
    assert read_status(begun.folder)["state"] == "failed"


@pytest.mark.parametrize("part", ["train", "val"])
def test_other_tokens_in_the_same_files_are_refused(run_train: Train, dataset: Path, part: str) -> None:
    begun = run_train("--max_iters=2")
    untouched = files(begun.folder)
    file = dataset / f"{part}.bin"
    tokens = np.fromfile(file, "<u2")
    tokens[len(tokens) // 2] ^= 1
    tokens.tofile(file)
    done = run_train("--max_iters=4", "--resume=auto")
    assert (done.status, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"error: {begun.folder} was trained on dataset=")
    assert "other tokens" in done.stderr
    assert files(begun.folder) == untouched
    assert read_status(begun.folder)["state"] == "failed"
    tokens[len(tokens) // 2] ^= 1
    tokens.tofile(file)
    assert run_train("--max_iters=4", "--resume=auto").status == 0


CHANGES = {  # from what the tiny config has
    "batch_size": ("4", "2"),
    "learning_rate": ("0.01", "0.02"),
    "weight_decay": ("0.1", "0.2"),
    "gamma": ("0.025", "0.5"),
    "eval_interval": ("3", "2"),
    "checkpoint_interval": ("0", "5"),
    "max_iters": ("2", "4"),
    "dtype": ("float32", "bfloat16"),
}


def test_other_settings_may_change_and_each_start_is_noted(run_train: Train, dataset: Path) -> None:
    def starts() -> list[dict[str, Any]]:
        lines = (run_train.folder("run") / "starts.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    run_train("--optimizer=mars-adamw", "--max_iters=2")
    assert [(start["iter"], start["changed"]) for start in starts()] == [(0, [])]
    moved = shutil.copytree(dataset, dataset.with_name("moved"))
    now = (f"--dataset={moved}", *(f"--{key}={new}" for key, (_, new) in CHANGES.items()))
    done = run_train("--optimizer=mars-adamw", "--resume=auto", *now)
    assert (done.status, done.stderr) == (0, "")
    assert [row["iter"] for row in done.rows if "train/loss" in row] == [1, 2, 3, 4]
    expected = [f"changed     {key}: {old} until now, {new} from here on" for key, (old, new) in CHANGES.items()]
    expected.append(f"changed     dataset: {dataset} until now, {moved} from here on")
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("changed")) == sorted(expected)
    assert run_train("--optimizer=adamw", "--resume=auto").status == 2, "and a refused start is none"
    run_train("--optimizer=mars-adamw", "--resume=auto", *now, "--max_iters=5")
    assert [start["iter"] for start in starts()] == [0, 2, 4]
    assert sorted(starts()[1]["changed"]) == sorted(expected)
    assert starts()[2]["changed"] == ["changed     max_iters: 4 until now, 5 from here on"]


@pytest.mark.parametrize("end", [6, 10])
def test_an_evaluation_that_a_stop_prevented_comes_first(run_train: Train, end: int) -> None:
    """After update 6, in the course of the run or at its end."""
    settings = ("--dropout=0.1", "--lr_decay_iters=10", "--keep_checkpoints=9")
    straight = run_train(*settings, "--max_iters=10", out="straight")
    run_train(*settings, "--max_iters=6", out="parts")
    path = run_train.folder("parts") / "checkpoints/iter-00000006.pt"
    saved = torch.load(path, weights_only=True)
    assert saved["evaluated"] == 6
    torch.save(saved | {"evaluated": 3, "best_val_loss": float("inf")}, path)
    rows = run_train.folder("parts") / "metrics.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    assert "val/loss" in lines[-1]
    rows.write_text("".join(lines[:-1]))

    parts = run_train(*settings, f"--max_iters={end}", "--resume=auto", out="parts")
    assert (parts.status, parts.stderr) == (0, "")
    places = [(row["iter"], "val/loss" in row) for row in parts.rows]
    assert places == [(row["iter"], "val/loss" in row) for row in straight.rows if row["iter"] <= end]
    assert parts.series("train/loss") == straight.series("train/loss")[:end]
    assert parts.series("val/loss") == [loss for update, loss in validation(straight).items() if update <= end]
    again = checkpoint(parts.folder, 6)
    assert (again["evaluated"], again["best_iter"]) == (6, 6)
    assert again["best_val_loss"] == validation(parts)[6]


def test_a_stop_where_no_evaluation_was_due_brings_none(run_train: Train) -> None:
    run_train("--max_iters=5", "--lr_decay_iters=6")
    path = run_train.folder("run") / "checkpoints/iter-00000005.pt"
    torch.save(torch.load(path, weights_only=True) | {"evaluated": 3}, path)
    rows = run_train.folder("run") / "metrics.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:-1]))
    done = run_train("--max_iters=6", "--resume=auto", "--lr_decay_iters=6")
    assert list(validation(done)) == [0, 3, 6]
