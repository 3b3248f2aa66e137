"""Estimators in the training loop: svrg and reference against loops written out, and across resumes and processes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from configs import TrainConfig
from data.batches import TrainingBatches, dropout_seed, snapshot_batch, window_offsets
from data.tokens import open_dataset
from model import GPT, GPTConfig
from optim import learning_rate_at
from tests.conftest import Train
from training.passes import passes_an_update, passes_of

SVRG = ("--optimizer=mars-adamw", "--estimator=svrg", "--gamma=0.5", "--snapshot_interval=3", "--snapshot_batches=2")
REFERENCE = ("--optimizer=mars-adamw", "--estimator=reference", "--gamma=0.5", "--reference_interval=2")
BETA1, BETA2, GAMMA, UPDATES = 0.9, 0.95, 0.5, 8
Tensors = dict[str, torch.Tensor]


class Loop:
    """Training with the tiny config of the tests, by gradients of given weights on numbered batches."""

    def __init__(self, dataset: Path, dropout: float = 0.0) -> None:
        torch.manual_seed(5000)
        self.model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, dropout=dropout))
        self.data, self.dropout = open_dataset(str(dataset), 16, 64), dropout
        self.batches = TrainingBatches(
            self.data.train, block_size=16, batch_size=8, accumulation=1, rank=0, processes=1, seed=5000, vocab_size=64
        )
        self.weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def gradient(self, weights: Tensors, batch: int) -> Tensors:
        """Clipped, as every gradient of a run is."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(weights[name])
        self.model.zero_grad()
        if self.dropout:
            torch.manual_seed(dropout_seed(5000, batch, 0))
        loss = self.model(*self.batches.micro_batch(batch, 0))
        assert loss is not None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def svrg(self) -> Tensors:
        """c = g - gamma (h - mu); matrices are corrected, vectors are on plain AdamW."""
        for t in range(1, UPDATES + 1):
            if (t - 1) % 3 == 0:
                snapshot = dict(self.weights)
                first, second = (self.gradient(snapshot, snapshot_batch(t, index)) for index in (0, 1))
                mean = {name: (first[name] + second[name]) / 2 for name in first}
            h, g = self.gradient(snapshot, t), self.gradient(self.weights, t)
            self.step(t, g, {name: g[name] - GAMMA * (h[name] - mean[name]) for name in g})
        self.data.close()
        return self.weights

    def reference(self) -> Tensors:
        """c = g + gamma (g_ref - g)."""
        grads: list[Tensors] = []
        mean = None
        for t in range(1, UPDATES + 1):
            g = self.gradient(self.weights, t)
            self.step(t, g, g if mean is None else {name: g[name] + GAMMA * (mean[name] - g[name]) for name in g})
            grads.append(g)
            if t % 2 == 0:
                mean = {name: (grads[-1][name] + grads[-2][name]) / 2 for name in g}
        self.data.close()
        return self.weights

    def step(self, t: int, g: Tensors, corrected: Tensors) -> None:
        if t == 1:
            self.m = {name: torch.zeros_like(p) for name, p in g.items()}
            self.v = {name: torch.zeros_like(p) for name, p in g.items()}
        lr = learning_rate_at(t, 1e-2, 1e-3, 2, UPDATES)
        new = {}
        for name, p in self.weights.items():
            c = corrected[name] / max(1.0, corrected[name].norm().item()) if p.dim() >= 2 else g[name]
            self.m[name] = BETA1 * self.m[name] + (1 - BETA1) * c
            self.v[name] = BETA2 * self.v[name] + (1 - BETA2) * c * c
            step = self.m[name] / (1 - BETA1**t) / ((self.v[name] / (1 - BETA2**t)).sqrt() + 1e-8)
            new[name] = p - lr * (step + (0.1 if p.dim() >= 2 else 0.0) * p)
        self.weights = new


def saved(folder: Path, update: int) -> Tensors:
    weights: Tensors = torch.load(folder / f"checkpoints/iter-{update:08}.pt", weights_only=True)["model"]
    return weights


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_svrg_is_its_equation(run_train: Train, dataset: Path, dropout: float) -> None:
    """With dropout: the gradient at the snapshot has the masks of the gradient that it corrects."""
    done = run_train(*SVRG, f"--max_iters={UPDATES}", "--batch_size=8", f"--dropout={dropout}")
    assert done.status == 0, done.stderr
    assert "svrg" in done.stdout
    got = saved(done.folder, UPDATES)
    for name, expected in Loop(dataset, dropout).svrg().items():
        torch.testing.assert_close(got[name], expected, rtol=1e-4, atol=2e-6)


