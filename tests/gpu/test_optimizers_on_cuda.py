"""The optimizers on CUDA: the golden trajectories, the same steps as on a CPU, what is not finite, no waiting."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from configs import TrainConfig
from model import GPT, GPTConfig
from optim import build_optimizer, optimizer_metrics, record_reference_gradient
from optim.build import BUILDERS
from tests.optim.test_mars_golden import CASES, follow

pytestmark = pytest.mark.gpu

MODEL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64)
STEPS, LEARNING_RATE = 4, 1e-2
CONFIG = TrainConfig(
    learning_rate=LEARNING_RATE, min_lr=0.0, beta1=0.95, beta2=0.99, weight_decay=0.01, compile_optimizer=False
)
EXACT: dict[str, Any] = {"exact": True, "gamma": 0.3}
METHODS: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": name} for name in BUILDERS},
    "mars-adamw exact": {"optimizer": "mars-adamw", **EXACT},
    "mars-lion folded": {"optimizer": "mars-lion", "mars_clip": "none", "mars_last_grad": "folded"},
    "mars-adamw global": {"optimizer": "mars-adamw", "mars_clip": "global"},
    "mars-adamw adaptive": {"optimizer": "mars-adamw", "gamma": "adaptive:1:0.02:1:0.1:0.05:0.5"},
    "hybrid": {"optimizer": "mars-shampoo", "preconditioner_embeddings": "adamw", "preconditioner_vectors": "lion"},
    "mars-adamw bfloat16": {"optimizer": "mars-adamw", "mars_last_grad": "bfloat16"},
}
COMPILED = ("mars-adamw", "mars-adamw exact", "mars-adamw adaptive", "mars-lion")  # each takes seconds
# How far rounding leads apart, relative to the way that the weights have moved.
BY_ELEMENT, BY_MATRIX = 1e-3, 5e-2
MATRIX_METHODS = ("mars-shampoo", "muon", "shampoo")  # bfloat16 iterations; inverse roots of nearly singular matrices


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_golden_trajectories(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    follow(case, dtype, tolerance, compile=False, device="cuda")


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", ["official/adamw/clipped", "paper/lion/global-clip"])
def test_golden_trajectories_compiled(name: str) -> None:
    (case,) = (case for case in CASES if case["name"] == name)
    follow(case, torch.float32, 1e-5, compile=True, device="cuda")


class Bench:
    """A model with an optimizer, and gradients that are the same on every device."""

    def __init__(self, method: str, device: str, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = GPT(MODEL).to(device)
        self.config = replace(CONFIG, **(METHODS[method] | settings))
        self.optimizer: Optimizer = build_optimizer(self.model, self.config)

    def set_gradients(self, seed: int) -> None:
        chance = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.grad = (0.1 * torch.randn(parameter.shape, generator=chance)).to(parameter.device)

    def step(self, seed: int) -> None:
        """An update; in the exact form the reference is the gradient of the next one, a little changed."""
        if self.config.exact:
            self.set_gradients(seed + 1)
            record_reference_gradient(self.optimizer)
        self.set_gradients(seed)
        self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().cpu().clone() for name, parameter in self.model.named_parameters()}


def compare_with_cpu(method: str, **settings: Any) -> None:
    here, there = Bench(method, "cuda", **settings), Bench(method, "cpu")
    tolerance = BY_MATRIX if METHODS[method]["optimizer"] in MATRIX_METHODS else BY_ELEMENT
    start = there.weights()
    for step in range(STEPS):
        here.step(step)
        there.step(step)
    expected, found = there.weights(), here.weights()
    for name, weight in expected.items():
        way = (weight - start[name]).norm()
        assert way > 0
        assert (found[name] - weight).norm() < tolerance * way, name


@pytest.mark.parametrize("method", METHODS)
def test_steps_are_those_of_a_cpu(method: str) -> None:
    compare_with_cpu(method)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("method", COMPILED)
def test_compiled_steps_are_those_of_a_cpu(method: str) -> None:
    compare_with_cpu(method, compile_optimizer=True)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float, compiled: bool) -> None:
    bench = Bench("mars-adamw", "cuda", compile_optimizer=compiled)
    bench.step(0)
    before, state = bench.weights(), moments(bench.optimizer)
    bench.set_gradients(1)
    grad = bench.model.get_parameter("transformer.h.0.mlp.c_fc.weight").grad
    assert grad is not None
    grad[3, 5] = value
    bench.optimizer.step()
    assert optimizer_metrics(bench.optimizer)["mars/skipped"].item() == 1
    after, state_after = bench.weights(), moments(bench.optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(one, other) for one, other in zip(state, state_after, strict=True))
    bench.step(2)
    assert optimizer_metrics(bench.optimizer)["mars/skipped"].item() == 0
    assert all(weight.isfinite().all() and not torch.equal(weight, after[n]) for n, weight in bench.weights().items())


def moments(optimizer: Optimizer) -> list[torch.Tensor]:
    """Copies of the first and second moments of all parameters."""
    names = ("exp_avg", "exp_avg_sq")
    return [state[name].cpu().clone() for state in optimizer.state.values() for name in names if name in state]


@contextmanager
def without_waiting() -> Iterator[None]:
    """What waits for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_check_for_waiting_finds_it() -> None:
    number = torch.ones((), device="cuda")
    with pytest.raises(RuntimeError, match="synchronizing"), without_waiting():
        number.item()


EAGER = ("adamw", *COMPILED, "mars-shampoo", "muon", "hybrid")
WAYS = [*((name, False) for name in EAGER), *((name, True) for name in COMPILED)]


@pytest.mark.parametrize(("method", "compiled"), WAYS)
def test_a_step_does_not_wait_for_the_device(method: str, compiled: bool) -> None:
    bench = Bench(method, "cuda", compile_optimizer=compiled)
    for step in range(2):  # makes the state, and compiles
        bench.step(step)
    bench.set_gradients(2)
    with without_waiting():
        nn.utils.clip_grad_norm_(bench.model.parameters(), 1.0)
        if bench.config.exact:
            record_reference_gradient(bench.optimizer)
        bench.optimizer.step()
