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


def lion_direction(m: Tensor) -> Tensor:
    """MARS-Lion (Algorithm 3): the sign of the moving average."""
    return m.sign()


def shampoo_direction(m: Tensor, orthogonal: str) -> Tensor:
    """MARS-Shampoo (Algorithm 4): the orthogonal factor U V^T of the moving average m = U S V^T.

    Scaled by sqrt(max(1, rows / columns)), as in the published code, so that the root mean square of an output's change
    does not depend on the shape.

    Args:
        m: two dimensions or more; those behind the first count as one (the inputs of a convolution).
        orthogonal: "newton-schulz" or "svd".
    """
    matrix = m.flatten(1)
    factor = newton_schulz(matrix) if orthogonal == "newton-schulz" else svd_factor(matrix)
    return factor.mul(max(1.0, matrix.shape[0] / max(1, matrix.shape[1])) ** 0.5).view_as(m)


def newton_schulz(matrix: Tensor, steps: int = 5) -> Tensor:
    """An approximate orthogonal factor by a quintic Newton-Schulz iteration in bfloat16 (Muon, Jordan et al. 2024).

    The coefficients trade accuracy for speed: singular values end between about 0.7 and 1.2 instead of at 1.

    Args:
        matrix: (rows, columns).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16()
    x = x / (torch.linalg.vector_norm(x) + 1e-7)
    wide = x if matrix.shape[0] <= matrix.shape[1] else x.T  # the Gram matrix below is then the smaller one
    for _ in range(steps):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return (wide if matrix.shape[0] <= matrix.shape[1] else wide.T).to(matrix.dtype)


def svd_factor(matrix: Tensor) -> Tensor:
    """The exact orthogonal factor; slow, for tests and small matrices. Singular values of zero contribute nothing."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return (u * (s > 0)) @ vh


@dataclass(frozen=True)
class Preconditioner:
    """The names of the tensors kept beside the first moment, and the direction computed from them."""

    state_names: tuple[str, ...]
    direction: Callable[[Tensor, Tensor, dict[str, Any], dict[str, Any]], Tensor]
    """(m, c, the parameter's state, its group's settings) -> direction"""
    min_dim: int = 0
    """how many dimensions a parameter needs"""


def _adamw(m: Tensor, c: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    beta1, beta2 = group["betas"]
    return adamw_direction(m, c, state["exp_avg_sq"], state["step"].item(), beta1, beta2, group["eps"])


PRECONDITIONERS = {
    "adamw": Preconditioner(("exp_avg_sq",), _adamw),
    "lion": Preconditioner((), lambda m, c, state, group: lion_direction(m)),
    "shampoo": Preconditioner((), lambda m, c, state, group: shampoo_direction(m, group["orthogonal"]), min_dim=2),
}