def test_reference_is_its_equation(run_train: Train, dataset: Path) -> None:
    done = run_train(*REFERENCE, f"--max_iters={UPDATES}", "--batch_size=8")
    assert done.status == 0, done.stderr
    assert "reference, every 2" in done.stdout
    got = saved(done.folder, UPDATES)
    for name, expected in Loop(dataset).reference().items():
        torch.testing.assert_close(got[name], expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("form", [SVRG, REFERENCE], ids=["svrg", "reference"])
def test_a_resume_is_exact(run_train: Train, form: tuple[str, ...]) -> None:
    """Between two snapshots (refreshes), and with evaluations at other updates."""
    common = (*form, "--dropout=0.1", "--lr_decay_iters=8")
    straight = run_train(*common, "--max_iters=8", "--eval_interval=2", out="straight")
    run_train(*common, "--max_iters=3", out="parts")
    run_train(*common, "--max_iters=5", "--resume=auto", out="parts")
    parts = run_train(*common, "--max_iters=8", "--resume=auto", out="parts")
    assert parts.series("train/loss") == straight.series("train/loss")
    for name, weight in saved(straight.folder, 8).items():
        assert torch.equal(saved(parts.folder, 8)[name], weight)


@pytest.mark.slow
def test_accumulation_processes_and_sharding_change_nothing(run_train: Train) -> None:
    for form in (SVRG, REFERENCE):
        one = run_train(*form, "--batch_size=8", "--max_iters=8", out=f"one{form[1]}")
        for other in (
            run_train(*form, "--batch_size=2", "--max_iters=8", out=f"accumulated{form[1]}"),
            run_train(*form, "--batch_size=2", "--max_iters=8", out=f"two{form[1]}", processes=2),
            run_train(
                *form, "--batch_size=2", "--max_iters=8", "--shard_optimizer=true", out=f"zero{form[1]}", processes=2
            ),
        ):
            assert other.status == 0, other.stderr
            np.testing.assert_allclose(other.series("train/loss"), one.series("train/loss"), rtol=0, atol=1e-4)


def test_float16_with_a_scaler_that_overflows(run_train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first factor is so large that gradients at snapshots overflow as well as those of updates: some updates are
    not made, and others not corrected. Without an overflow the two runs end within a hundredth."""
    single = run_train(*SVRG, "--max_iters=20", out="single")
    real = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *a, **k: real(*a, init_scale=2.0**22, **k))
    half = run_train(*SVRG, "--max_iters=20", "--dtype=float16", out="half")
    assert half.status == 0, half.stderr
    assert None in half.series("grad_norm"), "the test needs an overflow"
    assert all(torch.isfinite(weight).all() for weight in saved(half.folder, 20).values())
    assert half.series("val/loss")[-1] == pytest.approx(single.series("val/loss")[-1], abs=0.5)


def test_the_same_batches_whatever_the_estimator(run_train: Train) -> None:
    """The first loss is before any step; with gamma 0 all losses are those of the plain method."""
    plain = run_train("--optimizer=mars-adamw", "--estimator=none", out="plain")
    for form in (SVRG, REFERENCE):
        run = run_train(*form, "--gamma=0", out=form[1])
        assert run.series("train/loss") == plain.series("train/loss")


def test_batches_of_snapshots_are_no_update_s() -> None:
    numbers = {snapshot_batch(update, index) for update in range(1, 200) for index in range(20)}
    assert len(numbers) == 199 * 20
    assert min(numbers) > 2**31, "updates are below"
    offsets = {tuple(window_offsets(7, number, 4, 10**9)) for number in [*sorted(numbers), *range(1, 1000)]}
    assert len(offsets) == len(numbers) + 999
    seeds = {dropout_seed(7, number, rank) for number in [*sorted(numbers), *range(1, 1000)] for rank in range(8)}
    assert len(seeds) == 8 * len(offsets)


def test_gradients_of_an_update() -> None:
    config = TrainConfig(estimator="svrg", snapshot_interval=5, snapshot_batches=3)
    counts = [len(list(passes_of(config, update))) for update in range(1, 11)]
    assert counts == [5, 2, 2, 2, 2, 5, 2, 2, 2, 2]
    assert sum(counts) / len(counts) == passes_an_update(config)
    assert [len(list(passes_of(TrainConfig(exact=exact), 6))) for exact in (False, True)] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--optimizer=adamw", "--estimator=svrg"), "estimator='svrg' is for the MARS optimizers"),
        (("--optimizer=mars-adamw", "--estimator=svrg", "--exact=true"), "exact=True is for estimator='recursive'"),
        (("--optimizer=mars-adamw", "--estimator=storm"), "estimator"),
        (("--optimizer=mars-adamw", "--estimator=svrg", "--snapshot_batches=0"), "snapshot_batches"),
    ],
)
def test_what_cannot_be_is_an_error_of_one_line(run_train: Train, arguments: tuple[str, ...], said: str) -> None:
    done = run_train(*arguments)
    assert (done.status, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


def test_a_run_cannot_change_its_estimator(run_train: Train) -> None:
    run_train(*REFERENCE, "--max_iters=2")
    done = run_train(*SVRG, "--max_iters=4", "--resume=auto")
    assert (done.status, done.stderr.count("\n")) == (2, 1)
    assert "estimator='reference', now it is 'svrg'" in done.stderr
