"""The noise of gradients, measured during training: against its definition, and without a trace in training."""

import json
import math
import os
import signal
import time
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import train
from data.batches import TrainingBatches
from data.tokens import open_dataset
from model import GPT, GPTConfig
from scripts.comparison.metrics import by_arrow, by_line
from tests.conftest import Outcome, Train
from tests.training.background import how_it_stands, weights
from tests.training.faulty import fault
from training.ahead import BatchesAhead
from training.metrics import TrainingClock
from training.stopping import STOPPED
from training.variance import ESTIMATES, GradientNoise

UPDATE, DRAWS, GRAD_CLIP = 4, 5, 0.5
BETA = 0.9

Vector = dict[str, Tensor]


class Method(NamedTuple):
    """What an optimizer averages of matrices and embeddings; of vectors it is the gradient, with `BETA`."""

    beta: float = BETA
    gamma: float = 0.0
    clip: bool = False
    exact: bool = False
    zero_first: bool = False
    """the first reference gradient is zero, else the gradient"""
    shows_c: bool = False
    normalised: bool = True
    """the average is divided by the sum of its weights"""


METHODS = {
    "adamw": Method(),
    "nadamw": Method(),
    "sgd --weight_decay=0": Method(normalised=False),
    "lion": Method(beta=0.95, gamma=1 - 0.9 / 0.95, zero_first=True),
    "mars-adamw": Method(gamma=0.3, clip=True, shows_c=True),
    "mars-adamw --exact=true": Method(gamma=0.3, clip=True, exact=True, shows_c=True),
    "mars-lion --mars_clip=none --mars_last_grad=folded": Method(gamma=0.3),
}


class ByHand:
    """The figures of a run, in float64, from the weights that it saved after each update."""

    def __init__(self, dataset: Path, folder: Path) -> None:
        torch.manual_seed(5000)
        self.model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64))
        self.weights = [self.model.state_dict() | {}] + [weights(folder, update) for update in range(1, UPDATE)]
        self.weights[0] = {name: value.clone() for name, value in self.weights[0].items()}
        tokens = open_dataset(str(dataset), 16, 64).train
        sizes = {"block_size": 16, "batch_size": 8, "accumulation": 1, "rank": 0, "processes": 1}
        self.batches = TrainingBatches(tokens, **sizes, seed=5000, vocab_size=64)

    def gradient(self, after: int, update: int, draw: int = 0) -> Vector:
        """Of the weights after one update, on the batch of another."""
        self.model.load_state_dict(self.weights[after])
        self.model.zero_grad()
        self.model(*self.batches.micro_batch(update, 0, draw)).backward()
        return {name: p.grad.double() for name, p in self.model.named_parameters() if p.grad is not None}

    def estimates(self, method: Method) -> dict[str, Vector]:
        """g, c and m of `UPDATE`. Where its gradient was clipped, all are made longer by as much."""
        m = dict.fromkeys(self.gradient(0, 1), torch.tensor(0.0))
        for update in range(1, UPDATE + 1):
            grad = clipped(self.gradient(update - 1, update))
            reference = {name: value * (not method.zero_first) for name, value in grad.items()}
            if update > 1:
                reference = clipped(self.gradient(update - 2, update if method.exact else update - 1))
            c = {}
            for name in grad:
                beta, gamma = (method.beta, method.gamma) if grad[name].dim() > 1 else (BETA, 0.0)
                c[name] = grad[name] + gamma * beta / (1 - beta) * (grad[name] - reference[name])
                factor = max(1.0, c[name].norm().item()) if method.clip and grad[name].dim() > 1 else 1.0
                m[name] = beta * m[name] + (1 - beta) * c[name] / factor
        scale = length(self.gradient(UPDATE - 1, UPDATE)) / length(grad)
        betas = {name: method.beta if value.dim() > 1 else BETA for name, value in grad.items()}
        total = {name: 1 - beta**UPDATE if method.normalised else 1.0 for name, beta in betas.items()}
        estimates = {"gradient": grad, "average": {name: value / total[name] for name, value in m.items()}}
        estimates |= {"corrected": c} if method.shows_c else {}
        return {which: {name: scale * value for name, value in e.items()} for which, e in estimates.items()}

    def figures(self, method: Method) -> dict[str, float]:
        """By pairs of gradients: the mean of g * h is |G|^2, that of |g - h|^2 / 2 is tr(Sigma)."""
        draws = [self.gradient(UPDATE - 1, UPDATE, draw) for draw in range(1, DRAWS + 1)]
        pairs = list(combinations(draws, 2))
        signal = sum(inner(g, h) for g, h in pairs) / len(pairs)
        noise = sum(length({name: g[name] - h[name] for name in g}) ** 2 / 2 for g, h in pairs) / len(pairs)
        norms = torch.tensor([length(g) for g in draws], dtype=torch.float64)
        figures = {
            "noise_scale": 8 * noise / signal,
            "noise": noise,
            "signal": signal,
            "grad_norm_mean": norms.mean().item(),
            "grad_norm_std": norms.std().item(),
            "grad_norm_cv": (norms.std() / norms.mean()).item(),
        }
        for name, e in self.estimates(method).items():
            product = sum(inner(e, g) for g in draws) / DRAWS
            figures[f"{name}_error"] = (length(e) ** 2 - 2 * product + signal) / noise
            figures[f"{name}_cosine"] = product / length(e) / math.sqrt(signal)
        return {f"variance/{name}": figure for name, figure in figures.items()}


