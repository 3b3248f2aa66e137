"""MARS with what users' models hold: odd dtypes, shapes, layouts and gradients. Nothing may be poisoned silently."""

import copy
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optim import MARS
from tests.helpers import case_name

VARIANTS: list[dict[str, Any]] = [
    {"preconditioner": "adamw"},
    {"preconditioner": "adamw", "clip": "global", "gamma": 0.2},
    {"preconditioner": "lion", "clip": "none", "last_grad": "folded"},
    {"preconditioner": "sgd", "last_grad": "bfloat16"},
    {"preconditioner": "shampoo", "first_step": "official"},
    {"preconditioner": "kronecker", "refresh_interval": 2},
    {"preconditioner": "adamw", "exact": True, "gamma": 0.3},
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)


def tensors(seed: int, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(tensor) for tensor in tensors(0, shapes, dtype)]


def set_gradients(params: list[nn.Parameter], seed: int, scale: float = 0.1) -> None:
    for parameter, grad in zip(params, tensors(seed, [tuple(p.shape) for p in params]), strict=True):
        parameter.grad = (grad * scale).to(parameter.dtype)


def update(params: list[nn.Parameter], optimizer: MARS, seed: int) -> None:
    """One update; in the exact form with its second gradient."""
    if optimizer.defaults["exact"]:
        set_gradients(params, 1000 + seed)
        optimizer.record_reference_gradient()
    set_gradients(params, seed)
    optimizer.step()


def contents(optimizer: MARS) -> list[Any]:
    """Every tensor of the state but step counts, copied."""
    return [
        {name: value.clone() for name, value in state.items() if name != "step"} for state in optimizer.state.values()
    ]


