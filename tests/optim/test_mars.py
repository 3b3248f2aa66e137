"""MARS: identities with other methods, state, and what users do to optimizers."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optim import MARS
from optim.preconditioner import newton_schulz, svd_factor
from tests.helpers import case_name

SHAPES = [(4, 6), (6, 3), (5,)]


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]


def gradients(steps: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [[torch.randn(shape, generator=generator, dtype=dtype) * scale for shape in SHAPES] for _ in range(steps)]


def run(
    params: list[nn.Parameter], make: Callable[..., torch.optim.Optimizer], grads: list[list[torch.Tensor]]
) -> torch.optim.Optimizer:
    optimizer = make(params)
    for step in grads:
        for parameter, grad in zip(params, step, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("fused", [False, True])
def test_gamma_zero_without_clip_is_torch_adamw(fused: bool) -> None:
    ours, theirs = parameters(), parameters()
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    run(ours, lambda p: MARS(p, gamma=0.0, clip="none", **settings), gradients(30))
    run(theirs, lambda p: torch.optim.AdamW(p, fused=fused, **settings), gradients(30))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_without_clip_the_first_moment_is_quasi_hyperbolic_momentum() -> None:
    """m_t = gamma g_t + (1 - gamma) EMA_beta1(g), with the published code's first step."""
    beta1, gamma = 0.95, 0.3
    params, grads = parameters(), gradients(20)
    optimizer = run(
        params, lambda p: MARS(p, lr=1e-3, betas=(beta1, 0.99), gamma=gamma, clip="none", first_step="official"), grads
    )
    for index, parameter in enumerate(params):
        average = torch.zeros_like(parameter)
        for step in grads:
            average = beta1 * average + (1 - beta1) * step[index]
        expected = gamma * grads[-1][index] + (1 - gamma) * average
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], expected, rtol=1e-12, atol=1e-12)


def test_global_clip_of_one_tensor_is_tensor_clip() -> None:
    results = []
    for clip in ("tensor", "global"):
        params = parameters()[:1]
        run(params, lambda p, clip=clip: MARS(p, lr=1e-2, clip=clip), [step[:1] for step in gradients(10, scale=3.0)])
        results.append(params[0])
    torch.testing.assert_close(results[0], results[1], rtol=1e-14, atol=1e-14)


def test_clip_rate_counts_what_was_longer_than_one() -> None:
    params = parameters()
    optimizer = MARS(params, lr=1e-2)
    assert optimizer.metrics() == {}
    for parameter, length in zip(params, (0.5, 2.0, 0.9), strict=True):
        parameter.grad = torch.full_like(parameter, length / parameter.numel() ** 0.5)
    optimizer.step()
    assert optimizer.metrics()["mars/clip_rate"].item() == pytest.approx(1 / 3)
    optimizer = MARS(params, lr=1e-2, clip="global")
    optimizer.step()
    assert optimizer.metrics()["mars/clip_rate"].item() == 1
    optimizer = MARS(params, lr=1e-2, clip="none")
    optimizer.step()
    assert set(optimizer.metrics()) == {"mars/skipped"}


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_last_gradient_is_a_copy(set_to_none: bool) -> None:
    """The published code keeps p.grad itself: zeroed in place, it makes the correction vanish."""
    model = small_model()
    optimizer = MARS(model.parameters(), lr=1e-2, gamma=0.5)
    reference = small_model()
    plain = MARS(reference.parameters(), lr=1e-2, gamma=0.5)
    for step in range(5):
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(step))
        for net, opt, none in ((model, optimizer, set_to_none), (reference, plain, True)):
            opt.zero_grad(set_to_none=none)
            net(x).square().mean().backward()
            opt.step()
            for parameter in net.parameters():
                assert parameter.grad is not None
                last = opt.state[parameter]["last_grad"]
                assert last.untyped_storage().data_ptr() != parameter.grad.untyped_storage().data_ptr()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)


def test_parameters_without_a_gradient_are_skipped() -> None:
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = MARS(params, lr=1e-2, weight_decay=0.1)
    optimizer.step()
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert torch.equal(params[0], before[0])
    assert torch.equal(params[2], before[2])
    assert not torch.equal(params[1], before[1])
    assert set(optimizer.state_dict()["state"]) == {1}


