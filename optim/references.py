"""The reference gradients r_t of MARS: kept, recorded and handed from step to step.

`last_grad` is the last gradient (approximate form). In the exact form `reference_grad` is the one for the coming step,
and `next_reference_grad` the one for the step after it, recorded before the coming step is taken. An element that is
NaN is unknown and makes no correction; so does a reference of another shape than its parameter's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]
KEYS = ("last_grad", "reference_grad", "next_reference_grad")


class References:
    """The references in the states of parameters, and the memory that they take turns in."""

    def __init__(self) -> None:
        self._spare: dict[Tensor, Tensor] = {}

    @property
    def spare_bytes(self) -> int:
        """Bytes of memory that waits for the next reference gradient and is no part of any state."""
        return sum(memory.numel() * memory.element_size() for memory in self._spare.values())

    def forget(self) -> None:
        """Lets go of memory that holds no reference."""
        self._spare.clear()

    def make_ready(self, parameter: Tensor, state: State, group: dict[str, Any], corrects: bool) -> None:
        """Sees to it that a coming step has the reference that it needs, and none that it does not need.

        Args:
            corrects: whether gamma is not 0, now or at times.
        """
        name = "reference_grad" if group["exact"] else "last_grad"
        if not corrects:
            for key in KEYS:
                state.pop(key, None)  # out of date by the time that gamma is not 0 again
        elif group["last_grad"] != "folded" and (name not in state or state[name].shape != parameter.shape):
            first = state["step"].item() == 1
            # A parameter that had no gradient on the batch of the reference has one of zero.
            missing = group["exact"] and not first and name not in state
            value = 0.0 if missing or (first and group["first_step"] == "official") else math.nan
            dtype = torch.bfloat16 if group["last_grad"] == "bfloat16" else parameter.dtype
            layout = torch.preserve_format
            state[name] = torch.full_like(parameter, value, dtype=dtype, memory_format=layout)

    def record(self, parameter: Tensor, state: State, grad: Tensor) -> Tensor:
        """Exact form: copies the gradient on the next batch. Returns the copy."""
        memory = self._spare.pop(parameter, None)
        if memory is None:
            memory = torch.empty_like(parameter, memory_format=torch.preserve_format)
        state["next_reference_grad"] = memory.copy_(grad)
        return memory

    def advance(self, parameter: Tensor, state: State, corrects: bool) -> None:
        """Exact form, after a step: what was recorded for the next one becomes its reference."""
        used = state.pop("reference_grad", None)
        if not corrects:
            state["reference_grad"] = torch.empty(0)  # unknown, should gamma change
            return
        if used is not None and used.shape == parameter.shape:
            self._spare[parameter] = used
        if "next_reference_grad" in state:
            state["reference_grad"] = state.pop("next_reference_grad")
