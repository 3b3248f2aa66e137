"""Gradients clipped to a norm, which is taken once an update.

What clips knows the norm of each gradient, and MARS asks for it before a step (`clipping.py`). On a CPU, where a value
can be read at no cost, the norms stay at hand for it, and nothing is multiplied unless a clip is due.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from optim.estimator import compute_dtype

ROW = 2**12  # elements of a gradient whose norm is summed up at a time

_known = WeakTensorKeyDictionary()  # gradients, with their version and norm


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Clips the gradients of parameters, as one vector, to a norm; as torch's `clip_grad_norm_` does, but that on a CPU
    the norm of a tensor of more than 4,096 elements is summed up in parts: by all threads, and closer. (torch's own of
    19M elements in float32 is off by up to a thousandth.)

    Args:
        max_norm: 0 takes the norm only.

    Returns:
        the norm before, 0-d, on the device of the first gradient.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads or not all(_on_host(grad) and grad.dtype == grads[0].dtype for grad in grads):
        total = nn.utils.get_total_norm(grads)
        if max_norm > 0:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total
    norms = torch.stack([_norm(grad) for grad in grads])
    total, factor = torch.linalg.vector_norm(norms), 1.0
    if max_norm > 0:
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0).item()  # torch's
        if factor != 1:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    if math.isfinite(total):  # after a clip to 0 a gradient that was not finite may look as if it were
        for grad, norm in zip(grads, norms.tolist(), strict=True):
            _known[grad] = (grad._version, norm * factor)
    return total


def host_norm(grad: Tensor) -> float:
    """The norm of a gradient on a CPU; taken only where `clip_gradients` has not left it, or the gradient has changed.
    It is left for one use: communication writes to gradients unseen."""
    version, norm = _known.pop(grad, (None, 0.0))
    if version is not None and version == grad._version:
        return norm
    return _norm(grad).item()


def _norm(grad: Tensor) -> Tensor:
    """The norm of a gradient on a CPU (0-d), the same to the last bit with any number of threads."""
    dtype = compute_dtype(grad.dtype)
    if grad.numel() <= ROW or not grad.is_contiguous():
        return torch.linalg.vector_norm(grad, dtype=dtype)
    flat = grad.view(-1)
    whole = flat.numel() // ROW * ROW
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1, dtype=dtype)
    if whole < flat.numel():
        norms = torch.cat([norms, torch.linalg.vector_norm(flat[whole:], dtype=dtype).view(1)])
    return _norm(norms)


def _on_host(grad: Tensor) -> bool:
    """Whether a gradient lies on a CPU in full precision, where its product has the product of its norm."""
    plain = grad.layout == torch.strided and not grad.is_complex() and not grad.is_inference()
    return plain and grad.device.type == "cpu" and grad.dtype == compute_dtype(grad.dtype)
