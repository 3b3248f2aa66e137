"""The learning rate of each update: linear warm-up, then a cosine (arXiv 1608.03983) down to a minimum."""

from __future__ import annotations

import math

from torch.optim import Optimizer


def learning_rate_at(update: int, peak: float, minimum: float, warmup: int, decay: int) -> float:
    """The learning rate of an update.

    Args:
        update: which update, from 1.
        peak: learning rate of update `warmup`.
        minimum: learning rate of update `decay` and all after it.
        warmup: updates of linear warm-up; update 1 has peak / warmup, so that no update is wasted on lr 0.
        decay: update at which the minimum is reached.
    """
    if update >= decay:
        return minimum
    if update < warmup:
        return peak * update / warmup
    progress = (update - warmup) / (decay - warmup)
    return minimum + (peak - minimum) * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Sets every group's learning rate to `lr` times the group's own `lr_scale` (1 where it has none)."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
