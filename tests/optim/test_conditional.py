"""Steps that a value on the device allows or not."""

import math
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from configs import TrainConfig
from optim import MARS, build_optimizer, step_if
from optim.batch import Batch
from optim.build import BUILDERS

CONFIG = TrainConfig(learning_rate=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1)
YES, NO = torch.tensor(True), torch.tensor(False)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5), nn.LayerNorm(5))


def set_gradients(of: nn.Module, seed: int, last: float = 0.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in of.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    parameter.grad.view(-1)[-1] += last


def content(of: nn.Module, optimizer: Optimizer, steps: bool = True) -> dict[str, Tensor]:
    """Weights and state, by name."""
    found = {name: parameter.detach().clone() for name, parameter in of.named_parameters()}
    for name, parameter in of.named_parameters():
        state = {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
        found |= {f"{name} {key}": value.clone() for key, value in state.items() if steps or key != "step"}
    return found


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def built(name: str, seen: int = 2) -> tuple[nn.Module, Optimizer]:
    made = model()
    optimizer = build_optimizer(made, replace(CONFIG, optimizer=name, compile_optimizer=False))
    for seed in range(seen):
        set_gradients(made, seed)
        optimizer.step()
    return made, optimizer


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_what_is_allowed_is_the_step_itself(name: str) -> None:
    (one, plain), (other, conditional) = built(name), built(name)
    for seed in range(2, 5):
        set_gradients(one, seed)
        set_gradients(other, seed)
        plain.step()
        step_if(conditional, YES)
    assert_same(content(one, plain), content(other, conditional))


@pytest.mark.parametrize("spoilt", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("guarded", [False, True], ids=["cpu", "as on a device"])
@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_what_is_not_allowed_changes_nothing(name: str, guarded: bool, spoilt: float) -> None:
    """Whatever the gradients are: a loss can be infinite where they are not. The next step is none the wiser."""
    made, optimizer = built(name)
    is_mars = isinstance(optimizer, MARS)
    before = content(made, optimizer, steps=not is_mars)
    with patch.object(Batch, "guarded", guarded):
        set_gradients(made, 2, spoilt)
        step_if(optimizer, NO)
        assert_same(before, content(made, optimizer, steps=not is_mars))
        set_gradients(made, 3)
        optimizer.step()
    other, plain = built(name)
    set_gradients(other, 3)
    for state in plain.state.values():
        state.update({"step": state["step"] + 1} if is_mars else {})  # in MARS it counts
    with patch.object(Batch, "guarded", guarded):
        plain.step()
    assert_same(content(other, plain), content(made, optimizer))


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_who_waits_for_the_value(name: str) -> None:
    """The meta device has none, so that reading one is an error. There torch's optimizers are not fused."""
    with torch.device("meta"):
        made = model()
    optimizer = build_optimizer(made, replace(CONFIG, optimizer=name, compile_optimizer=False))
    for _ in range(3):
        for parameter in made.parameters():
            parameter.grad = torch.empty_like(parameter)
        with nullcontext() if isinstance(optimizer, MARS) else pytest.raises(RuntimeError, match="meta tensors"):
            step_if(optimizer, torch.empty((), dtype=torch.bool, device="meta"))


def test_torch_s_fused_optimizers_do_not_wait() -> None:
    class Watched(Tensor):
        def __bool__(self) -> bool:
            raise AssertionError("was read")

    for name in ("adamw", "sgd"):
        made, optimizer = built(name)
        set_gradients(made, 2)
        step_if(optimizer, YES.as_subclass(Watched))
    made, optimizer = built("nadamw")
    with pytest.raises(AssertionError, match="was read"):
        step_if(optimizer, YES.as_subclass(Watched))
