"""MARS: identities with other methods, state, and what users do to optimizers."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optim import MARS

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
    assert optimizer.metrics() == {}


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
    ],
    ids=str,
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
