"""How MARS turns the moving average of its gradient estimate into a direction (arXiv 2411.10438, section 3).

A preconditioner states which tensors it keeps for a parameter and computes x <- x - lr * direction(m_t, c_t, state)
from them. Weight decay, learning rate, moving average and estimate are shared by all and live in `mars.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def adamw_direction(m: Tensor, c: Tensor, v: Tensor, step: float, beta1: float, beta2: float, eps: float) -> Tensor:
    """MARS-AdamW (Algorithm 2): m_hat / (sqrt(v_hat) + eps), both moments corrected for their start at zero.

    Args:
        m: moving average of the gradient estimate, after this step.
        c: this step's (clipped) gradient estimate.
        v: moving average of c squared, before this step; updated in place.
        step: which step this is, from 1.

    Returns:
        the direction, shaped like `m` (all tensors have one shape).
    """
    v.mul_(beta2).addcmul_(c, c, value=1 - beta2)
    denominator = v.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
    return torch.div(m, denominator.mul_(1 - beta1**step))


@dataclass(frozen=True)
class Preconditioner:
    """The names of the tensors kept beside the first moment, and the direction computed from them."""

    state_names: tuple[str, ...]
    direction: Callable[[Tensor, Tensor, dict[str, Any], dict[str, Any]], Tensor]
    """(m, c, the parameter's state, its group's settings) -> direction"""


def _adamw(m: Tensor, c: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    beta1, beta2 = group["betas"]
    return adamw_direction(m, c, state["exp_avg_sq"], state["step"].item(), beta1, beta2, group["eps"])


PRECONDITIONERS = {"adamw": Preconditioner(("exp_avg_sq",), _adamw)}
