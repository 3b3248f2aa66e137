"""The gamma of each group of parameters: a number, or one that follows a schedule (`schedule.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from optim.schedule import RUNNING_NORM, AdaptiveGamma, GammaSchedule

Group = dict[str, Any]


class Gammas:
    """The schedules of an optimizer's groups, and what they make of the groups' settings."""

    def __init__(self) -> None:
        self.schedules: list[GammaSchedule | None] = []
        """of each group; None: its gamma is a number"""

    @staticmethod
    def schedule_of(gamma: Any) -> tuple[GammaSchedule | None, Any]:
        """The schedule that a setting is, None where it is a number; and the gamma of the first step."""
        if isinstance(gamma, AdaptiveGamma):
            return gamma, gamma.between
        return (gamma, gamma(1)) if callable(gamma) else (None, gamma)

    def add(self, group: Group, schedule: GammaSchedule | None) -> None:
        """Takes note of a new group's schedule."""
        self.schedules.append(schedule)
        if isinstance(schedule, AdaptiveGamma):
            group[RUNNING_NORM] = torch.tensor(math.nan)

    def follow(self, groups: list[Group], step: int) -> list[Group]:
        """Sets the gammas that are functions of the step, which comes next. Returns the groups that have them."""
        followed = []
        for group, schedule in zip(groups, self.schedules, strict=True):
            if callable(schedule):
                group["gamma"] = schedule(step)
                followed.append(group)
        return followed

    @contextmanager
    def adapted(
        self, groups: list[Group], norm_of_all: Callable[[], Tensor], skipped: Callable[[], Tensor | None]
    ) -> Iterator[None]:
        """Sets the gammas that follow the norm of the gradients, and averages that norm after the `with` block.

        Args:
            norm_of_all: of the gradients of a step (0-d); asked only where it is needed.
            skipped: whether the step changes nothing (0-d); known in the end.
        """
        pairs = zip(groups, self.schedules, strict=True)
        adaptive = [(group, schedule) for group, schedule in pairs if isinstance(schedule, AdaptiveGamma)]
        norm = norm_of_all() if adaptive else torch.empty(())
        for group, schedule in adaptive:
            schedule.adapt(group, norm)
        yield
        for group, schedule in adaptive:
            changed_nothing = skipped()
            assert changed_nothing is not None
            schedule.take_in(group, norm, changed_nothing)

    def scheduled(self, groups: list[Group]) -> Tensor | None:
        """The present gamma of the first group in which it follows a schedule (0-d)."""
        for group, schedule in zip(groups, self.schedules, strict=True):
            if schedule is not None:
                gamma = group["gamma"]
                return gamma if isinstance(gamma, Tensor) else torch.tensor(gamma, dtype=torch.float64)
        return None

    def restore(self, groups: list[Group]) -> None:
        """Brings groups that were loaded in line with the schedules that there are now."""
        for group, schedule in zip(groups, self.schedules, strict=True):
            if isinstance(schedule, AdaptiveGamma):
                group.setdefault(RUNNING_NORM, torch.tensor(math.nan))
            elif RUNNING_NORM in group:
                del group[RUNNING_NORM]
                group["gamma"] = float(group["gamma"])
