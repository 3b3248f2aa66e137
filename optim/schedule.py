"""What changes from update to update: the learning rate, and the scale of the correction of MARS."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
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
class _Ramp:
    """A gamma that goes from `start` at the first step to `end` at step `steps`, and stays there."""

    start: float
    end: float
    steps: int

    def progress(self, step: int) -> float:
        """From 0 at the first step to 1."""
        return min(1.0, (step - 1) / max(1, self.steps - 1))


class LinearGamma(_Ramp):
    """A gamma that goes from `start` at the first step to `end` at step `steps` on a line, and stays there."""

    def __str__(self) -> str:
        return f"linear from {self.start:g} to {self.end:g}"

    def __call__(self, step: int) -> float:
        """Gamma of a step, from 1."""
        return self.start + (self.end - self.start) * self.progress(step)


class CosineGamma(_Ramp):
    """A gamma that goes from `start` at the first step to `end` at step `steps` on half a cosine, and stays there."""

    def __str__(self) -> str:
        return f"half a cosine from {self.start:g} to {self.end:g}"

    def __call__(self, step: int) -> float:
        """Gamma of a step, from 1."""
        return self.end + (self.start - self.end) * 0.5 * (1 + math.cos(math.pi * self.progress(step)))


RUNNING_NORM = "running_norm"  # in a parameter group: n_t of an AdaptiveGamma (0-d), NaN before the first step


@dataclass(frozen=True)
class AdaptiveGamma:
    """A gamma that follows the norm of the gradient, of all parameters together, beside that of the steps before:

        n_t = decay * n_{t-1} + (1 - decay) * ||g_t||,    n_1 = ||g_1||
        ratio_t = ||g_t|| / n_{t-1},                      ratio_1 = 1

    It is `gamma_above` where the ratio is above `above`, `gamma_below` where it is below `below`, and else `between`.
    The defaults are those of an overview of MARS, for an estimate of another scale than the paper's.

    `MARS` finds it on the device of the parameters, for which nothing waits, and keeps n_t with its groups' settings.

    Raises:
        ValueError: thresholds that cross, or a decay out of range.
    """

    above: float = 1.5
    gamma_above: float = 0.3
    below: float = 0.5
    gamma_below: float = 0.9
    between: float = 0.7
    decay: float = 0.9

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.above, self.gamma_above, self.below, self.gamma_below, self.between))):
            raise ValueError(f"{self!r}: thresholds and values must be finite")
        if not (0 <= self.below <= self.above and 0 <= self.decay < 1):
            raise ValueError(f"{self!r}: needs 0 <= below <= above, and a decay in [0, 1)")

    def __str__(self) -> str:
        return (
            f"{self.gamma_above:g} where the norm is above {self.above:g} of its running one (decay {self.decay:g}), "
            f"{self.gamma_below:g} below {self.below:g}, else {self.between:g}"
        )

    def adapt(self, group: dict[str, Any], norm: Tensor) -> None:
        """Sets the gamma of a parameter group for a step whose gradients have this norm (0-d)."""
        running = group[RUNNING_NORM] = group[RUNNING_NORM].to(norm)
        ratio = torch.where(running.isnan(), 1.0, norm / running)
        gamma = torch.full_like(ratio, self.between).masked_fill(ratio < self.below, self.gamma_below)
        gamma = gamma.masked_fill(ratio > self.above, self.gamma_above)
        group["gamma"] = gamma.item() if gamma.is_cpu else gamma  # there reading it is to wait for nothing

    def take_in(self, group: dict[str, Any], norm: Tensor, skipped: Tensor) -> None:
        """Averages the norm of a step, after it, unless it changed nothing. Nor does a norm of zero count: the ratio of
        the next one to it would say nothing."""
        running: Tensor = group[RUNNING_NORM]
        average = torch.where(running.isnan(), norm, self.decay * running + (1 - self.decay) * norm)
        group[RUNNING_NORM] = torch.where(skipped | (norm == 0), running, average)


GammaSchedule = Callable[[int], float] | AdaptiveGamma
"""a function of the step, from 1, or of the gradients' norm"""
RAMPS: dict[str, type[LinearGamma] | type[CosineGamma]] = {"linear": LinearGamma, "cosine": CosineGamma}


def gamma_schedule(gamma: float | str, steps: int) -> float | GammaSchedule:
    """A number as it is, or the schedule that a text stands for: linear:START:END and cosine:START:END, over so many
    steps, or adaptive, with numbers of its own adaptive:ABOVE:GAMMA:BELOW:GAMMA:ELSE[:DECAY].

    Raises:
        ValueError: a text of another form, or numbers that no schedule can have.
    """
    if not isinstance(gamma, str):
        return gamma
    name, *texts = gamma.split(":")
    try:
        numbers = [float(text) for text in texts]
        if name in RAMPS and all(map(math.isfinite, numbers)):
            start, end = numbers
            return RAMPS[name](start, end, steps)
        if name == "adaptive" and len(numbers) in (0, 5, 6):
            return AdaptiveGamma(*numbers)
    except ValueError:
        pass
    raise ValueError(
        f"gamma={gamma!r} must be a number, linear:START:END, cosine:START:END (such as linear:0.05:0), or adaptive, "
        "in full adaptive:ABOVE:GAMMA:BELOW:GAMMA:ELSE[:DECAY] with 0 <= BELOW <= ABOVE and 0 <= DECAY < 1"
    )
