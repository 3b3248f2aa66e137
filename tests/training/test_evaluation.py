"""The validation loss: what it is, whatever computes it, and that training goes on as if it had not been computed."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from data.batches import EvaluationBatches
from data.tokens import open_dataset
from model import GPT, GPTConfig
from tests.conftest import VOCABULARY, Train
from tests.helpers import write_tokens
from training.evaluation import validation_loss
from training.processes import Processes

BLOCK = 16
SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=BLOCK, vocab_size=VOCABULARY)
FEW_LAYOUTS = ((1, 12), (2, 3), (3, 1))  # processes, batch_size
LAYOUTS = (*FEW_LAYOUTS, (1, 1), (1, 2), (1, 4), (2, 1), (2, 6), (3, 2), (3, 4))


def checkpoint(folder: Path, update: int) -> dict[str, Any]:
    return torch.load(folder / f"checkpoints/iter-{update:08}.pt", weights_only=True)


def by_hand(weights: dict[str, torch.Tensor], file: Path) -> float:
    """Mean cross-entropy of every token but the first in float64, window by window."""
    model = GPT(SHAPE).double().eval()
    model.load_state_dict(weights)
    tokens = torch.from_numpy(np.fromfile(file, "<u2").astype(np.int64))
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, BLOCK):
            window = tokens[start : start + BLOCK + 1]
            logits = model.lm_head(model.transformer(window[None, :-1]))[0]
            total += F.cross_entropy(logits, window[1:], reduction="sum").item()
    return total / (len(tokens) - 1)


@pytest.mark.parametrize("settings", [("adamw",), ("mars-adamw", "--exact=true", "--gamma=0.3")], ids=str)
def test_evaluating_leaves_no_trace_in_training(run_train: Train, settings: tuple[str, ...]) -> None:
    optimizer, *more = settings
    common = (f"--optimizer={optimizer}", *more, "--dropout=0.1", "--batch_size=2", "--max_iters=14")
    runs = {n: run_train(*common, f"--eval_interval={n}", out=f"every{n}") for n in (0, 1, 3, 7)}
    assert {n: len(run.series("val/loss")) for n, run in runs.items()} == {0: 2, 1: 15, 3: 6, 7: 3}
    never = checkpoint(runs[0].folder, 14)
    assert len(runs[0].series("train/loss")) == 14
    for n, run in runs.items():
        assert run.series("train/loss") == runs[0].series("train/loss"), n
        assert run.series("grad_norm") == runs[0].series("grad_norm"), n
        saved = checkpoint(run.folder, 14)
        assert all(torch.equal(saved["model"][name], weight) for name, weight in never["model"].items()), n
        for number, state in never["optimizer"]["state"].items():
            for name, value in state.items():
                assert torch.equal(saved["optimizer"]["state"][number][name], value), (n, number, name)


@pytest.mark.slow
def test_evaluating_leaves_no_trace_in_two_processes(run_train: Train) -> None:
    common = ("--optimizer=mars-adamw", "--exact=true", "--gamma=0.3", "--dropout=0.1", "--batch_size=2")
    runs = [run_train.fresh(*common, f"--eval_interval={n}", out=f"every{n}", processes=2) for n in (0, 1)]
    assert [len(run.series("val/loss")) for run in runs] == [2, 7]
    assert runs[0].series("train/loss") == runs[1].series("train/loss")
    one, other = (checkpoint(run.folder, 6)["model"] for run in runs)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_each_loss_is_that_of_the_weights_then(run_train: Train, dataset: Path) -> None:
    """Without dropout."""
    done = run_train("--dropout=0.2", "--checkpoint_interval=3", "--keep_checkpoints=9")
    losses = {row["iter"]: row["val/loss"] for row in done.rows if "val/loss" in row}
    assert list(losses) == [0, 3, 6]
    for update in (3, 6):
        expected = by_hand(checkpoint(done.folder, update)["model"], dataset / "val.bin")
        assert losses[update] == pytest.approx(expected, rel=0, abs=1e-6)


def evaluate(run_train: Train, *settings: str, out: str, processes: int, weights: Path | None = None) -> float:
    """The loss of the initial weights, or of a checkpoint whose evaluation is still to come."""
    settings = ("--total_batch_size=12", "--resume=auto", *settings)
    if weights is None:
        settings = (*settings, "--max_iters=0")
    else:
        shutil.copytree(weights, run_train.folder(out) / "checkpoints")
    done = run_train.fresh(*settings, out=out, processes=processes)
    assert (done.status, done.stderr) == (0, "")
    (row,) = done.rows
    return row["val/loss"]


def trained(run_train: Train, updates: int) -> Path:
    done = run_train("--total_batch_size=12", f"--max_iters={updates}", "--eval_interval=0", out="trained")
    path = done.folder / f"checkpoints/iter-{updates:08}.pt"
    torch.save(torch.load(path, weights_only=True) | {"evaluated": 0}, path)
    return path.parent


@pytest.mark.parametrize(
    ("layouts", "dtype", "updates"),
    [
        pytest.param(FEW_LAYOUTS, "float32", 0, id="few, float32, initial weights"),
        *(
            pytest.param(LAYOUTS, dtype, updates, marks=pytest.mark.slow, id=f"{dtype}, {updates} updates")
            for dtype in ("float32", "bfloat16")
            for updates in (0, 40)
        ),
    ],
)
def test_processes_and_micro_batch_do_not_matter(
    run_train: Train, dataset: Path, layouts: tuple[tuple[int, int], ...], dtype: str, updates: int
) -> None:
    """bfloat16 differs from the true loss by its rounding, but by the same everywhere."""
    folder = trained(run_train, updates) if updates else None
    progress = (f"--max_iters={updates}",) if updates else ()
    losses = {}
    for processes, batch in layouts:
        settings = (f"--batch_size={batch}", f"--dtype={dtype}", *progress)
        out = f"{processes}x{batch}"
        losses[out] = evaluate(run_train, *settings, out=out, processes=processes, weights=folder)
    weights = checkpoint(run_train.folder("1x12"), updates)["model"]
    expected = by_hand(weights, dataset / "val.bin")
    values = np.array(list(losses.values()))
    assert np.ptp(values) <= 1e-6, losses
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-6 if dtype == "float32" else 1e-3)


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(2, id="one target", marks=pytest.mark.slow),
        pytest.param(5, id="shorter than a window: batches for one process only"),
        pytest.param(BLOCK * 12 + 1, id="whole windows", marks=pytest.mark.slow),
        pytest.param(BLOCK * 12 + 2, id="and one target", marks=pytest.mark.slow),
        pytest.param(1003, id="a multiple of nothing"),
    ],
)
def test_a_file_of_any_length_counts_to_its_last_token(run_train: Train, tmp_path: Path, length: int) -> None:
    rng = np.random.default_rng(length)
    folder = write_tokens(tmp_path / "odd", rng.integers(0, VOCABULARY, 500), rng.integers(0, VOCABULARY, length))
    for processes, batch in FEW_LAYOUTS:
        out = f"{processes}x{batch}"
        settings = (f"--dataset={folder}", f"--batch_size={batch}")
        loss = evaluate(run_train, *settings, out=out, processes=processes)
        expected = by_hand(checkpoint(run_train.folder(out), 0)["model"], folder / "val.bin")
        assert loss == pytest.approx(expected, rel=0, abs=1e-6), out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_processes_compute_the_same_bits(run_train: Train, dtype: str) -> None:
    settings = (f"--dtype={dtype}", "--batch_size=1")
    losses = {evaluate(run_train, *settings, out=f"run{n}", processes=2) for n in range(3)}
    assert len(losses) == 1


@pytest.fixture
def batches(dataset: Path) -> Iterator[EvaluationBatches]:
    data = open_dataset(str(dataset), BLOCK, VOCABULARY)
    yield EvaluationBatches(data.val, block_size=BLOCK, batch_size=4, rank=0, processes=1, vocab_size=VOCABULARY)
    data.close()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("asked_before", [0, 3, None])
def test_it_can_be_broken_off_and_leaves_the_model_as_it_was(
    batches: EvaluationBatches, asked_before: int | None, training: bool
) -> None:
    """Before its first batch, midway, not at all."""
    model = GPT(GPTConfig(**(vars(SHAPE) | {"dropout": 0.5}))).train(training)
    computed: list[bool] = []
    model.register_forward_hook(lambda *_: computed.append(any(part.training for part in model.modules())))
    random = torch.get_rng_state()
    loss = validation_loss(
        model, batches, Processes(0, 0, 1, torch.device("cpu")), "float32", lambda: len(computed) == asked_before
    )
    assert torch.equal(torch.get_rng_state(), random)
    assert all(part.training is training for part in model.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not any(computed)
    if asked_before is None:
        assert len(computed) == len(batches) == 16
        assert loss == pytest.approx(4.16, abs=0.2)
    else:
        assert len(computed) == asked_before
        assert loss is None
