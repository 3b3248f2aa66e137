"""A step as pure functions of tensors, one function for each way to turn m_t into a direction (arXiv 2411.10438).

Each takes one parameter's tensors, all of one shape and updated in place, reads each once and writes each once when
compiled (`runner.py`): memory traffic is all that a step costs. `clip` (0-d) is the factor that brings c_t to norm 1.
With `guarded` a clip of NaN says that the step is to change nothing. `keep` says that this gradient becomes the next
step's reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optim.estimator import Scalars, compute_dtype, corrected_gradient, moving_average


def adamw_step(
    x: Tensor,
    grad: Tensor,
    reference: Tensor | None,
    m: Tensor,
    v: Tensor,
    clip: Tensor,
    scalars: Scalars | Tensor,
    keep: bool,
    folded: bool,
    guarded: bool,
) -> None:
    """MARS-AdamW (Algorithm 2): x - lr * (m_hat / (sqrt(v_hat) + eps) + weight_decay * x), v of the clipped c_t."""
    s = _unpack(scalars)
    c, m_new = moving_average(grad, reference, m, clip, s, folded)
    v_new = torch.lerp(v, c * c, s.rate2)
    direction = m_new / (v_new.sqrt() * s.root_scale + s.eps)
    _move(x, direction, clip, s, guarded)
    _write(v, v_new, clip, guarded)
    _write(m, m_new - s.gamma * grad if folded else m_new, clip, guarded)
    if keep and reference is not None:
        _write(reference, grad, clip, guarded)


def lion_step(
    x: Tensor,
    grad: Tensor,
    reference: Tensor | None,
    m: Tensor,
    clip: Tensor,
    scalars: Scalars | Tensor,
    keep: bool,
    folded: bool,
    guarded: bool,
) -> None:
    """MARS-Lion (Algorithm 3): x - lr * (sign(m_t) + weight_decay * x)."""
    s = _unpack(scalars)
    _, m_new = moving_average(grad, reference, m, clip, s, folded)
    _move(x, (m_new > 0).to(m_new.dtype) - (m_new < 0).to(m_new.dtype), clip, s, guarded)
    _write(m, m_new - s.gamma * grad if folded else m_new, clip, guarded)
    if keep and reference is not None:
        _write(reference, grad, clip, guarded)


def sgd_step(
    x: Tensor,
    grad: Tensor,
    reference: Tensor | None,
    m: Tensor,
    clip: Tensor,
    scalars: Scalars | Tensor,
    keep: bool,
    folded: bool,
    guarded: bool,
) -> None:
    """Gradient descent along the moving average: x - lr * (m_t + weight_decay * x)."""
    s = _unpack(scalars)
    _, m_new = moving_average(grad, reference, m, clip, s, folded)
    _move(x, m_new, clip, s, guarded)
    _write(m, m_new - s.gamma * grad if folded else m_new, clip, guarded)
    if keep and reference is not None:
        _write(reference, grad, clip, guarded)


def average_step(
    grad: Tensor,
    reference: Tensor | None,
    m: Tensor,
    out: Tensor,
    estimate: Tensor | None,
    clip: Tensor,
    scalars: Scalars | Tensor,
    keep: bool,
    folded: bool,
    guarded: bool,
) -> None:
    """The first half of a step whose direction needs the whole matrix: m_t goes to `out` too, in its dtype, and c_t to
    `estimate`."""
    s = _unpack(scalars)
    c, m_new = moving_average(grad, reference, m, clip, s, folded)
    out.copy_(m_new)
    if estimate is not None:
        estimate.copy_(c)
    _write(m, m_new - s.gamma * grad if folded else m_new, clip, guarded)
    if keep and reference is not None:
        _write(reference, grad, clip, guarded)


def apply_step(x: Tensor, direction: Tensor, clip: Tensor, scalars: Scalars | Tensor, guarded: bool) -> None:
    """The second half: x - lr * (direction + weight_decay * x)."""
    s = _unpack(scalars)
    _move(x, direction, clip, s, guarded)


def estimate_norm(grad: Tensor, reference: Tensor | None, scalars: Scalars | Tensor) -> Tensor:
    """The norm of c_t before clipping (0-d)."""
    return torch.linalg.vector_norm(corrected_gradient(grad, reference, _unpack(scalars), folded=False))


def _unpack(scalars: Scalars | Tensor) -> Scalars:
    return Scalars(*scalars.unbind()) if isinstance(scalars, Tensor) else scalars


def _move(x: Tensor, direction: Tensor, clip: Tensor, s: Scalars, guarded: bool) -> None:
    dtype = compute_dtype(x.dtype)
    _write(x, x.to(dtype) * s.decay - direction.to(dtype) * s.step_size, clip, guarded)


def _write(old: Tensor, new: Tensor, clip: Tensor, guarded: bool) -> None:
    old.copy_(torch.where(clip != clip, old, new) if guarded else new)
