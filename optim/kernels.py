"""A step as pure functions of tensors, one function for each way to turn m_t into a direction (arXiv 2411.10438).

Each takes one parameter's tensors, all of one shape and updated in place, reads each once and writes each once when
compiled (`runner.py`): memory traffic is all that a step costs. `clip` (0-d) is the factor that brings c_t to norm 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from optim.estimator import Scalars, compute_dtype, corrected_gradient, lerp, moving_average


class Flags(NamedTuple):
    """What a kernel is compiled for."""

    keep: bool
    """this gradient becomes the next step's reference"""
    folded: bool
    """`m` is s_t, which holds the last gradient too (`estimator.py`)"""
    guarded: bool
    """a clip of NaN says that the step is to change nothing"""
    lasting: bool = False
    """the reference is not used up by the step"""


def adamw_step(
    x: Tensor,
    grad: Tensor,
    reference: Tensor | None,
    m: Tensor,
    v: Tensor,
    clip: Tensor,
    scalars: Scalars | Tensor,
    flags: Flags,
) -> None:
    """MARS-AdamW (Algorithm 2): x - lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * x), v of the clipped c_t."""
    s = _unpack(scalars)
    c, m_new = moving_average(grad, reference, m, clip, s, flags.folded)
    v_new = lerp(v, c * c, s.rate2)
    _move(x, m_new / (v_new.sqrt() * s.root_scale + s.eps), clip, s, flags)
    _write(v, v_new, clip, flags)
    _keep(grad, reference, m, m_new, clip, s, flags)


def lion_step(
    x: Tensor, grad: Tensor, reference: Tensor | None, m: Tensor, clip: Tensor, scalars: Scalars | Tensor, flags: Flags
) -> None:
    """MARS-Lion (Algorithm 3): x - lr * (sign(m_t) + weight_decay * x)."""
    s = _unpack(scalars)
    _, m_new = moving_average(grad, reference, m, clip, s, flags.folded)
    sign = (m_new > 0).to(m_new.dtype) - (m_new < 0).to(m_new.dtype)  # faster than .sign() when compiled on a CPU
    _move(x, sign, clip, s, flags)
    _keep(grad, reference, m, m_new, clip, s, flags)


def sgd_step(
    x: Tensor, grad: Tensor, reference: Tensor | None, m: Tensor, clip: Tensor, scalars: Scalars | Tensor, flags: Flags
) -> None:
    """Gradient descent along the moving average: x - lr * (m_t + weight_decay * x)."""
    s = _unpack(scalars)
    _, m_new = moving_average(grad, reference, m, clip, s, flags.folded)
    _move(x, m_new, clip, s, flags)
    _keep(grad, reference, m, m_new, clip, s, flags)


def average_step(
    grad: Tensor,
    reference: Tensor | None,
    m: Tensor,
    out: Tensor,
    estimate: Tensor | None,
    clip: Tensor,
    scalars: Scalars | Tensor,
    flags: Flags,
) -> None:
    """The first half of a step whose direction needs the whole matrix: m_t goes to `out` too, in its dtype, and c_t to
    `estimate`."""
    s = _unpack(scalars)
    c, m_new = moving_average(grad, reference, m, clip, s, flags.folded)
    out.copy_(m_new)
    if estimate is not None:
        estimate.copy_(c)
    _keep(grad, reference, m, m_new, clip, s, flags)


def apply_step(x: Tensor, direction: Tensor, clip: Tensor, scalars: Scalars | Tensor, flags: Flags) -> None:
    """The second half: x - lr * (direction + weight_decay * x)."""
    _move(x, direction, clip, _unpack(scalars), flags)


def estimate_norm(grad: Tensor, reference: Tensor | None, scalars: Scalars | Tensor, flags: Flags) -> Tensor:
    """The norm of c_t before clipping (0-d)."""
    return torch.linalg.vector_norm(corrected_gradient(grad, reference, _unpack(scalars), flags.folded))


def _unpack(scalars: Scalars | Tensor) -> Scalars:
    return Scalars(*scalars.unbind()) if isinstance(scalars, Tensor) else scalars


def _move(x: Tensor, direction: Tensor, clip: Tensor, s: Scalars, flags: Flags) -> None:
    dtype = compute_dtype(x.dtype)
    _write(x, x.to(dtype) * s.decay - direction.to(dtype) * s.step_size, clip, flags)


def _keep(
    grad: Tensor, reference: Tensor | None, m: Tensor, m_new: Tensor, clip: Tensor, s: Scalars, flags: Flags
) -> None:
    """What the next step needs."""
    _write(m, m_new - s.gamma * grad if flags.folded else m_new, clip, flags)
    if flags.keep and reference is not None:
        _write(reference, grad, clip, flags)


def _write(old: Tensor, new: Tensor, clip: Tensor, flags: Flags) -> None:
    old.copy_(torch.where(clip != clip, old, new) if flags.guarded else new)
