"""Gamma: schedules over the steps, and one that follows the norm of the gradients."""

import copy
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from optim import MARS, AdaptiveGamma, CosineGamma, LinearGamma, load_optimizer_state, step_if
from optim.batch import Batch
from optim.schedule import gamma_schedule
from tests.optim.reference import ReferenceMARS, Settings

SHAPES = [(4, 6), (5, 3), (7,)]
MILD = AdaptiveGamma(1.5, 0.03, 0.5, 0.09, 0.07)
YES, NO = torch.tensor(True), torch.tensor(False)


# --- schedules over the steps ---


def test_a_line_and_half_a_cosine() -> None:
    line, cosine = LinearGamma(0.4, 0.0, 5), CosineGamma(0.4, 0.1, 5)
    assert [line(step) for step in (1, 2, 3, 5, 6, 1000)] == pytest.approx([0.4, 0.3, 0.2, 0.0, 0.0, 0.0])
    quarter = 0.1 + 0.3 * (1 + math.sqrt(0.5)) / 2
    assert [cosine(step) for step in (1, 2, 3, 5, 1000)] == pytest.approx([0.4, quarter, 0.25, 0.1, 0.1])
    assert CosineGamma(0.1, 0.4, 3)(2) == pytest.approx(0.25)  # upwards too
    assert CosineGamma(0.4, 0.1, 1)(1) == pytest.approx(0.4)


def test_texts_of_a_config() -> None:
    assert gamma_schedule(0.025, 9) == 0.025
    assert gamma_schedule("linear:0.1:0", 9) == LinearGamma(0.1, 0.0, 9)
    assert gamma_schedule("cosine:0.1:-2e-2", 9) == CosineGamma(0.1, -0.02, 9)
    assert gamma_schedule("adaptive", 9) == AdaptiveGamma(1.5, 0.3, 0.5, 0.9, 0.7, 0.9)
    assert gamma_schedule("adaptive:2:0.1:0.4:0.3:0.2", 9) == AdaptiveGamma(2.0, 0.1, 0.4, 0.3, 0.2, 0.9)
    assert gamma_schedule("adaptive:2:0.1:0.4:0.3:0.2:0.99", 9) == AdaptiveGamma(2.0, 0.1, 0.4, 0.3, 0.2, 0.99)


WRONG = [
    *("", "0.1", "linear", "linear:1", "linear:1:2:3", "cosine:a:1", "cosine:nan:1", "adaptive:", "adaptive:1:2:3:4"),
    *(
        "adaptive:1:0:2:0:0",
        "adaptive:2:0:-1:0:0",
        "adaptive:2:inf:1:0:0",
        "adaptive:2:0:1:0:0:1",
        "Adaptive",
        "step:1:0",
    ),
]


@pytest.mark.parametrize("text", WRONG)
def test_other_texts_are_errors_of_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"gamma=.* must be a number, linear:START:END, cosine:START:END") as error:
        gamma_schedule(text, 9)
    assert "\n" not in str(error.value)


# --- the norm of the gradients ---


@dataclass
class PlainNorm:
    """The running norm and the ratio to it in plain numbers, step by step."""

    of: AdaptiveGamma
    running: float | None = None

    def gamma(self, grads: list[Tensor]) -> float:
        norm = math.sqrt(sum((grad.double() ** 2).sum().item() for grad in grads))
        ratio = 1.0 if self.running is None else norm / self.running
        decay = self.of.decay
        self.running = norm if self.running is None else decay * self.running + (1 - decay) * norm
        if ratio > self.of.above:
            return self.of.gamma_above
        return self.of.gamma_below if ratio < self.of.below else self.of.between


