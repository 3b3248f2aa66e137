"""The estimates of the gradient that an optimizer computes in a step, for whoever measures them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optim.mars import MARS
from optim.sharded import ShardedOptimizer

See = Callable[[str, Tensor, Tensor], None]


@contextmanager
def watch_estimates(optimizer: Optimizer, see: See) -> Iterator[None]:
    """Shows what the step that is made within the `with` block takes the gradient to be. The step is the same to the
    last bit.

    Args:
        see: called with a name, a parameter that this process steps, and an estimate in its shape, which is to be used
            at once. The names:
            "corrected": c_t of MARS before its clip. Not where a group's last gradient is folded into the moment.
            "average": the moving average m_t over the sum of its weights, 1 - beta1^t (of SGD, whose state has no t,
            over 1), as it is after the block. Not where there is none, nor where SGD's weight decay is in it.
    """
    inside = optimizer.optimizer if isinstance(optimizer, ShardedOptimizer) else optimizer
    if isinstance(inside, MARS):
        inside.watcher = partial(see, "corrected")
    try:
        yield
    finally:
        if isinstance(inside, MARS):
            inside.watcher = None
    if any("momentum" in group and group["weight_decay"] != 0 for group in inside.param_groups):
        return
    for group in inside.param_groups:
        for parameter in group["params"]:
            average = _moving_average(group, inside.state.get(parameter, {}), parameter.grad)
            if average is not None:
                see("average", parameter, average)


def _moving_average(group: dict[str, Any], state: dict[str, Any], grad: Tensor | None) -> Tensor | None:
    if state.get("momentum_buffer") is not None:  # the sum of beta^(t - i) * g_i
        momentum: Tensor = state["momentum_buffer"]
        return momentum * (1 - group["momentum"])
    if "folded" in state and grad is not None:
        average: Tensor = state["folded"] + group["gamma"] * grad
    elif "exp_avg" in state:
        average = state["exp_avg"]
    else:
        return None
    return average / (1 - group["betas"][0] ** state["step"].item())
