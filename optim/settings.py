"""What settings of `MARS` can be."""

from __future__ import annotations

import math
from typing import Any

import torch

from optim.preconditioner import PRECONDITIONERS

CHOICES = {
    "preconditioner": tuple(PRECONDITIONERS),
    "clip": ("tensor", "global", "none"),
    "first_step": ("paper", "official"),
    "last_grad": ("full", "bfloat16", "folded"),
    "orthogonal": ("newton-schulz", "svd"),
    "factors": ("averaged", "accumulated"),
}


def check_settings(group: dict[str, Any], scheduled: bool) -> None:
    """Checks the settings of a parameter group.

    Args:
        group: every setting.
        scheduled: whether gamma follows a schedule.

    Raises:
        ValueError: a setting that is out of range or unknown, or two that exclude each other.
    """
    for name in ("lr", "eps", "weight_decay", "damping"):
        if not (_is_number(group[name]) and 0 <= group[name] < math.inf):
            raise ValueError(f"{name}={group[name]!r} must be a finite number, not negative")
    betas = group["betas"]
    if not (isinstance(betas, tuple | list) and len(betas) == 2 and all(_is_number(b) and 0 <= b < 1 for b in betas)):
        raise ValueError(f"betas={betas!r} must be two numbers in [0, 1)")
    if not (_is_number(group["gamma"]) and math.isfinite(group["gamma"])):
        raise ValueError(f"gamma={group['gamma']!r} must be a finite number, or a function of the step that gives one")
    interval = group["refresh_interval"]
    if not (isinstance(interval, int) and not isinstance(interval, bool) and interval >= 1):
        raise ValueError(f"refresh_interval={interval!r} must be a whole number, 1 or more")
    if not isinstance(group["exact"], bool):
        raise ValueError(f"exact={group['exact']!r} must be True or False")
    for name, allowed in CHOICES.items():
        if group[name] not in allowed:
            raise ValueError(f"{name}={group[name]!r} must be one of {', '.join(allowed)}")
    if group["exact"] and group["last_grad"] != "full":
        raise ValueError(f"last_grad={group['last_grad']!r} is for the approximate form; exact=False, or 'full'")
    if group["last_grad"] == "folded":
        _check_folded(group, scheduled)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)


def _check_folded(group: dict[str, Any], scheduled: bool) -> None:
    """The identity behind the folded form holds for m_t alone, of gradients that are not clipped."""
    folding = [name for name, preconditioner in PRECONDITIONERS.items() if preconditioner.folds]
    for problem, wrong in {
        "clip='none'": group["clip"] != "none",
        "a gamma that does not change": scheduled,
        f"a preconditioner that looks at m alone ({', '.join(folding)})": group["preconditioner"] not in folding,
    }.items():
        if wrong:
            raise ValueError(f"last_grad='folded' needs {problem}")