def inner(a: Vector, b: Vector) -> float:
    return sum((a[name] * b[name]).sum().item() for name in a)


def length(a: Vector) -> float:
    return math.sqrt(inner(a, a))


def clipped(grad: Vector) -> Vector:
    return {name: value * min(1.0, GRAD_CLIP / length(grad)) for name, value in grad.items()}


def measured(outcome: Outcome) -> list[dict[str, float]]:
    assert outcome.status == 0, outcome.stderr
    return [row for row in outcome.rows if "variance/noise_scale" in row]


@pytest.mark.parametrize("options", METHODS)
def test_figures_are_those_of_their_definition(run_train: Train, dataset: Path, options: str) -> None:
    done = run_train(
        *f"--optimizer={options} --grad_clip={GRAD_CLIP} --log_variance={UPDATE} --variance_batches={DRAWS}".split(),
        *("--gamma=0.3", "--checkpoint_interval=1", "--keep_checkpoints=9", f"--max_iters={UPDATE + 1}"),
    )
    (row,) = measured(done)
    assert min(done.series("grad_norm")[:UPDATE]) > GRAD_CLIP, "the test needs clipped gradients"
    assert (row["iter"], row["tokens"]) == (UPDATE, UPDATE * 8 * 16)
    expected = ByHand(dataset, done.folder).figures(METHODS[options])
    assert {key: value for key, value in row.items() if key.startswith("variance/")} == pytest.approx(
        expected, rel=1e-4
    )
    assert f"update {UPDATE}: noise scale {row['variance/noise_scale']:.3g} sequences, errors gradient" in done.stdout


FORMS = [
    ("--optimizer=mars-adamw", "--dropout=0.2"),
    ("--optimizer=mars-adamw", "--exact=true", "--dropout=0.2"),
    ("--optimizer=muon", "--dtype=float16"),
    ("--optimizer=adamw", "deferred"),
    ("--optimizer=mars-adamw", "deferred"),
]


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_training_is_the_same_without_it(
    run_train: Train, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]
) -> None:
    if "deferred" in form:
        monkeypatch.setattr(train, "defers", lambda *_: True)
    options = [option for option in form if option.startswith("--")]
    never = run_train(*options, "--log_interval=2", out="never")
    always = run_train(*options, "--log_interval=2", "--log_variance=1", "--variance_batches=2", out="always")
    assert [row["iter"] for row in measured(always)] == [1, 2, 3, 4, 5, 6]
    assert_same_training(always, never)


def assert_same_training(one: Outcome, other: Outcome) -> None:
    for key in ("train/loss", "grad_norm", "val/loss"):
        assert one.series(key) == other.series(key)
    states = [torch.load(run.folder / "checkpoints/iter-00000006.pt", weights_only=True) for run in (one, other)]
    values = [(saved["model"], saved["optimizer"]["state"], saved["scaler"]) for saved in states]
    torch.testing.assert_close(*values, rtol=0, atol=0)


def test_float16_measures_the_unscaled_gradient(run_train: Train) -> None:
    common = ("--log_variance=3", "--optimizer=mars-adamw")
    single, half = measured(run_train(*common)), measured(run_train(*common, "--dtype=float16", out="half"))
    for key in single[0]:
        if key.startswith("variance/"):
            assert half[0][key] == pytest.approx(single[0][key], rel=0.05), key


def test_a_resume_writes_no_row_twice(run_train: Train) -> None:
    common = ("--log_variance=2", "--checkpoint_interval=3", "--keep_checkpoints=9", "--optimizer=mars-adamw")
    straight = run_train(*common, out="straight")
    run_train(*common)
    for path in (run_train.folder("run") / "checkpoints").glob("iter-0000000[456].pt"):
        path.unlink()
    again = run_train(*common, "--resume=auto")
    assert "going on after update 3" in again.stdout
    rows = [without_times(row) for row in measured(again)]
    assert [row["iter"] for row in rows] == [2, 4, 6]
    assert rows == [without_times(row) for row in measured(straight)]

    (again.folder / "checkpoints/iter-00000006.pt").unlink()
    other = run_train(*common, "--max_iters=8", "--lr_decay_iters=6", "--log_variance=1", "--resume=auto")
    assert "going on after update 3" in other.stdout
    assert [row["iter"] for row in measured(other)] == [2, 4, 6, 7, 8]
    assert not (other.folder / "metrics.abandoned.jsonl").exists(), "how often is measured changes no course"


