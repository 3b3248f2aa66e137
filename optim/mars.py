"""MARS: Make vAriance Reduction Shine (Yuan et al., arXiv 2411.10438).

One optimizer, estimator x preconditioner: `estimator.py` corrects the gradient, `preconditioner.py` turns the moving
average of the corrected gradient into a direction, and the class here keeps state and settings. Every setting can be
given for a parameter group, so that the published recipe's AdamW for vectors is a group with gamma 0 and clip "none".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from optim.estimator import clip_factor, corrected_gradient, norm_of_all
from optim.preconditioner import PRECONDITIONERS

CLIPS = ("tensor", "global", "none")
FIRST_STEPS = ("paper", "official")


class MARS(Optimizer):
    """MARS with the approximate gradient correction (Algorithms 1 and 2).

    For each parameter x with gradient g_t and last gradient g_{t-1}:

        c_t = g_t + gamma * beta1 / (1 - beta1) * (g_t - g_{t-1}), clipped to norm 1
        m_t = beta1 * m_{t-1} + (1 - beta1) * c_t
        x  <- x - lr * (direction(m_t, c_t) + weight_decay * x)

    Args:
        params: parameters or parameter groups; every other argument can be set for a group.
        lr: learning rate.
        betas: decay of m and, where the preconditioner has one, of the second moment of c.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay, times lr.
        gamma: scale of the correction; 0 is the preconditioner's plain method and keeps no last gradient.
        preconditioner: "adamw".
        clip: "tensor" clips each tensor's c_t to norm 1 (the published code), "global" all tensors of such groups as
            one vector (the paper), "none" does not clip.
        first_step: what the first step takes for g_0: "paper" g_1, so that the correction is zero; "official" zero, as
            the published code does.

    Raises:
        ValueError: a setting out of range or unknown, for the optimizer or a group.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        gamma: float = 0.025,
        preconditioner: str = "adamw",
        clip: str = "tensor",
        first_step: str = "paper",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "gamma": gamma,
            "preconditioner": preconditioner,
            "clip": clip,
            "first_step": first_step,
        }
        self._clipped: list[Tensor] = []
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters.

        Raises:
            ValueError: a setting out of range or unknown.
        """
        _check_settings(self.defaults | param_group)
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient.

        Args:
            closure: computes the loss and its gradients anew; its result is returned.

        Raises:
            RuntimeError: a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        self._clipped = []
        together = self._global_clip_factor()
        for parameter, grad, group in self._with_gradient():
            state = self._state_of(parameter, group)
            state["step"] += 1
            c = _estimate(grad, state, group)
            if group["clip"] == "tensor":
                c = c.mul(clip_factor(self._norm(c)))
            elif group["clip"] == "global":
                c = c.mul(together.to(c.device))
            if group["gamma"] != 0:
                _remember(grad, state)

            m = state["exp_avg"].lerp_(c, 1 - group["betas"][0])
            direction = PRECONDITIONERS[group["preconditioner"]].direction(m, c, state, group)
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
        return loss

    def metrics(self) -> dict[str, Tensor]:
        """Figures of the last step, as scalar tensors on the device: `mars/clip_rate`, the share of vectors (tensors,
        or the one vector of clip "global") that were longer than 1; absent where nothing is clipped."""
        if not self._clipped:
            return {}
        first = self._clipped[0].device
        return {"mars/clip_rate": torch.stack([c.to(first) for c in self._clipped]).float().mean()}

    def _with_gradient(self) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
        """Every parameter that has a gradient, with it and its group."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError("MARS does not support sparse gradients; use nn.Embedding(..., sparse=False)")
                yield parameter, parameter.grad, group

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state, made at its first step."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)  # on the CPU: reading it must not wait for a device
            for name in ("exp_avg", *PRECONDITIONERS[group["preconditioner"]].state_names):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _norm(self, c: Tensor) -> Tensor:
        """The norm of a vector that is to be clipped, noted for the clip rate."""
        norm = torch.linalg.vector_norm(c)
        self._clipped.append(norm > 1)
        return norm

    def _global_clip_factor(self) -> Tensor:
        """The factor for all groups with clip "global". Their estimates are computed here and again in the step, which
        costs time but no memory."""
        norms = [
            torch.linalg.vector_norm(_estimate(grad, self.state[parameter], group))
            for parameter, grad, group in self._with_gradient()
            if group["clip"] == "global"
        ]
        if not norms:
            return torch.tensor(1.0)
        norm = norm_of_all(norms)
        self._clipped.append(norm > 1)
        return clip_factor(norm)


def _estimate(grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
    """c_t before clipping; may be `grad` itself."""
    if group["gamma"] == 0:
        return grad
    if "last_grad" in state:
        reference = state["last_grad"]
    elif group["first_step"] == "official":
        reference = torch.zeros_like(grad)
    else:
        return grad
    return corrected_gradient(grad, reference, group["gamma"], group["betas"][0])


def _remember(grad: Tensor, state: dict[str, Any]) -> None:
    """Copies the gradient: its memory belongs to the parameter and is reused or zeroed before the next step."""
    if "last_grad" in state:
        state["last_grad"].copy_(grad)
    else:
        state["last_grad"] = grad.clone()


def _check_settings(group: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= group[name] < math.inf:
            raise ValueError(f"{name}={group[name]} must be a finite number, not negative")
    if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas={group['betas']} must be two numbers in [0, 1)")
    if not math.isfinite(group["gamma"]):
        raise ValueError(f"gamma={group['gamma']} must be a finite number")
    for name, allowed in (("preconditioner", PRECONDITIONERS), ("clip", CLIPS), ("first_step", FIRST_STEPS)):
        if group[name] not in allowed:
            raise ValueError(f"{name}={group[name]!r} must be one of {', '.join(allowed)}")
