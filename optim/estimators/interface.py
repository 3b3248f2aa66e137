"""What all estimators of the gradient have in common.

Each is c_t = w g_t + (1 - w) r_t, so that kernels, norms and clips need no more than the weight w and, for each
parameter, the reference r_t. An estimator says what w is, has r_t ready when a step comes, and keeps what it needs for
later ones in the states of the parameters. An element of r_t that is NaN is unknown and makes no correction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optim.estimator import Number

if TYPE_CHECKING:
    from optim.batch import Batch
    from optim.clipping import Clipping
    from optim.runner import Runner

State = dict[str, Any]
# Of all estimators, but for the snapshot, which parameters have whose gradients nobody corrects.
KEYS = (
    *("last_grad", "reference_grad", "next_reference_grad"),
    *("mean_grad", "grad_sum", "grad_count"),
    *("snapshot_grad", "snapshot_count"),
)


class Estimator:
    """The plain gradient ("none", and any other with gamma 0):

        c_t = g_t

    State: none. Cost: one gradient an update.
    """

    keys: tuple[str, ...] = ()
    """of what it keeps in a parameter's state"""
    corrects = False
    """whether it has references"""
    keeps = False
    """whether a kernel is to leave g_t in the memory of r_t, as the next step's reference"""
    lasting = False
    """whether r_t serves later steps too, so that a kernel must not work in its memory"""

    def weight(self, group: dict[str, Any]) -> Number:
        """w, the weight of g_t, by the settings of a group."""
        return 1.0

    def reference(self, state: State) -> Tensor | None:
        """r_t; None: c_t = g_t."""
        return None

    def make_ready(self, parameter: Tensor, state: State, group: dict[str, Any]) -> None:
        """Sees to it that a step, which `state` has counted, finds what it needs, and nothing that others left: that
        would be out of date when it is needed again."""
        for key in KEYS:
            if key not in self.keys:
                state.pop(key, None)

    def before_step(self, batch: Batch, run: Runner, clipping: Clipping) -> None:
        """What is to be done before the norms of c_t are taken."""

    def after_step(self, batch: Batch, run: Runner, clipping: Clipping) -> None:
        """What is to be done after a step, also after one that changed nothing (`clipping.skipped`)."""


class SecondGradient(Estimator):
    """An estimator that is handed another gradient for each step (`MARS.record_reference_gradient`)."""

    corrects = True

    def __init__(self) -> None:
        self._spare: dict[Tensor, Tensor] = {}  # memory that waits for the next references

    @property
    def spare_bytes(self) -> int:
        """Bytes that are held beside the states."""
        return sum(memory.numel() * memory.element_size() for memory in self._spare.values())

    def forget(self) -> None:
        """Lets go of memory that holds no reference."""
        self._spare.clear()

    def start_record(self, states: list[tuple[Tensor, State, bool]]) -> None:
        """Before gradients are recorded.

        Args:
            states: of every parameter that has one, with whether its gradient is corrected, now or at times.
        """

    def record(self, parameter: Tensor, state: State, grad: Tensor) -> Tensor:
        """Copies a gradient. Returns the copy."""
        raise NotImplementedError

    def check(self, states: list[State]) -> None:
        """Raises RuntimeError where states that were stepped before lack the gradient for the coming step."""
        raise NotImplementedError

    def finish(self, states: list[tuple[Tensor, State, bool]]) -> None:
        """After a step; `states` as above."""
        raise NotImplementedError


def filled_like(parameter: Tensor, value: float, dtype: torch.dtype) -> Tensor:
    """A new tensor of a parameter's shape, layout and device."""
    return torch.full_like(parameter, value, dtype=dtype, memory_format=torch.preserve_format)
