"""Stochastic variance reduced gradients (Johnson & Zhang, NIPS 2013)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optim.estimator import Number, Scalars, compute_dtype
from optim.estimators.interface import SecondGradient, State, filled_like
from optim.kernels import Flags

if TYPE_CHECKING:
    from optim.batch import Batch
    from optim.clipping import Clipping
    from optim.runner import Runner


class SVRG(SecondGradient):
    """ "svrg": what this batch's gradient at the weights of a snapshot has beside their mean gradient is taken off.

        c_t = g_t - gamma * (h_t - mu),    h_t = grad f(x~, batch t),    mu = mean over n batches of grad f(x~, batch)

    gamma is the coefficient of the control variate h_t; 1 is SVRG as published, where mu is over all of the data.
    Every k updates the snapshot x~ is the parameters' present values. For h_t of covariance with g_t the variance is
    var g - 2 gamma cov(g, h) + gamma^2 var h, and gamma^2 var(h) / n comes from mu, the same error until the next
    snapshot.

    k and n are those of the loop that takes gradients: configs have them, and `MARS.take_snapshot` shows it.

    State: x~ (of parameters that are not corrected as well), mu, the number of gradients in it, and h_t, whose memory
    is held between steps. Cost: two gradients an update, and n more every k updates.
    """

    keys = ("reference_grad", "snapshot_grad", "snapshot_count")

    def __init__(self) -> None:
        super().__init__()
        self._recorded = False

    def weight(self, group: dict[str, Any]) -> Number:
        return 1 - group["gamma"]

    def reference(self, state: State) -> Tensor | None:
        return state.get("reference_grad")

    def make_ready(self, parameter: Tensor, state: State, group: dict[str, Any]) -> None:
        super().make_ready(parameter, state, group)
        if "snapshot_grad" not in state:
            state.pop("reference_grad", None)
        elif "reference_grad" not in state:  # no gradient on this batch at the snapshot is one of zero
            state["reference_grad"] = self._memory(parameter).zero_()

    def take(self, states: list[tuple[Tensor, State, bool]]) -> None:
        """The present parameters become the snapshot."""
        for parameter, state, _ in states:
            if "snapshot" in state:
                state["snapshot"].copy_(parameter)
            for key in {"snapshot_grad", "snapshot_count"} & set(state):
                state[key].zero_()

    def add(self, parameter: Tensor, state: State, grad: Tensor, corrects: bool, finite: Tensor) -> None:
        """Takes a gradient at the snapshot into its mean.

        Args:
            corrects: whether the parameter's gradient is corrected, now or at times.
            finite: whether the gradient may be used (0-d).
        """
        if "snapshot" not in state:
            state["snapshot"] = parameter.detach().clone(memory_format=torch.preserve_format)
        if corrects:
            dtype = compute_dtype(parameter.dtype)
            if "snapshot_grad" not in state:
                state["snapshot_grad"] = filled_like(parameter, 0.0, dtype)
                state["snapshot_count"] = torch.zeros((), dtype=dtype, device=parameter.device)
            mean, count = state["snapshot_grad"], state["snapshot_count"]
            count += finite
            mean.copy_(torch.where(finite, mean.lerp(grad.to(dtype), 1 / count), mean))

    def swap(self, states: list[tuple[Tensor, State, bool]]) -> None:
        """Parameters and their snapshots change places; nothing is copied."""
        for parameter, state, _ in states:
            if "snapshot" in state:
                parameter.data, state["snapshot"] = state["snapshot"], parameter.data

    def record(self, parameter: Tensor, state: State, grad: Tensor) -> Tensor:
        self._recorded = True
        memory = state.get("reference_grad")
        state["reference_grad"] = (self._memory(parameter) if memory is None else memory).copy_(grad)
        return state["reference_grad"]

    def check(self, states: list[State]) -> None:
        recorded = self._recorded or any("reference_grad" in state for state in states)
        if not recorded and any("snapshot_grad" in state for state in states):
            raise RuntimeError(
                "svrg has no gradient at the snapshot for this step: in each update, compute the gradient on this "
                "batch within snapshot_weights(), and call record_reference_gradient()"
            )

    def before_step(self, batch: Batch, run: Runner, clipping: Clipping) -> None:
        """Makes h_t the reference r_t = g_t - h_t + mu, for which c_t = (1 - gamma) g_t + gamma r_t."""
        rows = [
            (state["reference_grad"], grad, state["snapshot_grad"], state["snapshot_count"])
            for state, grad in zip(batch.states, batch.grads, strict=True)
            if "reference_grad" in state
        ]
        run.update(center, rows, batch.scalars(), batch.flags)
        for reference, *_ in rows:
            clipping.forget(reference)

    def finish(self, states: list[tuple[Tensor, State, bool]]) -> None:
        for parameter, state, _ in states:
            if "reference_grad" in state:
                self._spare[parameter] = state.pop("reference_grad")
        self._recorded = False

    def _memory(self, parameter: Tensor) -> Tensor:
        spare = self._spare.pop(parameter, None)
        return filled_like(parameter, math.nan, compute_dtype(parameter.dtype)) if spare is None else spare


def center(
    reference: Tensor, grad: Tensor, mean: Tensor, count: Tensor, scalars: Scalars | Tensor, flags: Flags
) -> None:
    """A kernel (`kernels.py`): h becomes g - h + mu, where a mu of no gradients is unknown."""
    reference.copy_(torch.where(count > 0, grad - reference + mean, math.nan))