def gradients(steps: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """Of norms that go up and down."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(steps, generator=generator).mul(0.7).exp().mul(0.1).tolist()
    return [[torch.randn(shape, generator=generator).mul(scale).to(dtype) for shape in SHAPES] for scale in scales]


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(99)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def step(optimizer: MARS, params: list[nn.Parameter], grads: list[Tensor]) -> float:
    """Returns gamma."""
    if optimizer.defaults["exact"]:
        set_gradients(params, [grad + 0.01 for grad in grads])
        optimizer.record_reference_gradient()
    set_gradients(params, grads)
    optimizer.step()
    return optimizer.metrics()["mars/gamma"].item()


def set_gradients(params: list[nn.Parameter], grads: list[Tensor]) -> None:
    for parameter, grad in zip(params, grads, strict=True):
        parameter.grad = grad.clone()


def running_norm(optimizer: MARS) -> float:
    return optimizer.param_groups[0]["running_norm"].item()


def tensors_for_gamma(batch: Batch) -> Tensor:
    return torch.tensor(batch.group["gamma"], dtype=torch.float64)


@pytest.fixture(params=["cpu", "as on a device"])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    """There kernels get gamma as a tensor, and see to it that a step changes nothing."""
    if request.param == "cpu":
        yield
    else:
        with patch.multiple(Batch, gamma=property(tensors_for_gamma), guarded=True):
            yield


VARIANTS: list[dict[str, Any]] = [
    {"clip": "tensor"},
    {"clip": "global", "first_step": "official"},
    {"clip": "none", "preconditioner": "lion", "last_grad": "bfloat16"},
    {"clip": "tensor", "preconditioner": "shampoo", "orthogonal": "svd"},
]


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_adaptive_gamma_is_that_of_a_plain_loop(variant: dict[str, Any]) -> None:
    """The last parameter is in a group without correction: its gradients count in the norm."""
    params, plain, seen = parameters(), PlainNorm(MILD), []
    vectors = {"params": params[2:], "gamma": 0.0, "clip": "none", "last_grad": "full", "preconditioner": "adamw"}
    optimizer = MARS([{"params": params[:2]}, vectors], lr=1e-2, gamma=MILD, **variant)
    all_grads = gradients(60)
    expected = [plain.gamma(grads) for grads in all_grads]
    reference = ReferenceMARS()
    settings = {key: value for key, value in variant.items() if key != "orthogonal"}
    twins = [reference.add(p, Settings(1e-2, gamma=lambda t: expected[t - 1], **settings)) for p in params[:2]]
    twins.append(reference.add(params[2], Settings(1e-2, gamma=0.0, clip="none")))
    for grads in all_grads:
        seen.append(step(optimizer, params, grads))
        reference.step(grads)
    assert seen == expected
    assert {seen.count(value) > 3 for value in (0.03, 0.09, 0.07)} == {True}
    assert running_norm(optimizer) == pytest.approx(plain.running, rel=1e-12)
    for parameter, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(parameter.detach(), twin.x, rtol=1e-9, atol=1e-9)


def test_groups_may_adapt_in_ways_of_their_own() -> None:
    params, slow = parameters(), AdaptiveGamma(1.2, 0.01, 0.8, 0.02, 0.03, decay=0.99)
    optimizer = MARS([{"params": params[:1]}, {"params": params[1:], "gamma": slow}], lr=1e-2, gamma=MILD)
    one, other = PlainNorm(MILD), PlainNorm(slow)
    for grads in gradients(20, seed=1):
        step(optimizer, params, grads)
        assert [group["gamma"] for group in optimizer.param_groups] == [one.gamma(grads), other.gamma(grads)]


def test_the_first_step_has_a_ratio_of_one() -> None:
    for above, below, expected in ((0.9, 0.5, 0.03), (2.0, 1.1, 0.09), (1.0, 1.0, 0.07)):
        params = parameters()
        optimizer = MARS(params, lr=1e-2, gamma=AdaptiveGamma(above, 0.03, below, 0.09, 0.07))
        assert step(optimizer, params, gradients(1)[0]) == expected


def saved(optimizer: MARS) -> dict[str, Any]:
    """Through a file, as checkpoints do."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("load", [MARS.load_state_dict, load_optimizer_state])
def test_a_resume_goes_on_bit_for_bit(load: Any, exact: bool) -> None:
    all_grads = gradients(30, seed=2, dtype=torch.float32)
    params = parameters(torch.float32)
    optimizer = MARS(params, lr=1e-2, gamma=MILD, exact=exact)
    for grads in all_grads[:13]:
        step(optimizer, params, grads)
    others = copy.deepcopy(params)
    resumed = MARS(others, lr=1e-2, gamma=MILD, exact=exact)
    load(resumed, saved(optimizer))
    assert running_norm(resumed) == running_norm(optimizer)
    gammas = [(step(optimizer, params, grads), step(resumed, others, grads)) for grads in all_grads[13:]]
    assert all(one == other for one, other in gammas)
    assert len(set(gammas)) == 3
    assert running_norm(resumed) == running_norm(optimizer)
    assert all(torch.equal(one, other) for one, other in zip(params, others, strict=True))


def test_a_resume_may_begin_or_cease_to_adapt() -> None:
    all_grads = gradients(6, seed=3)
    params = parameters()
    constant, adaptive = MARS(params, lr=1e-2, gamma=0.07), MARS(parameters(), lr=1e-2, gamma=MILD)
    for grads in all_grads[:2]:
        set_gradients(params, grads)
        constant.step()
    load_optimizer_state(adaptive, saved(constant))
    assert math.isnan(running_norm(adaptive))
    others, plain = adaptive.param_groups[0]["params"], PlainNorm(MILD)
    assert [step(adaptive, others, grads) for grads in all_grads] == [plain.gamma(grads) for grads in all_grads]
    load_optimizer_state(constant, saved(adaptive))
    assert constant.param_groups[0]["gamma"] == 0.07
    assert "running_norm" not in constant.param_groups[0]
    constant.load_state_dict(saved(adaptive))  # torch's own takes over settings
    assert constant.param_groups[0]["gamma"] == adaptive.param_groups[0]["gamma"]
    set_gradients(params, all_grads[0])
    constant.step()
    assert "mars/gamma" not in constant.metrics()


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("way", ["nan", "inf", "overflow", "forbidden", "zero", "no gradient"])
@pytest.mark.parametrize("when", [0, 4])
def test_a_step_that_changes_nothing_is_not_in_the_running_norm(way: str, when: int) -> None:
    """Nor is one whose gradients are all zero: what comes after would be infinitely larger."""
    params, plain = parameters(torch.float32), PlainNorm(MILD)
    optimizer = MARS(params, lr=1e-2, gamma=MILD)
    for index, grads in enumerate(gradients(12, seed=4, dtype=torch.float32)):
        if index == when:
            before = running_norm(optimizer)
            bad = [grad * {"zero": 0.0, "overflow": 3e38, "forbidden": 100.0}.get(way, 1.0) for grad in grads]
            if way in ("nan", "inf"):
                bad[1][0, 0] = float(way)
            set_gradients(params, bad)
            if way == "no gradient":
                optimizer.zero_grad()
            step_if(optimizer, NO if way == "forbidden" else YES)
            assert running_norm(optimizer) == pytest.approx(before, rel=0, abs=0, nan_ok=True)
        assert step(optimizer, params, grads) == plain.gamma(grads)
    assert running_norm(optimizer) == pytest.approx(plain.running, rel=1e-6)


@pytest.mark.parametrize("way", [{"exact": False}, {"exact": True}, {"estimator": "reference"}], ids=str)
@pytest.mark.parametrize("clip", ["tensor", "global", "none"])
@pytest.mark.parametrize("preconditioner", ["adamw", "lion", "sgd", "shampoo"])
def test_nothing_waits_for_gamma(preconditioner: str, clip: str, way: dict[str, Any]) -> None:
    """The meta device has no values, so that reading one is an error. Gamma stays there."""
    params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in SHAPES[:2]]
    settings: dict[str, Any] = {"preconditioner": preconditioner, "clip": clip, **way}
    optimizer = MARS(params, lr=1e-2, gamma=AdaptiveGamma(), compile=False, **settings)
    for _ in range(3):
        if way.get("exact"):
            set_gradients(params, [torch.empty_like(parameter) for parameter in params])
            optimizer.record_reference_gradient()
        set_gradients(params, [torch.empty_like(parameter) for parameter in params])
        optimizer.step()
        gamma = optimizer.metrics()["mars/gamma"]
        assert (gamma.device.type, gamma.dim(), gamma.is_floating_point()) == ("meta", 0, True)
    with pytest.raises(RuntimeError, match="meta"):
        gamma.item()


def test_it_says_what_it_cannot_be() -> None:
    for values in ({"above": 0.4}, {"below": -1.0}, {"decay": 1.0}, {"gamma_above": math.inf}, {"between": math.nan}):
        with pytest.raises(ValueError, match="AdaptiveGamma"):
            AdaptiveGamma(**values)
    with pytest.raises(ValueError, match="does not change"):
        MARS(parameters(), lr=1e-2, gamma=MILD, clip="none", preconditioner="lion", last_grad="folded")


@pytest.mark.slow
def test_no_gamma_is_a_reason_to_compile_anew() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    params = parameters(torch.float32)
    optimizer = MARS(params, lr=1e-2, gamma=MILD, compile=True)
    seen = set()
    for index, grads in enumerate(gradients(30, dtype=torch.float32)):
        seen.add(step(optimizer, params, grads))
        if index == 1:
            compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert len(seen) == 3
    assert compiled == torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
