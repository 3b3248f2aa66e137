"""optim.clip_gradients: torch's clip, and norms that MARS need not take again."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from optim import MARS, clip_gradients

VARIANTS: list[dict[str, Any]] = [
    {"preconditioner": "adamw", "gamma": 0.2},
    {"preconditioner": "adamw", "gamma": 0.2, "clip": "global"},
    {"preconditioner": "lion", "clip": "none", "last_grad": "folded"},
    {"preconditioner": "sgd", "gamma": 0.1, "last_grad": "bfloat16"},
    {"preconditioner": "adamw", "gamma": 0.0},
    {"preconditioner": "adamw", "gamma": 0.3, "exact": True},
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)

SHAPES: list[tuple[int, ...]] = [(4, 6), (5, 3), (7,), (), (3, 0)]


def parameters(shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(params: list[nn.Parameter], seed: int, norm: float) -> None:
    """Random gradients of a norm, all together."""
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(parameter.shape, generator=generator) for parameter in params]
    scale = norm / math.sqrt(sum(grad.square().sum().item() for grad in grads))
    for parameter, grad in zip(params, grads, strict=True):
        parameter.grad = (grad * scale).to(parameter.dtype)


def copies(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters and gradients in memory of their own, in the same layouts."""
    twins = [nn.Parameter(parameter.detach().clone()) for parameter in params]
    for parameter, twin in zip(params, twins, strict=True):
        twin.grad = None if parameter.grad is None else parameter.grad.clone()
    return twins


def gradients(params: list[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in params if parameter.grad is not None]


def alike(left: list[Any], right: list[Any]) -> bool:
    return all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(left, right, strict=True))


# --- the clip ---


@pytest.mark.parametrize("norm", [1e-8, 0.5, 1.0, 1.01, 40.0])
@pytest.mark.parametrize(
    "dtypes", [("float32",), ("float64",), ("bfloat16",), ("float32", "float64", "bfloat16")], ids=str
)
def test_it_is_torch_s(norm: float, dtypes: tuple[str, ...]) -> None:
    params = [p for dtype in dtypes for p in parameters(dtype=getattr(torch, dtype))]
    params[0].data = params[0].data.T  # a layout that cannot be seen as one vector
    set_gradients(params, 1, norm)
    params[1].grad = None
    twins = copies(params)
    assert torch.equal(clip_gradients(iter(params), 1.0), nn.utils.clip_grad_norm_(twins, 1.0))
    assert params[1].grad is None
    assert alike(gradients(params), gradients(twins))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_what_is_not_finite_is_treated_as_torch_does(bad: float) -> None:
    params = parameters()
    set_gradients(params, 1, 1.0)
    params[0].grad[0, 0] = bad  # type: ignore[index]
    twins = copies(params)
    total, torch_s = clip_gradients(params, 1.0), nn.utils.clip_grad_norm_(twins, 1.0)
    assert not total.isfinite()
    assert alike([total], [torch_s])
    assert alike(gradients(params), gradients(twins))
    for each in (params, twins):  # finite again, where a clip to 0 made it so
        MARS(each, lr=1e-2, weight_decay=0.5).step()
    assert alike(params, twins)


@pytest.mark.parametrize("max_norm", [0.0, 2.0])
def test_gradients_that_need_no_clip_are_not_written(max_norm: float) -> None:
    params = parameters()
    set_gradients(params, 1, 1.5)
    before = [(grad._version, grad.clone()) for grad in gradients(params)]
    assert clip_gradients(params, max_norm).item() == pytest.approx(1.5)
    assert [grad._version for grad in gradients(params)] == [version for version, _ in before]
    assert alike(gradients(params), [grad for _, grad in before])


def test_no_gradients_have_a_norm_of_zero() -> None:
    assert clip_gradients(parameters(), 1.0).item() == 0
    assert clip_gradients([], 0.0).item() == 0


@pytest.mark.parametrize("size", [2**12 + 1, 2**16, 2**18, 2**22 + 5, 2**24 + 2**13 + 1])
def test_norms_of_large_tensors_do_not_depend_on_threads_and_are_close(size: int) -> None:
    threads, totals = torch.get_num_threads(), []
    params = parameters([(size,)])
    params[0].grad = torch.rand(size, generator=torch.Generator().manual_seed(1)) ** 8
    exact = params[0].grad.double().norm().item()
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        totals.append(clip_gradients(params, 0.0).item())
    torch.set_num_threads(threads)
    assert len(set(totals)) == 1
    assert totals[0] == pytest.approx(exact, rel=1e-6)