def test_state_is_saved_and_restored_bit_for_bit(tmp_path: Path) -> None:
    """Also of a parameter that joined late, and with the settings of groups; weights_only opens it."""
    grads = gradients(12, dtype=torch.float32)

    def make(params: list[nn.Parameter]) -> MARS:
        return MARS([{"params": params[:2]}, {"params": params[2:], "gamma": 0.0, "lr": 5e-3, "clip": "none"}], lr=1e-2)

    def steps(params: list[nn.Parameter], optimizer: MARS, first: int, last: int) -> None:
        for step in range(first, last):
            for index, parameter in enumerate(params):
                parameter.grad = None if index == 1 and step < 3 else grads[step][index].clone()
            optimizer.step()

    straight = parameters(torch.float32)
    steps(straight, make(straight), 0, 12)

    params = parameters(torch.float32)
    optimizer = make(params)
    optimizer.param_groups[0]["gamma"] = 0.025
    steps(params, optimizer, 0, 7)
    torch.save({"params": [p.detach() for p in params], "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")

    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = [nn.Parameter(p) for p in saved["params"]]
    optimizer = make(resumed)
    optimizer.param_groups[1]["lr"] = 1.0  # the saved value must win
    optimizer.load_state_dict(saved["optimizer"])
    steps(resumed, optimizer, 7, 12)
    for a, b in zip(straight, resumed, strict=True):
        assert torch.equal(a, b)


def test_a_copied_optimizer_goes_on_alike() -> None:
    params, grads = parameters(), gradients(8)
    optimizer = run(params, lambda p: MARS(p, lr=1e-2), grads[:4])
    clone_params = [nn.Parameter(p.detach().clone()) for p in params]
    clone = MARS(clone_params, lr=1e-2)
    clone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in grads[4:]:
        for p, q, grad in zip(params, clone_params, step, strict=True):
            p.grad, q.grad = grad.clone(), grad.clone()
        optimizer.step()
        clone.step()
    assert all(torch.equal(p, q) for p, q in zip(params, clone_params, strict=True))


def test_closure_returns_its_loss() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    optimizer = MARS([weight], lr=1e-2)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == pytest.approx(9.0)
    assert not torch.equal(weight, torch.ones(3, 3))


def test_it_minimises_a_quadratic() -> None:
    target = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    weight = nn.Parameter(torch.zeros(8, 8))
    optimizer = MARS([weight], lr=2e-2)
    for _ in range(400):
        optimizer.zero_grad()
        (weight - target).square().mean().backward()
        optimizer.step()
    assert (weight - target).square().mean() < 1e-3


@pytest.mark.parametrize(
    "setting",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"betas": (1.0, 0.99)},
        {"betas": (0.9,)},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"gamma": float("inf")},
        {"clip": "norm"},
        {"first_step": "published"},
        {"preconditioner": "adam"},
        {"lr": "1"},
        {"betas": 0.9},
        {"betas": ("a", "b")},
        {"eps": None},
        {"gamma": "linear:1:0"},
        {"gamma": lambda step: None},
        {"refresh_interval": True},
        {"last_grad": "bfloat16", "exact": True},
    ],
    ids=case_name,
)
def test_settings_are_checked_for_the_optimizer_and_for_groups(setting: dict[str, Any]) -> None:
    name = next(iter(setting))
    with pytest.raises(ValueError, match=name):
        MARS(parameters(), **({"lr": 1e-3} | setting))
    with pytest.raises(ValueError, match=name):
        MARS([{"params": parameters(), **setting}], lr=1e-3)
    optimizer = MARS(parameters(), lr=1e-3)
    with pytest.raises(ValueError, match=name):
        optimizer.add_param_group({"params": parameters(), **setting})
    assert len(optimizer.param_groups) == 1


def test_a_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        MARS(embedding.parameters(), lr=1e-3).step()


def test_grad_scaler_skips_a_step_that_overflows() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    optimizer = MARS([weight], lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for value in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale((weight * value).sum()).backward()
        before = weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(weight, before)
    assert torch.isfinite(optimizer.state[weight]["last_grad"]).all()
    assert optimizer.state[weight]["step"] == 1


# --- other preconditioners, and the exact form ---


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.99), (0.95, 0.98)])
def test_lion_is_mars_lion_with_another_gamma(beta1: float, beta2: float) -> None:
    """Lion (Chen et al., arXiv 2302.06675) = MARS-Lion with its beta2 and gamma = 1 - beta1 / beta2."""
    params, expected, grads = parameters(), [p.detach().clone() for p in parameters()], gradients(20)
    settings = {"lr": 1e-2, "betas": (beta2, 0.0), "weight_decay": 0.1, "gamma": 1 - beta1 / beta2}
    run(params, lambda p: MARS(p, preconditioner="lion", clip="none", first_step="official", **settings), grads)
    momentum = [torch.zeros_like(p) for p in expected]
    for step in grads:
        for x, m, g in zip(expected, momentum, step, strict=True):
            x.mul_(1 - 1e-2 * 0.1).sub_(1e-2 * (beta1 * m + (1 - beta1) * g).sign())
            m.mul_(beta2).add_(g, alpha=1 - beta2)
    for a, b in zip(params, expected, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-12, atol=1e-12)


def test_nesterov_muon_is_mars_shampoo_with_another_gamma() -> None:
    """gamma = 1 - mu, against torch's Muon: within a few percent of the distance of ten steps of 1e-2, since both
    iterate in bfloat16, on averages that differ by a factor."""
    mu = 0.95
    ours, theirs = parameters(torch.float32)[:2], parameters(torch.float32)[:2]
    grads = [step[:2] for step in gradients(10, dtype=torch.float32)]
    settings: dict[str, Any] = {"betas": (mu, 0.0), "gamma": 1 - mu, "clip": "none", "first_step": "official"}
    run(ours, lambda p: MARS(p, lr=1e-2, weight_decay=0.1, preconditioner="shampoo", **settings), grads)
    run(theirs, lambda p: torch.optim.Muon(p, lr=1e-2, weight_decay=0.1, momentum=mu, nesterov=True), grads)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.04 * 1e-2 * 10)


