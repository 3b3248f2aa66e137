"""The arithmetic of a gradient estimate and of its moving average, the same for all estimators (`estimators/`).

    c_t = w * g_t + (1 - w) * r_t,    then clipped to norm 1
    m_t = beta1 * m_{t-1} + (1 - beta1) * c_t

g_t is the gradient at x_t on batch t. The estimator says what the reference r_t is, and the weight w. For that of MARS
(arXiv 2411.10438, Algorithm 1) w = 1 + gamma * beta1 / (1 - beta1), which makes

    c_t = g_t + gamma * beta1 / (1 - beta1) * (g_t - r_t)

Folded form. Where r_t is g_{t-1} and nothing is clipped, s_t = m_t - gamma * g_t carries all that the next step needs:

    m_t = beta1 * s_{t-1} + (1 - beta1 + gamma * beta1) * g_t

so that no last gradient is kept. (s_t is (1 - gamma) times the moving average of g: m_t is quasi-hyperbolic momentum,
Ma & Yarats, arXiv 1810.06801.)

A NaN in a reference, or in s, stands for "unknown": the element makes no correction. Gradients that are not finite
never get there, since a step that has one changes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Number = float | Tensor


class Scalars(NamedTuple):
    """What a step multiplies with: numbers, or 0-d tensors, so that new values are no reason to compile anew."""

    gamma: Number
    boost: Number  # w, the weight of g_t in c_t, where r_t has the rest
    rate: Number  # 1 - beta1
    rate2: Number  # 1 - beta2
    root_scale: Number  # 1 / sqrt(1 - beta2^t)
    eps: Number
    step_size: Number  # lr, over 1 - beta1^t where the preconditioner corrects the first moment
    decay: Number  # 1 - lr * weight_decay


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic and moments for parameters of a dtype: float32 for those of 16 bits."""
    return torch.promote_types(dtype, torch.float32)


def corrected_gradient(grad: Tensor, reference: Tensor | None, s: Scalars, folded: bool) -> Tensor:
    """c_t before clipping; without a reference the gradient, in the folded form its part that depends on g_t.

    Args:
        grad, reference: of one shape, each in any dtype.

    Returns:
        a tensor of the dtype of arithmetic; `grad` itself where there is nothing to do.
    """
    grad = grad.to(compute_dtype(grad.dtype))
    if folded:
        return grad * s.boost
    if reference is None:
        return grad
    reference = reference.to(grad.dtype)
    reference = torch.where(reference != reference, grad, reference)
    if isinstance(s.boost, Tensor):
        return grad + (s.boost - 1) * (grad - reference)
    return torch.lerp(reference, grad, s.boost)


def moving_average(
    grad: Tensor, reference: Tensor | None, m: Tensor, clip: Tensor, s: Scalars, folded: bool
) -> tuple[Tensor, Tensor]:
    """(c_t clipped, m_t). `m` is m_{t-1}, in the folded form s_{t-1}; `clip` the factor, 0-d."""
    c = corrected_gradient(grad, reference, s, folded) * clip
    if folded:
        m = torch.where(m != m, -(s.gamma * grad), m)
    return c, lerp(m, c, s.rate)


def lerp(a: Tensor, b: Tensor, weight: Number) -> Tensor:
    """a + weight * (b - a). torch.lerp saves an eager step two passes; compiled it would compute two formulas for each
    element, of which it takes one."""
    return a + weight * (b - a) if isinstance(weight, Tensor) else torch.lerp(a, b, weight)
