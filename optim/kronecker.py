"""Shampoo (Gupta et al., arXiv 1802.09568): a matrix is preconditioned from both sides.

    L = sum of c c^T,  R = sum of c^T c,  direction = L^(-1/4) m R^(-1/4)

The sums are decaying averages, corrected for their start at zero, or sums over all steps as in the paper. The roots
are costly and found anew every few steps only, and before that at steps 1, 2, 4, 8 and so on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def new_factors(matrix: Tensor) -> dict[str, Tensor]:
    """The state of one matrix (rows, columns): two factors, and their roots."""
    rows, columns = matrix.shape
    return {
        name: matrix.new_zeros(size, size)
        for name, size in (
            ("factor_left", rows),
            ("factor_right", columns),
            ("root_left", rows),
            ("root_right", columns),
        )
    }


def kronecker_direction(
    m: Tensor, c: Tensor, clip: Tensor, state: dict[str, Tensor], step: int, group: dict[str, Any]
) -> Tensor:
    """Takes c_t (rows, columns) into the factors and returns the direction for m_t (rows, columns).

    Args:
        clip: NaN where the step is to change nothing.
        state: of `new_factors`, updated in place.
        step: which step this is, from 1.
        group: betas, factors ("averaged" with beta2, or "accumulated"), refresh_interval, damping.
    """
    beta2 = group["betas"][1] if group["factors"] == "averaged" else None
    for name, gram in (("factor_left", c @ c.T), ("factor_right", c.T @ c)):
        factor = state[name]
        new = factor + gram if beta2 is None else factor.lerp(gram, 1 - beta2)
        factor.copy_(torch.where(clip != clip, factor, new))
    # More often at the start, where statistics change most, and a first gradient of zero gives no roots.
    if (step - 1) % group["refresh_interval"] == 0 or (step < group["refresh_interval"] and step & (step - 1) == 0):
        correction = 1.0 if beta2 is None else 1 - beta2**step
        for side in ("left", "right"):
            state[f"root_{side}"].copy_(inverse_fourth_root(state[f"factor_{side}"] / correction, group["damping"]))
    return state["root_left"] @ m @ state["root_right"]


def inverse_fourth_root(factor: Tensor, damping: float) -> Tensor:
    """(F + damping * largest eigenvalue * I)^(-1/4) of a symmetric positive semidefinite F; zero where F is zero."""
    values, vectors = torch.linalg.eigh(factor)
    largest = values[-1].clamp(min=0)
    roots = (values.clamp(min=0) + damping * largest).pow(-0.25)
    return (vectors * torch.where(largest > 0, roots, 0)) @ vectors.T
