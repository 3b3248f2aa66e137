"""The gradient estimate of MARS (arXiv 2411.10438, Algorithm 1): the gradient plus a scaled recursive correction.

    c_t = g_t + gamma * beta1 / (1 - beta1) * (g_t - r_t)

g_t is the gradient at x_t on batch t. The reference r_t is the gradient at x_{t-1}: on batch t as well in the exact
form, on batch t-1 (that is g_{t-1}, which was at hand) in the approximate form. gamma = 0 gives the plain gradient,
and gamma = 1 in the exact form STORM's estimate (Cutkosky & Orabona, arXiv 1905.10018). The corrected gradient is
then clipped to norm 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def corrected_gradient(grad: Tensor, reference: Tensor, gamma: float, beta1: float) -> Tensor:
    """c_t, before clipping. All tensors have one shape; the result is a new tensor."""
    return grad.add(grad - reference, alpha=gamma * beta1 / (1 - beta1))


def clip_factor(norm: Tensor) -> Tensor:
    """The factor (a scalar tensor) that brings a vector of this norm to norm 1 where it is longer."""
    return norm.clamp(min=1).reciprocal()


def norm_of_all(norms: list[Tensor]) -> Tensor:
    """The norm of the one vector made of the tensors with these norms (scalars, on any devices)."""
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
