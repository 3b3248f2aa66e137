"""The estimator of MARS (Yuan et al., arXiv 2411.10438, Algorithm 1), and the published experiments' approximation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from optim.estimator import Number
from optim.estimators.interface import Estimator, SecondGradient, State, filled_like


class Recursive(Estimator):
    """ "recursive", the approximate form: the reference is the last gradient.

        c_t = g_t + gamma * beta1 / (1 - beta1) * (g_t - g_{t-1}),    g_t = grad f(x_t, batch t)

    State: the last gradient (none where it is folded into the moment). Cost: one gradient an update.
    """

    keys = ("last_grad",)
    corrects = True
    keeps = True

    def weight(self, group: dict[str, Any]) -> Number:
        return _weight(group)

    def reference(self, state: State) -> Tensor | None:
        return state.get("last_grad")

    def make_ready(self, parameter: Tensor, state: State, group: dict[str, Any]) -> None:
        super().make_ready(parameter, state, group)
        if group["last_grad"] != "folded" and _lacks(state, "last_grad", parameter):
            value = 0.0 if state["step"].item() == 1 and group["first_step"] == "official" else math.nan
            dtype = torch.bfloat16 if group["last_grad"] == "bfloat16" else parameter.dtype
            state["last_grad"] = filled_like(parameter, value, dtype)


class Exact(SecondGradient):
    """ "recursive", the exact form: the reference is the gradient of the last parameters on this step's batch.

        c_t = g_t + gamma * beta1 / (1 - beta1) * (g_t - r_t),    r_t = grad f(x_{t-1}, batch t)

    gamma = 1 is STORM's estimate (Cutkosky & Orabona, arXiv 1905.10018). A reference is recorded one step early, so
    that no old parameters are kept: while x_{t-1} are the present ones.

    State: the reference for the coming step, `reference_grad`, and from its recording to the next step that for the
    step after it, `next_reference_grad`. Cost: two gradients an update.
    """

    keys = ("reference_grad", "next_reference_grad")

    def __init__(self) -> None:
        super().__init__()
        self._recorded = (False, False)  # whether there was a recording for the coming step, and for the one after it

    def weight(self, group: dict[str, Any]) -> Number:
        return _weight(group)

    def reference(self, state: State) -> Tensor | None:
        return state.get("reference_grad")

    def make_ready(self, parameter: Tensor, state: State, group: dict[str, Any]) -> None:
        super().make_ready(parameter, state, group)
        if _lacks(state, "reference_grad", parameter):
            first = state["step"].item() == 1
            # A parameter that had no gradient on the batch of the reference has one of zero.
            missing = not first and "reference_grad" not in state
            value = 0.0 if missing or (first and group["first_step"] == "official") else math.nan
            state["reference_grad"] = filled_like(parameter, value, parameter.dtype)

    def start_record(self, states: list[tuple[Tensor, State, bool]]) -> None:
        if any("next_reference_grad" in state for _, state, _ in states):
            self._advance(states)  # the step before was skipped, as a GradScaler does after an overflow
        self._recorded = (self._recorded[0], True)

    def record(self, parameter: Tensor, state: State, grad: Tensor) -> Tensor:
        memory = self._spare.pop(parameter, None)
        if memory is None:
            memory = torch.empty_like(parameter, memory_format=torch.preserve_format)
        state["next_reference_grad"] = memory.copy_(grad)
        return memory

    def check(self, states: list[State]) -> None:
        # A parameter that had no gradient on the batch of the reference has a reference of zero; that none at all has
        # one means that it was not recorded.
        if states and not self._recorded[0] and not any("reference_grad" in state for state in states):
            raise RuntimeError(
                "exact MARS has no reference gradient for this step: in each update, compute the gradient on the next "
                "batch and call record_reference_gradient() before computing the gradient on this batch"
            )

    def finish(self, states: list[tuple[Tensor, State, bool]]) -> None:
        self._advance(states)
        self._recorded = (self._recorded[1], False)

    def _advance(self, states: list[tuple[Tensor, State, bool]]) -> None:
        """Goes on to the next batch, also for parameters that had no gradient on this one: what was recorded for the
        next step becomes its reference."""
        for parameter, state, corrects in states:
            used = state.pop("reference_grad", None)
            if not corrects:
                state["reference_grad"] = torch.empty(0)  # unknown, should gamma change
                continue
            if used is not None and used.shape == parameter.shape:
                self._spare[parameter] = used
            if "next_reference_grad" in state:
                state["reference_grad"] = state.pop("next_reference_grad")


def _weight(group: dict[str, Any]) -> Number:
    beta1 = group["betas"][0]
    return 1 + group["gamma"] * beta1 / (1 - beta1)


def _lacks(state: State, name: str, parameter: Tensor) -> bool:
    return name not in state or state[name].shape != parameter.shape
