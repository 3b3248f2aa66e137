"""The tensors that one step treats alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optim.estimator import Number, Scalars, compute_dtype, corrected_gradient
from optim.gradients import host_norm
from optim.kernels import Flags

if TYPE_CHECKING:
    from optim.estimators import Estimator


@dataclass
class Batch:
    """Parameters with gradients that share a group, a step count, a dtype and a device."""

    group: dict[str, Any]
    estimator: Estimator
    step: int
    """which step this is for these parameters, from 1"""
    parameters: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    clips: list[Tensor] = field(default_factory=list)
    """the factor of each c_t, 0-d, NaN where the step is to change nothing"""

    @property
    def dtype(self) -> torch.dtype:
        """Of arithmetic and moments."""
        return compute_dtype(self.parameters[0].dtype)

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def corrected(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every parameter with its c_t before the clip; in the folded form with the part of it that depends on g_t."""
        scalars = self.scalars()
        for parameter, grad, reference in zip(self.parameters, self.grads, self.references, strict=True):
            yield parameter, corrected_gradient(grad, reference, scalars, self.folded)

    @property
    def gamma(self) -> Number:
        """Of this step; where it is known on a device alone, 0-d and there."""
        gamma: Number = self.group["gamma"]
        if not isinstance(gamma, Tensor):
            return gamma
        return gamma.item() if "cpu" in (gamma.device.type, self.device.type) else gamma.to(self.device)

    @cached_property
    def grad_norms(self) -> Tensor:
        """||g_t|| of each; in float64 on a CPU."""
        if self.device.type == "cpu":
            return torch.tensor([host_norm(grad) for grad in self.grads], dtype=torch.float64)
        return torch.stack(torch._foreach_norm(self.grads, 2, dtype=self.dtype))

    @property
    def folded(self) -> bool:
        """Whether the last gradients are folded into the moments."""
        return self.group["last_grad"] == "folded"

    @property
    def references(self) -> list[Tensor | None]:
        """r_t of each, None where there is no correction."""
        return [self.estimator.reference(state) for state in self.states]

    @property
    def weight(self) -> Number:
        """Of g_t in c_t, where r_t has the rest."""
        return self.estimator.weight(self.group | {"gamma": self.gamma})

    @property
    def corrects(self) -> bool:
        """Whether c_t may be another vector than g_t. To look at a gamma on a device would be to wait for it."""
        return self.estimator.corrects and (isinstance(self.gamma, Tensor) or self.gamma != 0)

    @property
    def moments(self) -> list[Tensor]:
        """m_{t-1} of each; in the folded form s_{t-1}."""
        return [state["folded" if self.folded else "exp_avg"] for state in self.states]

    @property
    def guarded(self) -> bool:
        """Whether kernels see to it that a step changes nothing; on a CPU, where that is known before, they do not run
        then."""
        return self.device.type != "cpu"

    @property
    def flags(self) -> Flags:
        """What kernels are compiled for."""
        return Flags(self.estimator.keeps, self.folded, self.guarded, self.estimator.lasting)

    def scalars(self, corrects_first_moment: bool = False, scale: float = 1.0) -> Scalars:
        """What this step multiplies with.

        Args:
            corrects_first_moment: whether the direction is to be divided by 1 - beta1^t.
            scale: a factor of the step size.
        """
        group, (beta1, beta2) = self.group, self.group["betas"]
        return Scalars(
            gamma=self.gamma,
            boost=self.weight,
            rate=1 - beta1,
            rate2=1 - beta2,
            root_scale=(1 - beta2**self.step) ** -0.5,
            eps=group["eps"],
            step_size=group["lr"] * scale / (1 - beta1**self.step if corrects_first_moment else 1),
            decay=1 - group["lr"] * group["weight_decay"],
        )
