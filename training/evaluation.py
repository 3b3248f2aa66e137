"""The validation loss: over the whole file, in order, shared by all processes, without a trace in training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from data.batches import IGNORED, EvaluationBatches
from training.device import autocast, to_device
from training.processes import Processes


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    batches: EvaluationBatches,
    processes: Processes,
    dtype: str,
    stopping: Callable[[], bool] = lambda: False,
) -> float | None:
    """Mean cross-entropy in nats a token over the validation file; the same on every process. None where it was broken
    off.

    Uses no random numbers and leaves the model in its mode. Losses are gathered on the device and read once, and summed
    in float64, so that the result depends neither on the number of processes nor on the micro-batch.

    Args:
        model: returns the mean loss over the targets that count of (inputs, targets).
        batches: this process's share.
        dtype: of the forward pass.
        stopping: asked before each batch; when one process says yes, all break off.
    """
    was_training = model.training
    model.eval()
    losses, counts, broken_off = [], [], False
    for index in range(batches.rounds):
        if broken_off := processes.any(stopping()):
            break
        if index >= len(batches):
            continue
        inputs, targets = batches[index]
        counts.append(int((targets != IGNORED).sum()))
        with autocast(processes.device, dtype):
            loss = model(to_device(inputs, processes.device), to_device(targets, processes.device))
        losses.append(loss)
    model.train(was_training)
    if broken_off:
        return None
    means = torch.stack(losses).cpu().double().tolist() if losses else []
    total = sum(mean * count for mean, count in zip(means, counts, strict=True))
    total, count = processes.sum([total, float(sum(counts))])
    return total / count
