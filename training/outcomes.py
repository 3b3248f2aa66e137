"""What comes of each update, its loss and gradient norm, on the way from the device to the host.

To read a number of a CUDA device, the host waits until all that it has launched is done, and then the device waits for
the host. So numbers stay there until somebody wants to see one, and the device itself sees to it that an update that
is not finite changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from training.processes import Processes

MOST = 100  # updates that are not read; more are not worth the longer wait for a run that has gone bad


class Outcomes:
    """The losses and norms of a run's updates.

    Args:
        processes: whose mean counts. The same calls have to be made on all.
        note: called with update, loss and norm of each update, in order; returns whether it may be made.
        deferred: whether updates need not be read at once.
    """

    def __init__(self, processes: Processes, note: Callable[[int, float, float], bool], deferred: bool) -> None:
        self.last = (math.nan, math.nan)
        """loss and gradient norm of the update that was read last"""
        self._processes, self._note, self._deferred = processes, note, deferred
        self._unread: list[tuple[int, Tensor]] = []
        self._made = False  # the update that was read last; where it was not, and at the start, each is looked at

    def add(self, update: int, loss: Tensor, grad_norm: Tensor, read: bool) -> bool | Tensor:
        """Of an update that can now be made.

        Args:
            loss, grad_norm: of this process, scalars on the device.
            read: whether they are wanted now, with those of all updates before.

        Returns:
            whether the update may be made, the same on all processes: on the device (0-d) where it was not read.
        """
        values = torch.stack([loss, grad_norm])
        values = self._processes.mean((values if self._deferred else values.cpu()).double())
        self._unread.append((update, values))
        if self._deferred and self._made and not read and len(self._unread) < MOST:
            return values.isfinite().all()
        rows = torch.stack([values for _, values in self._unread]).tolist()
        updates = [update for update, _ in self._unread]
        self._unread.clear()
        for update, (mean_loss, mean_norm) in zip(updates, rows, strict=True):
            self.last = mean_loss, mean_norm
            self._made = self._note(update, mean_loss, mean_norm)
        return self._made


def defers(device: torch.device, dtype: str) -> bool:
    """Whether reading a number makes the host wait for much. In float16 the scaler reads some in each update."""
    return device.type == "cuda" and dtype != "float16"