# --- norms at hand for MARS ---


class Norms(TorchDispatchMode):
    """Counts norms and products of vectors with themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(name in str(func) for name in ("norm", "dot"))
        return func(*args, **(kwargs or {}))


def update(params: list[nn.Parameter], optimizer: MARS, seed: int, norm: float, clip: Callable[..., Any]) -> None:
    if optimizer.defaults["exact"]:
        set_gradients(params, 1000 + seed, norm)
        clip(params, 1.0)
        optimizer.record_reference_gradient()
    set_gradients(params, seed, norm)
    clip(params, 1.0)
    optimizer.step()


def torch_s_clip(params: list[nn.Parameter], max_norm: float) -> None:
    nn.utils.clip_grad_norm_(params, max_norm)


@every_variant
def test_steps_are_those_that_find_norms_anew(variant: dict[str, Any]) -> None:
    """To the last bit, whether the gradient, or c, or neither is clipped."""
    shapes: list[tuple[int, ...]] = [(4, 6), (300, 400), (7,)]
    params, twins = parameters(shapes), parameters(shapes)
    optimizer, twin = MARS(params, lr=1e-2, **variant), MARS(twins, lr=1e-2, **variant)
    for seed, norm in enumerate([0.5, 0.9, 0.7, 0.1, 0.99, 0.98, 0.3]):
        update(params, optimizer, seed, norm, clip_gradients)
        update(twins, twin, seed, norm, torch_s_clip)
        assert alike(params, twins)
        for name, value in twin.metrics().items():
            assert torch.equal(optimizer.metrics()[name], value), name


@every_variant
def test_no_norm_is_taken_twice(variant: dict[str, Any]) -> None:
    params = parameters()
    optimizer = MARS(params, lr=1e-2, **variant)
    for seed in range(3):
        update(params, optimizer, seed, 5.0 if seed == 1 else 0.1, clip_gradients)
    for clip, taken in ((clip_gradients, False), (torch_s_clip, True)):
        set_gradients(params, 9, 5.0)
        clip(params, 0.1)
        recording, step = Norms(), Norms()
        if variant.get("exact"):
            with recording:
                optimizer.record_reference_gradient()
            set_gradients(params, 9, 5.0)
            clip(params, 0.1)
        with step:
            optimizer.step()
        assert (recording.count + step.count > 0) == taken


@pytest.mark.parametrize(
    "change", ["scaled", "not finite", "another", "in place by another update", "unseen, after a step"]
)
def test_a_gradient_that_changed_is_looked_at_again(change: str) -> None:
    params, twins = parameters(), parameters()
    optimizer, twin = MARS(params, lr=1e-2, gamma=0.2), MARS(twins, lr=1e-2, gamma=0.2)
    for seed in range(2):
        update(params, optimizer, seed, 0.1, clip_gradients)
        update(twins, twin, seed, 0.1, torch_s_clip)
    set_gradients(params, 2, 0.1)
    clip_gradients(params, 1.0)
    if change == "unseen, after a step":  # as communication writes into buckets
        optimizer.step()
        set_gradients(twins, 2, 0.1)
        twin.step()
    for grad in gradients(params):
        if change == "scaled":
            grad.mul_(100.0)
        elif change == "not finite" and grad.numel():
            grad.view(-1)[0] = math.inf
        elif change == "unseen, after a step":
            grad.data.mul_(100.0)
    if change == "another":
        set_gradients(params, 3, 30.0)
    if change == "in place by another update":
        for parameter in params:
            (parameter * 5.0).sum().backward()
    for parameter, other in zip(params, twins, strict=True):
        other.grad = parameter.grad.clone()  # type: ignore[union-attr]
    optimizer.step()
    twin.step()
    assert alike(params, twins)
    figures = [each.metrics() for each in (optimizer, twin)]
    assert figures[0] == figures[1]
    assert figures[0]["mars/skipped"] == (change == "not finite")
    assert (figures[0]["mars/clip_rate"] > 0) == (change != "not finite")


def test_gradients_that_are_let_go_are_freed() -> None:
    params = parameters()
    set_gradients(params, 1, 0.1)

    watched = [weakref.ref(grad) for grad in gradients(params)]
    clip_gradients(params, 1.0)
    for parameter in params:
        parameter.grad = None
    assert [ref() for ref in watched] == [None] * len(params)
