"""A step that is made or not by a value on the device, which the host doesn't have to wait for."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optim.mars import MARS
from optim.sharded import ShardedOptimizer


def step_if(optimizer: Optimizer, allowed: Tensor) -> None:
    """Steps if `allowed`; otherwise parameters and moments stay as they are.

    MARS and torch's fused optimizers look at the value on the device; others wait for it. A step that was not allowed
    counts as one in MARS (`step` of its states) and in no other.

    Args:
        optimizer: has made a step, or was loaded with the state of one: the first step of fused SGD makes its momentum,
            and would leave it without values.
        allowed: bool (0-d) on the device of the parameters; with a sharded optimizer the same on all processes.
    """
    inside: Any = optimizer.optimizer if isinstance(optimizer, ShardedOptimizer) else optimizer
    if isinstance(inside, MARS):
        inside.step_allowed = allowed
        try:
            optimizer.step()
        finally:
            inside.step_allowed = None
    elif getattr(inside, "_step_supports_amp_scaling", False):
        inside.found_inf = (~allowed).float()  # where a GradScaler says so
        try:
            optimizer.step()
        finally:
            del inside.found_inf
    elif allowed:
        optimizer.step()
