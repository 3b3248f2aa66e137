"""What changes from update to update: the learning rate, and the scale of the correction of MARS."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from torch.optim import Optimizer


def learning_rate_at(
    update: int, peak: float, minimum: float, warmup: int, decay: int, first_zero: bool = False
) -> float:
    """The learning rate of an update: linear warm-up, then a cosine (arXiv 1608.03983) down to a minimum.

    Args:
        update: which update, from 1.
        peak: learning rate of update `warmup`.
        minimum: learning rate of update `decay` and all after it.
        warmup: updates of linear warm-up; update 1 has peak / warmup, so that no update is wasted on lr 0.
        decay: update at which the minimum is reached.
        first_zero: count updates from 0, as the published loop does: each has the learning rate of the one before it.
    """
    if first_zero:
        update -= 1
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


@dataclass(frozen=True)
class LinearGamma:
    """A gamma that goes from `start` at the first step to `end` at step `steps`, and stays there."""

    start: float
    end: float
    steps: int

    def __str__(self) -> str:
        return f"linear from {self.start:g} to {self.end:g}"

    def __call__(self, step: int) -> float:
        """Gamma of a step, from 1."""
        progress = min(1.0, (step - 1) / max(1, self.steps - 1))
        return self.start + (self.end - self.start) * progress


GAMMA_SCHEDULE = r"^linear:[^:]+:[^:]+$"  # linear:START:END


def gamma_schedule(gamma: float | str, steps: int) -> float | LinearGamma:
    """A number as it is, or the schedule that `linear:START:END` stands for, over so many steps.

    Raises:
        ValueError: a text of another form.
    """
    if not isinstance(gamma, str):
        return gamma
    try:
        if not re.fullmatch(GAMMA_SCHEDULE, gamma):
            raise ValueError
        start, end = (float(part) for part in gamma.split(":")[1:])
        if not (math.isfinite(start) and math.isfinite(end)):
            raise ValueError
    except ValueError:
        raise ValueError(f"gamma={gamma!r} must be a number or linear:START:END, such as linear:0.05:0") from None
    return LinearGamma(start, end, steps)
