"""What settings of `MARS` can be."""

from __future__ import annotations

import math
from typing import Any

import torch

from optim.estimators import ESTIMATORS
from optim.preconditioner import PRECONDITIONERS

CHOICES = {
    "estimator": ESTIMATORS,
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
    for name in ("refresh_interval", "reference_interval"):
        interval = group[name]
        if not (isinstance(interval, int) and not isinstance(interval, bool) and interval >= 1):
            raise ValueError(f"{name}={interval!r} must be a whole number, 1 or more")
    if not isinstance(group["exact"], bool):
        raise ValueError(f"exact={group['exact']!r} must be True or False")
    for name, allowed in CHOICES.items():
        if group[name] not in allowed:
            raise ValueError(f"{name}={group[name]!r} must be one of {', '.join(allowed)}")
    if group["estimator"] != "recursive":
        _check_not_recursive(group)
    if group["exact"] and group["last_grad"] != "full":
        raise ValueError(f"last_grad={group['last_grad']!r} is for the approximate form; exact=False, or 'full'")
    if group["last_grad"] == "folded":
        _check_folded(group, scheduled)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)


def _check_not_recursive(group: dict[str, Any]) -> None:
    """Some settings are of that estimator's form alone; a plain group may be in an exact optimizer."""
    only = [f"last_grad={group['last_grad']!r}"] if group["last_grad"] != "full" else []
    only += ["exact=True"] if group["exact"] and group["estimator"] != "none" else []
    if only:
        raise ValueError(f"{only[0]} is for estimator='recursive', not {group['estimator']!r}")


def check_whole(group: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Checks what a group must have in common with its optimizer, which is handed gradients for all of them.

    Raises:
        ValueError: a setting that is not a group's own.
    """
    if group["exact"] != defaults["exact"]:
        raise ValueError("exact is a setting of the whole optimizer, not of a group")
    ours, all_of_it = group["estimator"], defaults["estimator"]
    if ours != "none" and (ours == "svrg") != (all_of_it == "svrg"):
        raise ValueError(
            f"estimator={ours!r} cannot be a group's where the optimizer's is {all_of_it!r}: svrg is a setting of the "
            "whole optimizer, in which a group can be 'none'"
        )


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