def assert_equal(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@every_variant
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("when", [0, 3])
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(
    variant: dict[str, Any], bad: float, when: int
) -> None:
    """And those after it go on as if that batch had not been drawn."""
    shapes: list[tuple[int, ...]] = [(4, 6), (5, 3)]
    params, twins = parameters(shapes), parameters(shapes)
    optimizer, twin = MARS(params, lr=1e-2, **variant), MARS(twins, lr=1e-2, **variant)
    for seed in range(when):
        update(params, optimizer, seed)
        update(twins, twin, seed)
    before = [p.detach().clone() for p in params]
    state = contents(optimizer)
    if variant.get("exact"):
        set_gradients(params, 2000)
        optimizer.record_reference_gradient()
    set_gradients(params, 99)
    params[1].grad.view(-1)[2] = bad  # type: ignore[union-attr]
    optimizer.step()
    assert optimizer.metrics()["mars/skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    if when and not variant.get("exact"):
        assert_equal(contents(optimizer), state)
    for seed in range(10, 13):
        update(params, optimizer, seed)
        update(twins, twin, seed)
    assert optimizer.metrics()["mars/skipped"] == 0
    assert all(torch.isfinite(p).all() for p in params)
    if not variant.get("exact") and variant["preconditioner"] in ("lion", "sgd", "shampoo"):  # no count of steps
        for a, b in zip(params, twins, strict=True):
            torch.testing.assert_close(a, b)


@every_variant
def test_bf16_parameters_are_stepped_in_float32(variant: dict[str, Any]) -> None:
    """Each step is the float32 step from the rounded parameters, rounded."""
    shapes: list[tuple[int, ...]] = [(8, 6), (3, 7)]
    params = parameters(shapes, torch.bfloat16)
    optimizer = MARS(params, lr=1e-2, weight_decay=0.1, **variant)
    twins = [nn.Parameter(p.detach().float()) for p in params]
    twin = MARS(twins, lr=1e-2, weight_decay=0.1, **variant)
    for seed in range(6):
        for p, q in zip(params, twins, strict=True):
            q.data.copy_(p.detach())
        if variant.get("exact"):
            set_gradients(params, 1000 + seed)
            for p, q in zip(params, twins, strict=True):
                q.grad = p.grad.float()  # type: ignore[union-attr]
            optimizer.record_reference_gradient()
            twin.record_reference_gradient()
        set_gradients(params, seed)
        for p, q in zip(params, twins, strict=True):
            q.grad = p.grad.float()  # type: ignore[union-attr]
        optimizer.step()
        twin.step()
        for p, q in zip(params, twins, strict=True):
            assert p.dtype == torch.bfloat16
            assert torch.equal(p, q.bfloat16())
    moment = "folded" if variant.get("last_grad") == "folded" else "exp_avg"
    assert all(optimizer.state[p][moment].dtype == torch.float32 for p in params)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_goes_through_a_file_bit_for_bit(variant: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = [(8, 6), (3, 7)]
    params = parameters(shapes, dtype)
    optimizer = MARS(params, lr=1e-2, **variant)
    for seed in range(3):
        update(params, optimizer, seed)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    twin = MARS(twins, lr=1.0, **variant)
    twin.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_equal(twin.state_dict()["state"], optimizer.state_dict()["state"])
    for seed in range(3, 6):
        update(params, optimizer, seed)
        update(twins, twin, seed)
    for a, b in zip(params, twins, strict=True):
        assert torch.equal(a, b)
        assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


@every_variant
def test_copies_and_pickles_go_on_alike(variant: dict[str, Any]) -> None:
    params = parameters([(4, 6)])
    optimizer = MARS(params, lr=1e-2, **variant)
    update(params, optimizer, 0)
    for make in (copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        twins, twin = make((params, optimizer))
        reference, reference_optimizer = copy.deepcopy((params, optimizer))
        for seed in (1, 2):
            update(twins, twin, seed)
            update(reference, reference_optimizer, seed)
        assert torch.equal(twins[0], reference[0])


SHAPES: list[tuple[int, ...]] = [(), (1,), (5,), (1, 1), (4, 6), (3, 4, 5), (2, 3, 4, 5), (0,), (0, 4), (3, 0, 2)]


@pytest.mark.parametrize("preconditioner", ["adamw", "lion", "sgd", "shampoo", "kronecker"])
def test_shapes_from_scalars_to_convolutions_and_empty_ones(preconditioner: str) -> None:
    """Each is stepped as it would be alone, and empty ones are no trouble."""
    shapes = [shape for shape in SHAPES if len(shape) >= 2 or preconditioner not in ("shampoo", "kronecker")]
    params = parameters(shapes)
    optimizer = MARS(params, lr=1e-2, preconditioner=preconditioner)
    alone = [nn.Parameter(p.detach().clone()) for p in params]
    optimizers = [MARS([p], lr=1e-2, preconditioner=preconditioner) for p in alone]
    for seed in range(3):
        set_gradients(params, seed)
        optimizer.step()
        for p, q, single in zip(params, alone, optimizers, strict=True):
            q.grad = p.grad
            single.step()
    for p, q in zip(params, alone, strict=True):
        torch.testing.assert_close(p, q)
        assert torch.isfinite(p).all()


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@every_variant
def test_layouts_do_not_matter(variant: dict[str, Any], compile: bool) -> None:
    """Transposed and expanded gradients, parameters in channels-last order, and parameters that are views."""
    plain = [nn.Parameter(tensor) for tensor in tensors(0, [(6, 4), (4, 3, 2, 2), (5, 8)])]
    storage = tensors(0, [(6, 4), (4, 3, 2, 2), (5, 8)])
    odd = [
        nn.Parameter(storage[0].T.contiguous().T),
        nn.Parameter(storage[1].contiguous(memory_format=torch.channels_last)),
        nn.Parameter(torch.cat([storage[2], storage[2]], dim=1)[:, :8]),
    ]
    optimizers = [MARS(params, lr=1e-2, compile=compile, **variant) for params in (plain, odd)]
    for seed in range(3):
        update(plain, optimizers[0], seed)
        if variant.get("exact"):
            set_gradients(odd, 1000 + seed)
            optimizers[1].record_reference_gradient()
        set_gradients(odd, seed)
        odd[1].grad = odd[1].grad.contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr]
        odd[2].grad = odd[2].grad.T.contiguous().T  # type: ignore[union-attr]
        optimizers[1].step()
    for a, b in zip(plain, odd, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_that_live_in_buckets_may_be_overwritten() -> None:
    """DistributedDataParallel's gradient_as_bucket_view: all gradients are views of one buffer that is used again."""
    shapes: list[tuple[int, ...]] = [(4, 6), (5, 3)]
    params, twins = parameters(shapes), parameters(shapes)
    optimizer, twin = MARS(params, lr=1e-2, gamma=0.5, exact=True), MARS(twins, lr=1e-2, gamma=0.5, exact=True)
    bucket = torch.zeros(24 + 15)
    for parameter, part in zip(params, bucket.split([24, 15]), strict=True):
        parameter.grad = part.view_as(parameter)
    for seed in range(4):
        for second in (True, False):
            set_gradients(twins, 1000 * second + seed)
            bucket.copy_(torch.cat([t.grad.flatten() for t in twins]))  # type: ignore[union-attr]
            for each in (optimizer, twin):
                each.record_reference_gradient() if second else each.step()
            bucket.fill_(7.0)
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


@every_variant
def test_a_group_may_join_midway(variant: dict[str, Any]) -> None:
    params = parameters([(4, 6), (5, 3)])
    optimizer = MARS(params[:1], lr=1e-2, **variant)
    update(params, optimizer, 0)
    optimizer.add_param_group({"params": params[1:], "lr": 1e-3})
    late = nn.Parameter(params[1].detach().clone())
    alone = MARS([late], lr=1e-3, **variant)
    if variant.get("clip") == "global":
        return  # one norm with what was there before
    for seed in (1, 2, 3):
        if variant.get("exact"):
            set_gradients(params, 1000 + seed)
            late.grad = params[1].grad
            optimizer.record_reference_gradient()
            alone.record_reference_gradient()
        set_gradients(params, seed)
        late.grad = params[1].grad
        optimizer.step()
        alone.step()
    torch.testing.assert_close(params[1], late)
    assert [optimizer.state[p]["step"].item() for p in params] == [4, 3]


@every_variant
def test_lr_zero_moves_nothing_and_no_gradients_are_no_step(variant: dict[str, Any]) -> None:
    params = parameters([(4, 6)])
    before = params[0].detach().clone()
    optimizer = MARS(params, lr=0.0, weight_decay=0.1, **variant)
    optimizer.step()
    assert not optimizer.state
    for seed in range(3):
        update(params, optimizer, seed)
    assert torch.equal(params[0], before)


def test_complex_parameters_are_refused() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match="complex"):
        MARS([weight], lr=1e-2).step()


@every_variant
def test_a_gradient_whose_norm_overflows_is_not_finite_either(variant: dict[str, Any]) -> None:
    """Its square would poison second moments and statistics."""
    params = parameters([(4, 6)])
    optimizer = MARS(params, lr=1e-2, **variant)
    update(params, optimizer, 0)
    before = params[0].detach().clone()
    if variant.get("exact"):
        set_gradients(params, 1001)
        optimizer.record_reference_gradient()
    params[0].grad = torch.full((4, 6), 3e38)
    optimizer.step()
    assert optimizer.metrics()["mars/skipped"] == 1
    assert torch.equal(params[0], before)
    update(params, optimizer, 2)
    assert torch.isfinite(params[0]).all()


def test_gamma_may_follow_a_schedule_and_does_so_after_a_resume() -> None:
    seen: list[int] = []

    def gamma(step: int) -> float:
        seen.append(step)
        return 0.1 * (step % 3)  # it is 0 at times

    params, twins = parameters([(4, 6)]), parameters([(4, 6)])
    optimizer = MARS(params, lr=1e-2, gamma=gamma)
    twin = MARS(twins, lr=1e-2, gamma=1.0)
    for seed in range(4):
        update(params, optimizer, seed)
        twin.param_groups[0]["gamma"] = 0.1 * ((seed + 1) % 3) or 1e-30  # keeps the last gradient
        update(twins, twin, seed)
    torch.testing.assert_close(params[0], twins[0])
    assert optimizer.metrics()["mars/gamma"].item() == pytest.approx(0.1)
    resumed = MARS(params, lr=1e-2, gamma=gamma)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["param_groups"][0]["gamma"] == pytest.approx(0.1)
    resumed.load_state_dict(saved)
    update(params, resumed, 4)
    assert seen[-1] == 5
    with pytest.raises(ValueError, match="gamma"):
        MARS(params, lr=1e-2, gamma=lambda step: math.nan)


def test_exact_may_begin_to_correct_midway() -> None:
    """gamma 0 keeps no reference; the first step with another gamma makes no correction."""
    params = parameters([(4, 6)])
    optimizer = MARS(params, lr=1e-2, exact=True, gamma=0.0, clip="none", betas=(0.9, 0.99))
    average = torch.zeros(4, 6)
    for seed in range(2):
        update(params, optimizer, seed)
        average = 0.9 * average + 0.1 * tensors(seed, [(4, 6)])[0] * 0.1
    optimizer.param_groups[0]["gamma"] = 0.5
    for seed in range(2, 4):
        update(params, optimizer, seed)
        c = tensors(seed, [(4, 6)])[0] * 0.1
        if seed == 3:
            c = c + 4.5 * (c - tensors(1002, [(4, 6)])[0] * 0.1)
        average = 0.9 * average + 0.1 * c
    torch.testing.assert_close(optimizer.state[params[0]]["exp_avg"], average)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preconditioner": "adamw", "clip": "none"}, "looks at m alone"),
        ({"preconditioner": "lion"}, "clip='none'"),
        ({"preconditioner": "lion", "clip": "none", "exact": True}, "exact=False"),
        ({"preconditioner": "lion", "clip": "none", "gamma": lambda step: 0.1}, "does not change"),
    ],
    ids=case_name,
)
def test_the_last_gradient_is_folded_only_where_the_identity_holds(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MARS(parameters([(4, 6)]), lr=1e-2, last_grad="folded", **settings)


def test_a_state_of_other_settings_is_refused() -> None:
    params = parameters([(4, 6)])
    optimizer = MARS(params, lr=1e-2, preconditioner="lion", clip="none")
    update(params, optimizer, 0)
    before = params[0].detach().clone()
    for setting in ({"last_grad": "folded"}, {"last_grad": "full", "preconditioner": "adamw"}):
        optimizer.param_groups[0].update(setting)
        with pytest.raises(RuntimeError, match="lacks"):
            update(params, optimizer, 1)
    assert torch.equal(params[0], before)


def test_a_state_of_another_form_is_refused() -> None:
    params = parameters([(4, 6)])
    exact = MARS(params, lr=1e-2, exact=True)
    update(params, exact, 0)
    optimizer = MARS(params, lr=1e-2)
    with pytest.raises(ValueError, match="exact=True"):
        optimizer.load_state_dict(exact.state_dict())
    with pytest.raises(ValueError, match="not of MARS"):
        optimizer.load_state_dict(torch.optim.AdamW(params, lr=1e-2).state_dict())
    assert not optimizer.state


def test_exact_where_a_whole_recording_had_no_gradient() -> None:
    """A parameter that takes no part in the next batch has a reference of zero; it was recorded all the same."""
    params = parameters([(4, 6)])
    optimizer = MARS(params, lr=1e-2, exact=True, gamma=0.5, clip="none", betas=(0.5, 0.9))
    update(params, optimizer, 0)
    params[0].grad = None
    optimizer.record_reference_gradient()
    set_gradients(params, 1)
    optimizer.step()
    optimizer.record_reference_gradient()
    moment = optimizer.state[params[0]]["exp_avg"].clone()
    set_gradients(params, 2)
    optimizer.step()
    expected = 0.5 * moment + 0.5 * 1.5 * params[0].grad  # type: ignore[operator]
    torch.testing.assert_close(optimizer.state[params[0]]["exp_avg"], expected)


def test_an_empty_group_is_no_trouble() -> None:
    params = parameters([(4, 6)])
    optimizer = MARS([{"params": []}, {"params": params}], lr=1e-2)
    update(params, optimizer, 0)
    assert optimizer.state[params[0]]["step"] == 1


@pytest.mark.parametrize("zeros", [1, 3])
def test_kronecker_statistics_that_begin_with_zeros_are_found_soon(zeros: int) -> None:
    params = parameters([(4, 6)])
    optimizer = MARS(params, lr=1e-2, preconditioner="kronecker", refresh_interval=1000)
    for seed in range(5):
        set_gradients(params, seed, scale=0.0 if seed < zeros else 0.1)
        before = params[0].detach().clone()
        optimizer.step()
    assert not torch.equal(params[0], before)


def test_memory_of_the_last_gradient() -> None:
    """Bytes a parameter of 4: full, half, none."""
    for last_grad, size in (("full", 8), ("bfloat16", 6), ("folded", 4)):
        params = parameters([(64, 32)])
        optimizer = MARS(params, lr=1e-2, preconditioner="lion", clip="none", last_grad=last_grad)
        update(params, optimizer, 0)
        values = [value for name, value in optimizer.state[params[0]].items() if name != "step"]
        assert sum(value.numel() * value.element_size() for value in values) == size * 64 * 32


@pytest.mark.slow
def test_neither_steps_nor_rates_nor_shapes_are_a_reason_to_compile_anew() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    params = parameters([(64, 32), (32, 16), (100, 7)])
    optimizer = MARS(params, lr=1e-2, gamma=lambda step: 0.01 * step, compile=True)
    for seed in range(8):
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + seed)
        update(params, optimizer, seed)
        if seed == 1:
            compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled == torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


WITHOUT_COMPILER = """
import sys, warnings
sys.path.insert(0, sys.argv[1])
import torch
from optim import MARS
weight = torch.nn.Parameter(torch.ones(64, 64))
twin = torch.nn.Parameter(torch.ones(64, 64))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimizer, eager = MARS([weight], lr=1e-2, compile=True), MARS([twin], lr=1e-2, compile=False)
    for step in range(3):
        weight.grad = torch.randn(64, 64)
        twin.grad = weight.grad
        optimizer.step()
        eager.step()
assert torch.equal(weight, twin)
print("\\n".join(str(w.message) for w in caught if "optim" in str(w.message)))
"""


@pytest.mark.slow
def test_without_a_compiler_it_warns_once_and_steps_eagerly(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER, str(root)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"CXX": "/nonexistent/c++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert "apt install g++" in done.stdout