def without_times(row: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key not in ("time", "variance_seconds")}


def test_rows_of_a_course_that_was_given_up_are_put_aside(run_train: Train) -> None:
    common = ("--log_variance=2", "--checkpoint_interval=3", "--keep_checkpoints=9")
    folder = run_train(*common).folder
    for path in (folder / "checkpoints").glob("iter-0000000[456].pt"):
        path.unlink()
    other = run_train(*common, "--resume=auto", "--learning_rate=2e-3")
    assert [row["iter"] for row in measured(other)] == [2, 4, 6]
    aside = [json.loads(line) for line in (folder / "metrics.abandoned.jsonl").read_text().splitlines()]
    assert [row["iter"] for row in aside if "variance/noise_scale" in row] == [4, 6]


def test_a_request_to_stop_breaks_a_measurement_off(run_train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update itself is made, so that the run goes on as if there had been none."""
    straight = run_train("--log_variance=2", out="straight")
    whole, drawn = BatchesAhead.micro_batch, []

    def micro_batch(self: BatchesAhead, update: int, step: int, *draw: int) -> object:
        if draw and update == 4:
            drawn.append(draw)
            if len(drawn) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)  # until the listening thread has it
        return whole(self, update, step, *draw)

    monkeypatch.setattr(BatchesAhead, "micro_batch", micro_batch)
    stopped = run_train("--log_variance=2")
    assert stopped.status == STOPPED
    assert len(drawn) == 2, "the micro-batches of one gradient"
    assert "stopped after update 4" in stopped.stdout
    on = run_train("--log_variance=2", "--resume=auto")
    assert [row["iter"] for row in measured(on)] == [2, 6]
    assert_same_training(on, straight)


@pytest.mark.parametrize("kind", ["nan-loss", "inf-gradient"])
@pytest.mark.parametrize("deferred", [False, True])
def test_an_update_that_is_not_made_has_no_errors(
    run_train: Train, monkeypatch: pytest.MonkeyPatch, kind: str, deferred: bool
) -> None:
    monkeypatch.setattr(train, "defers", lambda *_: deferred)
    with fault(kind, {4}):
        done = run_train("--log_variance=2", "--optimizer=mars-adamw", "--log_interval=6")
    good, bad, last = measured(done)
    assert None not in {*good.values(), *last.values()}
    assert bad["variance/noise_scale"] is not None
    assert {bad.get(f"variance/{name}_error") for name in ESTIMATES} == {None}


def test_readers_take_no_notice_of_its_rows(run_train: Train) -> None:
    """The clock of training neither."""
    done = run_train("--log_variance=1", "--max_iters=5", "--eval_interval=5", "--log_interval=5")
    content = (done.folder / "metrics.jsonl").read_bytes()
    for read in (by_line, by_arrow):
        metrics = read(content)
        assert metrics is not None
        assert (list(metrics.train.updates), list(metrics.evals.updates)) == ([1, 5], [0, 5])
        assert metrics.damaged_lines == 0
    assert how_it_stands(done.folder) == 0
    times = [row["time"] for row in done.rows]
    assert times == sorted(times)


def test_the_clock_of_training_does_not_run() -> None:
    clock = TrainingClock(0.0, torch.device("cpu"))
    clock.start()
    noise = GradientNoise([torch.zeros(3)], clock)
    with noise.timed():
        before = clock.seconds()
        time.sleep(0.001)
        assert clock.seconds() == before
    time.sleep(0.001)
    assert clock.seconds() > before


@pytest.mark.parametrize(("key", "value"), [("log_variance", "-1"), ("log_variance", "1.5"), ("variance_batches", "1")])
def test_wrong_settings_end_in_one_line(run_train: Train, key: str, value: str) -> None:
    done = run_train(f"--{key}={value}")
    assert (done.status, done.stderr.count("\n")) == (2, 1)
    assert f"--{key}={value}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("--optimizer=mars-adamw", "--exact=true", "--gamma=0.3", "--shard_optimizer=true"),
        ("--optimizer=mars-adamw", "--gamma=0.3"),
        ("--optimizer=muon", "--shard_optimizer=true"),
        ("--optimizer=sgd",),
    ],
    ids=" ".join,
)
def test_two_processes_measure_what_one_does(run_train: Train, settings: tuple[str, ...]) -> None:
    one = run_train(*settings, "--batch_size=2", "--log_variance=2", out="one")
    two = run_train.fresh(*settings, "--batch_size=2", "--log_variance=2", out="two", processes=2)
    assert two.status == 0, two.stderr
    assert len(measured(two)) == 3
    for mine, theirs in zip(measured(one), measured(two), strict=True):
        assert without_times(theirs) == pytest.approx(without_times(mine), rel=1e-3)
    never = run_train.fresh(*settings, "--batch_size=2", out="never", processes=2)
    assert_same_training(two, never)
