"""What settings of `MARS` can be."""

from __future__ import annotations

import math
from typing import Any

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
        if not 0 <= group[name] < math.inf:
            raise ValueError(f"{name}={group[name]} must be a finite number, not negative")
    if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas={group['betas']} must be two numbers in [0, 1)")
    if not math.isfinite(group["gamma"]):
        raise ValueError(f"gamma={group['gamma']} must be a finite number, or a function of the step that gives one")
    if not (isinstance(group["refresh_interval"], int) and group["refresh_interval"] >= 1):
        raise ValueError(f"refresh_interval={group['refresh_interval']} must be a whole number, 1 or more")
    for name, allowed in CHOICES.items():
        if group[name] not in allowed:
            raise ValueError(f"{name}={group[name]!r} must be one of {', '.join(allowed)}")
    if group["last_grad"] == "folded":
        _check_folded(group, scheduled)


def _check_folded(group: dict[str, Any], scheduled: bool) -> None:
    """The identity behind the folded form holds for m_t alone, of gradients that are not clipped."""
    folding = [name for name, preconditioner in PRECONDITIONERS.items() if preconditioner.folds]
    for problem, wrong in {
        "exact=False": group["exact"],
        "clip='none'": group["clip"] != "none",
        "a gamma that does not change": scheduled,
        f"a preconditioner that looks at m alone ({', '.join(folding)})": group["preconditioner"] not in folding,
    }.items():
        if wrong:
            raise ValueError(f"last_grad='folded' needs {problem}")
