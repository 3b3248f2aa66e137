"""The estimator whose reference is a mean of earlier gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optim.clipping import norm_of
from optim.estimator import Number, Scalars, compute_dtype
from optim.estimators.interface import Estimator, State, filled_like
from optim.kernels import Flags

if TYPE_CHECKING:
    from optim.batch import Batch
    from optim.clipping import Clipping
    from optim.runner import Runner


class MeanGradient(Estimator):
    """ "reference": every tau steps (`reference_interval`) the mean of the last tau gradients becomes the reference.

        c_t = g_t + gamma * (g_ref - g_t),    g_ref = (g_{t0-tau+1} + ... + g_{t0}) / tau,    t0 the last refresh

    gamma = 0 is the plain gradient, gamma = 1 the reference alone. Between refreshes gradients are summed up, so that
    tau of them need not be kept. Until the first refresh c_t = g_t. A step that changed nothing, since a gradient was
    not finite, is not in the mean. This is a heavy moving average in all but name: for independent gradients of
    variance s^2 that of c_t is ((1 - gamma)^2 + gamma^2 / tau) s^2, and its bias is gamma times how far the gradient
    has moved since the mean was taken, up to 2 tau steps ago.

    State: g_ref, the sum, and the number of gradients in it. Cost: one gradient an update; summing reads and writes the
    sum once.
    """

    keys = ("mean_grad", "grad_sum", "grad_count")
    corrects = True
    lasting = True

    def weight(self, group: dict[str, Any]) -> Number:
        return 1 - group["gamma"]

    def reference(self, state: State) -> Tensor | None:
        return state.get("mean_grad")

    def make_ready(self, parameter: Tensor, state: State, group: dict[str, Any]) -> None:
        super().make_ready(parameter, state, group)
        if "mean_grad" not in state:
            dtype = compute_dtype(parameter.dtype)
            state["mean_grad"] = filled_like(parameter, math.nan, dtype)
            state["grad_sum"] = filled_like(parameter, 0.0, dtype)
            state["grad_count"] = torch.zeros((), dtype=dtype, device=parameter.device)

    def after_step(self, batch: Batch, run: Runner, clipping: Clipping) -> None:
        states, scalars, flags = batch.states, batch.scalars(), batch.flags
        sums, counts = [state["grad_sum"] for state in states], [state["grad_count"] for state in states]
        if batch.guarded or not clipping.skipped:
            run.update(add_gradient, list(zip(sums, batch.grads, batch.clips, strict=True)), scalars, flags)
            assert clipping.skipped is not None
            torch._foreach_add_(counts, (~clipping.skipped).to(counts[0]))
        if batch.step % batch.group["reference_interval"] == 0:
            means = [state["mean_grad"] for state in states]
            run.update(take_mean, list(zip(means, sums, counts, strict=True)), scalars, flags)
            torch._foreach_zero_(counts)
            for mean in means if batch.device.type == "cpu" else []:
                clipping.remember(mean, norm_of(mean))


def add_gradient(total: Tensor, grad: Tensor, clip: Tensor, scalars: Scalars | Tensor, flags: Flags) -> None:
    """A kernel (`kernels.py`): a sum with this gradient, unless the step is to change nothing."""
    new = total + grad
    total.copy_(torch.where(clip != clip, total, new) if flags.guarded else new)


def take_mean(mean: Tensor, total: Tensor, count: Tensor, scalars: Scalars | Tensor, flags: Flags) -> None:
    """A kernel: the mean of a new sum, which begins anew. An empty sum leaves the old mean."""
    mean.copy_(torch.where(count > 0, total / count, mean))
    total.zero_()
