"""Kernels of a CPU without a compiler: the same steps as in `kernels.py`, in place and by few of torch's operations.

MARS-AdamW is AdamW on c_t, and torch has AdamW as one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from optim.estimator import Scalars, corrected_gradient
from optim.kernels import Flags, adamw_step

MANY_STEPS = torch.tensor(math.inf)  # after which nothing is left of AdamW's bias corrections: they are in the scalars


def adamw_in_place(
    x: Tensor,
    grad: Tensor,
    reference: Tensor | None,
    m: Tensor,
    v: Tensor,
    clip: Tensor,
    scalars: Scalars,
    flags: Flags,
) -> None:
    """`adamw_step`, to the last bits but two or three. c_t takes the reference's memory, unless that is lasting."""
    _, boost, rate, rate2, root_scale, eps, step_size, decay = (float(scalar) for scalar in scalars)
    c = grad
    if flags.lasting:
        c = corrected_gradient(grad, reference, scalars, folded=False)
    elif reference is not None:
        if reference.sum().isnan():
            reference.copy_(torch.where(reference != reference, grad, reference))
        c = reference.lerp_(grad, boost)
    if clip != 1:
        c = c * clip
    lr = step_size / root_scale
    torch._fused_adamw_(
        [x],
        [c],
        [m],
        [v],
        [],
        [MANY_STEPS],
        lr=lr,
        beta1=1 - rate,
        beta2=1 - rate2,
        weight_decay=(1 - decay) / lr if lr > 0 else 0.0,
        eps=eps / root_scale,
        amsgrad=False,
        maximize=False,
    )
    if flags.keep and reference is not None:
        reference.copy_(grad)


IN_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {adamw_step: adamw_in_place}


def in_place(kernel: Callable[..., Any], row: Sequence[Tensor | None]) -> Callable[..., Any]:
    """What takes the kernel's place for a row of tensors; itself unless they are on a CPU, of one dtype, dense."""
    tensors = [tensor for tensor in row if tensor is not None]
    first = tensors[0]
    alike = all(tensor.dtype == first.dtype and tensor.is_contiguous() for tensor in tensors)
    return IN_PLACE.get(kernel, kernel) if alike and first.device.type == "cpu" else kernel
