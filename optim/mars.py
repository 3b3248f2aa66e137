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

ORTHOGONAL = ("newton-schulz", "svd")
CLIPS = ("tensor", "global", "none")
FIRST_STEPS = ("paper", "official")


class MARS(Optimizer):
    """MARS: a preconditioned method on a gradient estimate of less variance (Algorithms 1 to 4).

    For each parameter x with gradient g_t and reference gradient r_t:

        c_t = g_t + gamma * beta1 / (1 - beta1) * (g_t - r_t), clipped to norm 1
        m_t = beta1 * m_{t-1} + (1 - beta1) * c_t
        x  <- x - lr * (direction(m_t, c_t) + weight_decay * x)

    The reference is the last gradient (approximate form), or the gradient of the last parameters on this step's batch
    (exact form), for which `record_reference_gradient` is called once a step.

    Args:
        params: parameters or parameter groups; every other argument but `exact` can be set for a group.
        lr: learning rate.
        betas: decay of m and, where the preconditioner has one, of the second moment of c.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay, times lr.
        gamma: scale of the correction; 0 is the preconditioner's plain method and keeps no reference.
        preconditioner: "adamw"; "lion", the sign of m; "shampoo", the orthogonal factor of m, for tensors of two
            dimensions or more.
        exact: use the exact form.
        clip: "tensor" clips each tensor's c_t to norm 1 (the published code), "global" all tensors of such groups as
            one vector (the paper), "none" does not clip.
        first_step: what the first step takes as its reference: "paper" the gradient itself, so that the correction is
            zero; "official" zero, as the published code does.
        orthogonal: how "shampoo" finds the orthogonal factor: "newton-schulz" (five iterations) or "svd" (exact, slow).

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
        exact: bool = False,
        clip: str = "tensor",
        first_step: str = "paper",
        orthogonal: str = "newton-schulz",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "gamma": gamma,
            "preconditioner": preconditioner,
            "exact": exact,
            "clip": clip,
            "first_step": first_step,
            "orthogonal": orthogonal,
        }
        self._clipped: list[Tensor] = []
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters.

        Raises:
            ValueError: a setting out of range or unknown.
        """
        _check_settings(self.defaults | param_group)
        if param_group.get("exact", self.defaults["exact"]) != self.defaults["exact"]:
            raise ValueError("exact is a setting of the whole optimizer, not of a group")
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
            RuntimeError: a sparse gradient; a tensor with fewer dimensions than its preconditioner needs; in the exact
                form, no reference gradient. Nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        work = list(self._with_gradient())
        if self.defaults["exact"]:
            self._check_references(work)
        for parameter, _, group in work:
            self._state_of(parameter, group)["step"] += 1
        self._clipped = []
        together = self._global_clip_factor(work)
        for parameter, grad, group in work:
            state = self.state[parameter]
            c = _estimate(grad, state, group)
            if group["clip"] == "tensor":
                c = c.mul(clip_factor(self._norm(c)))
            elif group["clip"] == "global":
                c = c.mul(together.to(c.device))
            _advance_reference(grad, state, group)

            m = state["exp_avg"].lerp_(c, 1 - group["betas"][0])
            direction = PRECONDITIONERS[group["preconditioner"]].direction(m, c, state, group)
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
        return loss

    @torch.no_grad()
    def record_reference_gradient(self) -> None:
        """Exact form: takes the present gradients, which must be those of the current parameters on the *next* batch,
        for the correction of the step after the coming one.

        An update is: gradient on the next batch, `record_reference_gradient()`, `zero_grad()`, gradient on this batch,
        `step()`.

        Where any of them is not finite (a float16 pass that overflowed) they are of no use, and the step that they
        were for makes no correction.

        Raises:
            RuntimeError: the optimizer is not exact, or a gradient is sparse.
        """
        if not self.defaults["exact"]:
            raise RuntimeError("record_reference_gradient() is for MARS(..., exact=True)")
        work = [item for item in self._with_gradient() if item[2]["gamma"] != 0]
        if not work:
            return
        finite = norm_of_all([torch.linalg.vector_norm(grad) for _, grad, _ in work]).isfinite()
        for parameter, grad, group in work:
            reference = torch.where(finite.to(grad.device), grad, math.nan)
            state = self._state_of(parameter, group)
            if "next_reference_grad" in state:  # the step before was skipped, as a GradScaler does after an overflow
                state["reference_grad"] = state["next_reference_grad"]
            state["next_reference_grad"] = reference

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
                if parameter.dim() < PRECONDITIONERS[group["preconditioner"]].min_dim:
                    raise RuntimeError(
                        f"preconditioner {group['preconditioner']!r} cannot step a tensor of shape "
                        f"{tuple(parameter.shape)}; put vectors in a group with preconditioner='adamw'"
                    )
                yield parameter, parameter.grad, group

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state, made at its first step."""
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)  # on the CPU: reading it must not wait for a device
            for name in ("exp_avg", *PRECONDITIONERS[group["preconditioner"]].state_names):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _norm(self, c: Tensor) -> Tensor:
        """The norm of a vector that is to be clipped, noted for the clip rate."""
        norm = torch.linalg.vector_norm(c)
        self._clipped.append(norm > 1)
        return norm

    def _check_references(self, work: list[tuple[Tensor, Tensor, dict[str, Any]]]) -> None:
        """A parameter that had no gradient on the batch of the reference has a reference of zero; that none at all has
        one means that it was not recorded."""
        later = [self.state[p] for p, _, group in work if group["gamma"] != 0 and self.state[p].get("step", 0) > 0]
        if later and not any("reference_grad" in state for state in later):
            raise RuntimeError(
                "exact MARS has no reference gradient for this step: in each update, compute the gradient on the next "
                "batch and call record_reference_gradient() before computing the gradient on this batch"
            )

    def _global_clip_factor(self, work: list[tuple[Tensor, Tensor, dict[str, Any]]]) -> Tensor:
        """The factor for all groups with clip "global". Their estimates are computed here and again in the step, which
        costs time but no memory."""
        norms = [
            torch.linalg.vector_norm(_estimate(grad, self.state[parameter], group))
            for parameter, grad, group in work
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
    if (reference := state.get("reference_grad" if group["exact"] else "last_grad")) is None:
        if group["first_step"] == "paper" and (state["step"] == 1 or not group["exact"]):
            return grad
        reference = torch.zeros_like(grad)
    elif group["exact"]:
        reference = torch.where(reference.isnan(), grad, reference)  # see record_reference_gradient
    return corrected_gradient(grad, reference, group["gamma"], group["betas"][0])


def _advance_reference(grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """The reference of the next step: in the exact form what was recorded for it, else a copy of this gradient, whose
    own memory belongs to the parameter and is reused or zeroed before then."""
    if group["exact"]:
        state.pop("reference_grad", None)
        if "next_reference_grad" in state:
            state["reference_grad"] = state.pop("next_reference_grad")
    elif group["gamma"] == 0:
        state.pop("last_grad", None)  # it would be out of date by the time that gamma is not 0 again
    elif "last_grad" in state:
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
    for name, allowed in (
        ("preconditioner", PRECONDITIONERS),
        ("clip", CLIPS),
        ("first_step", FIRST_STEPS),
        ("orthogonal", ORTHOGONAL),
    ):
        if group[name] not in allowed:
            raise ValueError(f"{name}={group[name]!r} must be one of {', '.join(allowed)}")
