"""The forward and backward passes of an update: that on its own batch, and those that an estimator of the gradient
needs beside it (`optim/estimators/`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Optimizer

from configs import TrainConfig
from data.batches import dropout_seed, snapshot_batch
from optim import clip_gradients, record_reference_gradient, record_snapshot_gradient, snapshot_weights, take_snapshot
from training.device import autocast
from training.processes import Processes

if TYPE_CHECKING:
    from training.ahead import BatchesAhead


class Pass(NamedTuple):
    """A gradient that an update needs."""

    batch: int
    """the number of its batch"""
    weights: Literal["present", "snapshot"]
    use: Literal["step", "reference", "snapshot"]


def passes_of(config: TrainConfig, update: int) -> Iterator[Pass]:
    """The gradients of an update (from 1), in order; its own comes last.

    The exact form takes that of the present weights on the next batch, for the update after this one. With svrg every
    `snapshot_interval` updates the present weights become the snapshot, with their mean gradient over batches that no
    update sees; and each update takes a second gradient at the snapshot, on its own batch and with its own dropout.
    """
    if config.exact:
        yield Pass(update + 1, "present", "reference")
    if config.estimator == "svrg":
        if (update - 1) % config.snapshot_interval == 0:
            for index in range(config.snapshot_batches):
                yield Pass(snapshot_batch(update, index), "present", "snapshot")
        yield Pass(update, "snapshot", "reference")
    yield Pass(update, "present", "step")


def passes_an_update(config: TrainConfig) -> float:
    """How many gradients an update takes, on average."""
    if config.estimator == "svrg":
        return 2 + config.snapshot_batches / config.snapshot_interval
    return 2 if config.exact else 1


class Passes:
    """Finds the gradients of a run's updates.

    Args:
        model: whose parameters have them, wrapped for several processes.
        optimizer: is handed those that its estimator needs.
        scaler: of losses in float16.
        batches: this process's.
    """

    def __init__(
        self,
        config: TrainConfig,
        processes: Processes,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: GradScaler,
        batches: BatchesAhead,
    ) -> None:
        self.config, self.processes, self.batches = config, processes, batches
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.steps = config.accumulation_steps(processes.size)
        # The scaler unscales gradients once for each optimizer. This one stands for the others' further gradients.
        self._stand_in = SGD(model.parameters(), lr=0.0)

    def gradient(self, update: int) -> tuple[Tensor, Tensor]:
        """Leaves an update's gradient, clipped, with the model, and what else the optimizer needs with the optimizer.

        Returns:
            this process's mean loss, and the gradient's norm before it was clipped (0-d).
        """
        *others, own = passes_of(self.config, update)
        first = True
        for other in others:
            if other.use == "snapshot" and first:
                take_snapshot(self.optimizer)
                first = False
            with snapshot_weights(self.optimizer) if other.weights == "snapshot" else nullcontext():
                self._backward(other.batch)
            self._unscale_and_clip(self._stand_in)
            if other.use == "snapshot":
                record_snapshot_gradient(self.optimizer)
                self.scaler.update()  # an overflow is one for the batches after it
            else:
                record_reference_gradient(self.optimizer)
            self.clear()
        loss = self._backward(own.batch)
        return loss, self._unscale_and_clip(self.optimizer)

    def draw(self, update: int, draw: int) -> None:
        """Leaves the gradient on another draw (from 1) of an update's batch with the model, scaled and not clipped."""
        self._backward(update, draw)

    def clear(self) -> None:
        """Clears the model's gradients."""
        self.processes.clear_gradients(self.model, self.optimizer)

    def _backward(self, batch: int, *draw: int) -> Tensor:
        """The gradient on a batch, or another draw of it, averaged over micro-batches and processes. Returns this
        process's mean loss."""
        config, device = self.config, self.processes.device
        if config.dropout > 0:
            torch.manual_seed(dropout_seed(config.seed, batch, self.processes.rank, *draw))
        total = torch.zeros((), device=device)
        for step in range(self.steps):
            inputs, targets = self.batches.micro_batch(batch, step, *draw)
            with self.processes.accumulate(self.model, last=step == self.steps - 1):
                with autocast(device, config.dtype):
                    loss = self.model(inputs, targets)
                loss = loss / self.steps
                self.scaler.scale(loss * config.gradient_multiplier).backward()
            total += loss.detach()
        self.processes.average_gradients(self.model)
        return total

    def _unscale_and_clip(self, optimizer: Optimizer) -> Tensor:
        """Takes the scaler's factor out of the gradients and clips them. Returns their norm before clipping."""
        self.scaler.unscale_(optimizer)
        return clip_gradients(self.model.parameters(), self.config.grad_clip)
