"""MARS in float64 as the paper states it (arXiv 2411.10438v4, Algorithms 1 to 4), for tests to compare with.

Written from the paper to be read beside it, slowly and plainly. It shares no code with `optim/`, on purpose: a mistake
there must not be repeated here. The names are the paper's: x parameter, g gradient, r the gradient at the last
parameters, c the corrected and clipped gradient, m and v the moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """The settings of a parameter group. `gamma` is a number or gamma_t, a function of the step 1, 2, ..."""

    lr: float
    betas: tuple[float, float] = (0.95, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    gamma: float | Callable[[int], float] = 0.025
    preconditioner: str = "adamw"
    clip: str = "tensor"
    first_step: str = "paper"
    last_grad: str = "full"


@dataclass
class Parameter:
    """A parameter x with everything that is kept for it from step to step."""

    x: Tensor
    settings: Settings
    t: int = 0
    m: Tensor = field(init=False)
    v: Tensor = field(init=False)
    c: Tensor = field(init=False)
    last_g: Tensor | None = None

    def __post_init__(self) -> None:
        self.x = self.x.detach().double().clone()
        self.m = torch.zeros_like(self.x)
        self.v = torch.zeros_like(self.x)


class ReferenceMARS:
    """Algorithm 1, over all parameters. One without a gradient in a step keeps everything it has, its t included."""

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.parameters: list[Parameter] = []

    def add(self, x: Tensor, settings: Settings) -> Parameter:
        """A parameter joins, at the beginning or later."""
        self.parameters.append(Parameter(x, settings))
        return self.parameters[-1]

    def step(self, gradients: Sequence[Tensor | None], references: Sequence[Tensor | None] | None = None) -> None:
        """One pass of Algorithm 1's loop.

        Args:
            gradients: g_t of each parameter, in the order in which they were added.
            references: exact form, r_t of each parameter: the gradient at x_{t-1} on the batch of step t.
        """
        if references is None:
            references = [None] * len(self.parameters)
        stepped = []
        t = 1 + max((p.t for p in self.parameters), default=0)
        for p, g, r in zip(self.parameters, gradients, references, strict=True):
            if g is None:
                continue
            g = g.double().clone()
            p.t += 1
            if not self.exact:
                r = p.last_g
                p.last_g = g.bfloat16().double() if p.settings.last_grad == "bfloat16" else g
            p.c = estimate(g, first_reference(p, g) if r is None else r.double(), p, t)
            stepped.append(p)

        # "global" is the paper's clip: all of c_t, of the whole model, is one vector.
        norm_of_all = math.sqrt(sum(norm(p.c) ** 2 for p in stepped if p.settings.clip == "global"))
        for p in stepped:
            if p.settings.clip == "tensor":
                p.c = clip(p.c, norm(p.c))
            elif p.settings.clip == "global":
                p.c = clip(p.c, norm_of_all)

        for p in stepped:
            s = p.settings
            beta1, _ = s.betas
            p.m = beta1 * p.m + (1 - beta1) * p.c
            p.x = p.x * (1 - s.lr * s.weight_decay) - s.lr * DIRECTIONS[s.preconditioner](p)


def gamma_t(p: Parameter, t: int) -> float:
    return p.settings.gamma(t) if callable(p.settings.gamma) else p.settings.gamma


def first_reference(p: Parameter, g: Tensor) -> Tensor:
    """r_t where no gradient is known for it."""
    if p.t > 1:
        return torch.zeros_like(g)  # exact form: the parameter took no part in that loss, so its gradient is zero
    if p.settings.first_step == "paper":
        return g  # x_1 = x_0
    return torch.zeros_like(g)  # the published code


def estimate(g: Tensor, r: Tensor, p: Parameter, t: int) -> Tensor:
    """c_t before clipping, at step t of those parameters that have taken the most."""
    beta1, _ = p.settings.betas
    return g + gamma_t(p, t) * beta1 / (1 - beta1) * (g - r)


def norm(c: Tensor) -> float:
    return math.sqrt((c * c).sum().item())


def clip(c: Tensor, length: float) -> Tensor:
    """c, or c / length if the vector that it is or belongs to is longer than 1."""
    return c / length if length > 1 else c


def adamw(p: Parameter) -> Tensor:
    """Algorithm 2: the second moment is that of the clipped c_t, not of the gradient."""
    beta1, beta2 = p.settings.betas
    p.v = beta2 * p.v + (1 - beta2) * p.c**2
    m_hat = p.m / (1 - beta1**p.t)
    v_hat = p.v / (1 - beta2**p.t)
    return m_hat / (v_hat.sqrt() + p.settings.eps)


def lion(p: Parameter) -> Tensor:
    """Algorithm 3."""
    return p.m.sign()


def shampoo(p: Parameter) -> Tensor:
    """Algorithm 4: U V^T of m_t = U S V^T, times the published code's sqrt(max(1, rows / columns)).

    A tensor of more than two dimensions is the matrix of shape[0] rows. Singular values that are exactly zero have no
    direction and contribute none.
    """
    if p.m.numel() == 0:
        return p.m
    matrix = p.m.reshape(p.m.shape[0], -1)
    rows, columns = matrix.shape
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    factor = u @ torch.diag((s > 0).double()) @ vh
    return math.sqrt(max(1, rows / columns)) * factor.reshape(p.m.shape)


def sgd(p: Parameter) -> Tensor:
    """Algorithm 1 with the identity as its preconditioner: the step is along m_t itself."""
    return p.m


DIRECTIONS: dict[str, Callable[[Parameter], Tensor]] = {"adamw": adamw, "lion": lion, "shampoo": shampoo, "sgd": sgd}