def test_exact_with_gamma_one_is_storm() -> None:
    """m_t = g_t + beta1 (m_{t-1} - r_t), up to the first step (Cutkosky & Orabona, arXiv 1905.10018)."""
    beta1 = 0.9
    params, grads, references = parameters(), gradients(12), gradients(24)[12:]
    optimizer = MARS(params, lr=1e-3, betas=(beta1, 0.99), gamma=1.0, exact=True, clip="none")
    storm = [(1 - beta1) * grad for grad in grads[0]]
    for step, grad in enumerate(grads):
        if step + 1 < len(grads):
            for parameter, reference in zip(params, references[step + 1], strict=True):
                parameter.grad = reference.clone()
            optimizer.record_reference_gradient()
        for parameter, value in zip(params, grad, strict=True):
            parameter.grad = value.clone()
        optimizer.step()
        if step > 0:
            storm = [g + beta1 * (m - r) for g, m, r in zip(grad, storm, references[step], strict=True)]
        for parameter, m in zip(params, storm, strict=True):
            torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], m, rtol=1e-11, atol=1e-11)


def test_exact_needs_its_reference_and_says_so() -> None:
    params = parameters()
    optimizer = MARS(params, lr=1e-2, exact=True)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match=r"record_reference_gradient\(\)"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert optimizer.state[params[0]]["step"] == 1
    optimizer.record_reference_gradient()
    with pytest.raises(RuntimeError, match="no reference"):
        optimizer.step()  # what was recorded now is for the step after this one
    with pytest.raises(RuntimeError, match="exact=True"):
        MARS(params, lr=1e-2).record_reference_gradient()
    with pytest.raises(ValueError, match="exact"):
        MARS([{"params": params, "exact": True}], lr=1e-2)


def test_a_reference_that_is_not_finite_makes_no_correction() -> None:
    weight = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    optimizer = MARS([weight], lr=1e-2, exact=True, gamma=0.5, clip="none")
    average = torch.zeros_like(weight)
    for _ in range(3):
        weight.grad = torch.full_like(weight, float("inf"))
        optimizer.record_reference_gradient()
        weight.grad = torch.randn_like(weight)
        average = 0.95 * average + 0.05 * weight.grad
        optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], average.detach())


def test_a_skipped_step_does_not_mix_up_the_references() -> None:
    """After an overflow a GradScaler skips step(): what was recorded before it belongs to the step after it."""
    weight = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    optimizer = MARS([weight], lr=1e-2, exact=True, gamma=0.5, clip="none", betas=(0.9, 0.99))
    grads, references = torch.randn(4, 3, 3, dtype=torch.float64), torch.randn(5, 3, 3, dtype=torch.float64)
    average = torch.zeros(3, 3, dtype=torch.float64)
    for update in range(4):
        weight.grad = references[update + 1].clone()  # on the next update's batch
        optimizer.record_reference_gradient()
        if update == 2:
            continue
        weight.grad = grads[update].clone()
        optimizer.step()
        correction = grads[update] - references[update] if update else torch.zeros(3, 3)
        average = 0.9 * average + 0.1 * (grads[update] + 0.5 * 9 * correction)
        torch.testing.assert_close(optimizer.state[weight]["exp_avg"], average)


def test_shampoo_takes_matrices_and_convolutions_but_no_vectors() -> None:
    kernel = nn.Parameter(torch.randn(8, 3, 2, 2))
    flat = nn.Parameter(kernel.detach().flatten(1).clone())
    kernel.grad = torch.randn_like(kernel)
    flat.grad = kernel.grad.flatten(1).clone()
    MARS([kernel, flat], lr=1e-2, preconditioner="shampoo").step()
    torch.testing.assert_close(kernel.detach().flatten(1), flat.detach())
    vector = nn.Parameter(torch.ones(4))
    vector.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"shape \(4,\).*adamw"):
        MARS([vector], lr=1e-2, preconditioner="shampoo").step()


@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (128, 32)])
def test_newton_schulz_is_near_the_orthogonal_factor(shape: tuple[int, int]) -> None:
    """Where no singular value is tiny; each then ends between 0.6 and 1.3."""
    u, _, vh = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(0)), full_matrices=False)
    matrix = u * torch.linspace(0.1, 1.0, min(shape)) @ vh
    values = torch.linalg.svdvals(newton_schulz(matrix).double())
    assert values.min() > 0.6
    assert values.max() < 1.3
    exact = torch.linalg.svdvals(svd_factor(matrix))
    torch.testing.assert_close(exact, torch.ones_like(exact))
