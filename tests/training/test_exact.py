"""The exact form in the training loop: against the algorithm written out, and across resumes and processes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from data.batches import TrainingBatches
from data.tokens import open_dataset
from model import GPT, GPTConfig
from optim import learning_rate_at
from tests.conftest import Train

EXACT = ("--optimizer=mars-adamw", "--exact=true", "--gamma=0.5")


def by_hand(dataset: Path, updates: int, gamma: float) -> dict[str, torch.Tensor]:
    """Algorithm 2 of arXiv 2411.10438 in its exact form, with the tiny config of the tests: the reference gradient is
    computed when it is needed, from a copy of the last weights."""
    torch.manual_seed(5000)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64))
    data = open_dataset(str(dataset), 16, 64)
    batches = TrainingBatches(
        data.train, block_size=16, batch_size=8, accumulation=1, rank=0, processes=1, seed=5000, vocab_size=64
    )

    def gradient(update: int) -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss = model(*batches.micro_batch(update, 0))
        assert loss is not None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    weights = dict(model.named_parameters())
    m = {name: torch.zeros_like(p) for name, p in weights.items()}
    v = {name: torch.zeros_like(p) for name, p in weights.items()}
    last = {name: p.detach().clone() for name, p in weights.items()}
    beta1, beta2 = 0.9, 0.95
    for t in range(1, updates + 1):
        now = {name: p.detach().clone() for name, p in weights.items()}
        with torch.no_grad():
            for name, p in weights.items():
                p.copy_(last[name])
        reference = gradient(t)
        with torch.no_grad():
            for name, p in weights.items():
                p.copy_(now[name])
        grad = gradient(t)
        lr = learning_rate_at(t, 1e-2, 1e-3, 2, updates)
        with torch.no_grad():
            for name, p in weights.items():
                c = grad[name]
                if p.dim() >= 2:
                    c = c + gamma * beta1 / (1 - beta1) * (c - reference[name])
                    c = c / max(1.0, c.norm().item())
                m[name] = beta1 * m[name] + (1 - beta1) * c
                v[name] = beta2 * v[name] + (1 - beta2) * c * c
                step = m[name] / (1 - beta1**t) / ((v[name] / (1 - beta2**t)).sqrt() + 1e-8)
                p.sub_(lr * (step + (0.1 if p.dim() >= 2 else 0.0) * p))
        last = now
    data.close()
    return {name: p.detach() for name, p in weights.items()}


def saved(folder: Path, update: int) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"checkpoints/iter-{update:08}.pt", weights_only=True)["model"]


def test_it_is_the_algorithm_of_the_paper(run_train: Train, dataset: Path) -> None:
    done = run_train(*EXACT, "--max_iters=5")
    assert done.status == 0, done.stderr
    got = saved(done.folder, 5)
    for name, expected in by_hand(dataset, 5, 0.5).items():
        torch.testing.assert_close(got[name], expected, rtol=1e-4, atol=2e-6)


def test_without_correction_it_is_the_approximate_form(run_train: Train) -> None:
    exact = run_train("--optimizer=mars-adamw", "--gamma=0", "--exact=true", out="exact")
    approximate = run_train("--optimizer=mars-adamw", "--gamma=0", out="approximate")
    assert exact.series("train/loss") == approximate.series("train/loss")
    other = run_train(*EXACT, out="other")
    assert other.series("train/loss")[:2] == approximate.series("train/loss")[:2]
    assert other.series("train/loss")[3:] != approximate.series("train/loss")[3:]


@pytest.mark.parametrize("optimizer", ["mars-adamw", "mars-lion"])
def test_a_resume_is_exact_with_dropout(run_train: Train, optimizer: str) -> None:
    common = (f"--optimizer={optimizer}", "--exact=true", "--dropout=0.1", "--lr_decay_iters=7")
    straight = run_train(*common, "--max_iters=7", out="straight")
    run_train(*common, "--max_iters=3", out="parts")
    parts = run_train(*common, "--max_iters=7", "--resume=auto", out="parts")
    assert parts.series("train/loss") == straight.series("train/loss")
    for name, weight in saved(straight.folder, 7).items():
        assert torch.equal(saved(parts.folder, 7)[name], weight)


@pytest.mark.slow
def test_accumulation_and_processes_change_nothing(run_train: Train) -> None:
    one = run_train(*EXACT, "--batch_size=8", "--max_iters=8", out="one")
    for other in (
        run_train(*EXACT, "--batch_size=2", "--max_iters=8", out="accumulated"),
        run_train(*EXACT, "--batch_size=2", "--max_iters=8", out="two", processes=2),
    ):
        assert other.status == 0, other.stderr
        np.testing.assert_allclose(other.series("train/loss"), one.series("train/loss"), rtol=0, atol=1e-4)


def test_float16_with_a_scaler_that_overflows(run_train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaler's first factor is so large that some of the gradients, or references, overflow."""
    single = run_train(*EXACT, "--max_iters=20", out="single")
    real = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *a, **k: real(*a, init_scale=2.0**22, **k))
    half = run_train(*EXACT, "--max_iters=20", "--dtype=float16", out="half")
    assert half.status == 0, half.stderr
    norms = half.series("grad_norm")
    assert None in norms, "the test needs an overflow"
    assert all(torch.isfinite(weight).all() for weight in saved(half.folder, 20).values())
    assert half.series("val/loss")[-1] == pytest.approx(single.series("val/loss")[-1], abs=0.3)


def test_a_run_cannot_change_its_form(run_train: Train) -> None:
    run_train("--optimizer=mars-adamw", "--max_iters=2")
    done = run_train(*EXACT, "--max_iters=4", "--resume=auto")
    assert (done.status, done.stderr.count("\n")) == (2, 1)
    assert "exact=False, now it is True; set --exact=False" in done.stderr


@pytest.mark.slow
def test_adamw_has_no_exact_form(run_train: Train) -> None:
    done = run_train("--optimizer=adamw", "--exact=true")
    assert (done.status, done.stderr.count("\n")) == (2, 1)
    assert "exact" in done.stderr
    two = run_train("--optimizer=adamw", "--exact=true", processes=2)
    assert two.status != 0
    assert sum(line.startswith("error: ") for line in two.stderr.splitlines()) == 1
